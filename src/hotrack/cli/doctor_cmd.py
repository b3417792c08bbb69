"""`hotrack doctor MODEL`: what a model is and takes, and whether it fits here, before it is fetched."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotrack.cli.options import Json, print_json
from hotrack.config.units import format_size

if TYPE_CHECKING:
    from hotrack.hub.model import ResolvedModel
    from hotrack.modelspec.profile import Profile
    from hotrack.plan.fit import Fit

Facts = dict[str, Any]


def doctor(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder, GGUF file, demo name or Hugging Face repo id; config.json is enough.",
        ),
    ],
    max_model_len: Annotated[
        int | None,
        typer.Option("--max-model-len", min=1, help="Longest request; default: what it was trained for."),
    ] = None,
    json_output: Json = False,
) -> None:
    """What a model is, the bytes it takes on how many GPUs, and whether it fits on this machine."""
    from hotrack.cli.pull_cmd import fetch
    from hotrack.hub.resolve import resolve_config
    from hotrack.modelspec.load import load_profile

    resolved = fetch(model, lambda progress: resolve_config(model, progress=progress))
    profile = load_profile(resolved.path)
    facts = examine(resolved, profile, max_model_len)
    if json_output:
        print_json(facts)
        return
    for line in report(facts):
        print(line)


def examine(resolved: "ResolvedModel", profile: "Profile", max_model_len: int | None) -> Facts:
    """Everything the command says, as plain data; sizes in bytes.

    Raises ConfigError when ``max_model_len`` is more than the model was trained for.
    """
    from hotrack.core.errors import ConfigError
    from hotrack.plan.fit import loaded_bytes, shares

    longest = profile.max_position_embeddings
    tokens = max_model_len or longest
    if tokens > longest:
        raise ConfigError(
            f"--max-model-len {tokens} is more than the {longest} tokens this model was trained for; "
            f"use at most {longest}",
            param="max_model_len",
        )
    stored = stored_bytes(resolved.path)
    return {
        "model": resolved.name,
        "path": str(resolved.path),
        "family": profile.family,
        "served": profile.served,
        "layers": dict(profile.layers),
        "draft_layers": profile.drafts,
        "unread_drafts": profile.unread,
        "experts": {"count": profile.num_experts, "top_k": profile.top_k, "shared": profile.shared_experts},
        "dtype": profile.dtype,
        "quantisation": profile.quantisation,
        "num_parameters": profile.num_parameters,
        "weight_bytes": stored if resolved.kind == "gguf" else profile.num_bytes,
        "loaded_bytes": loaded_bytes(profile) if profile.served else None,
        "stored_bytes": stored,
        "weights": [asdict(piece) for piece in profile.pieces],
        "max_model_len": tokens,
        "kv_bytes_per_token": profile.bytes_per_token(),
        "bytes_per_request": profile.cache_bytes(0),
        "context_bytes": profile.cache_bytes(tokens),
        "gpus": [asdict(share) for share in shares(profile, tokens)],
        "fits": machine(profile, tokens),
    }


def stored_bytes(path: Path) -> int | None:
    """Bytes of the model files that are here; None when there are only descriptions."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) or None


def machine(profile: "Profile", num_tokens: int) -> list[Facts]:
    """How the model would run on the devices of this machine: its GPUs, then its CPU."""
    import psutil

    from hotrack.plan.fit import fit_gpus, fit_host

    found = []
    if gpus := free_gpus():
        fit = fit_gpus(profile, list(gpus.values()), num_tokens)
        found.append({"devices": list(gpus), **_fit(fit)})
    fit = fit_host(profile, psutil.virtual_memory().available, num_tokens)
    return [*found, {"devices": ["cpu"], **_fit(fit)}]


def free_gpus() -> dict[str, int]:
    """Name -> free bytes of each GPU that a process started here may use."""
    from hotrack.core.errors import ConfigError
    from hotrack.members.gpu import Gpus

    gpus = Gpus()
    found: dict[str, int] = {}
    try:
        while (gpu := gpus.find(f"cuda:{len(found)}", {})) is not None:
            found[gpu.name] = gpu.memory().free
    except ConfigError:
        pass  # one more than there are
    return found


def _fit(fit: "Fit") -> Facts:
    return {**asdict(fit), "verdict": fit.verdict}


def report(facts: Facts) -> list[str]:
    """``facts`` in words and tables."""
    return [*_what(facts), "", *_weights(facts), "", *_shares(facts), "", *_verdicts(facts)]


def _what(facts: Facts) -> list[str]:
    layers = ", ".join(f"{count} {kind}" for kind, count in facts["layers"].items() if count)
    experts = facts["experts"]
    lines = [
        f"{facts['model']}: {facts['family']}" + ("" if facts["served"] else ", not run by this version"),
        f"  weights  {_count(facts['num_parameters'])} parameters, {facts['weight_bytes']:,} bytes "
        f"({format_size(facts['weight_bytes'])})",
        f"  format   {_format(facts)}",
        *wrap(layers, 80, initial_indent="  layers   ", subsequent_indent=" " * 11),
    ]
    if experts["count"]:
        shared = f", {experts['shared']} shared" if experts["shared"] else ""
        lines.append(f"  experts  {experts['count']}, {experts['top_k']} per token{shared}")
    if facts["draft_layers"]:
        lines.append(f"  drafts   layers of draft heads: {facts['draft_layers']}, counted above")
    elif facts["unread_drafts"]:
        lines.append("  drafts   not counted: this version does not read draft heads")
    if facts["stored_bytes"]:
        lines.append(f"  on disk  {format_size(facts['stored_bytes'])} in {facts['path']}")
    lines.append(
        f"  cache    {facts['kv_bytes_per_token']:,.0f} bytes per token + "
        f"{format_size(facts['bytes_per_request'])} per request; "
        f"{format_size(facts['context_bytes'])} at {facts['max_model_len']:,} tokens"
    )
    return lines


def _format(facts: Facts) -> str:
    if not facts["quantisation"]:
        return str(facts["dtype"])
    if facts["loaded_bytes"] is None:
        return f"{facts['quantisation']}; the rest {facts['dtype']}"
    return (
        f"{facts['quantisation']}; this version keeps {facts['dtype']}, {format_size(facts['loaded_bytes'])}"
    )


def _weights(facts: Facts) -> list[str]:
    split = {"whole": "on every rank", "tensor": "split", "kv_heads": "by K/V head", "experts": "by expert"}
    rows = [
        (piece["part"], _count(piece["num_parameters"]), format_size(piece["num_bytes"]),
         split[piece["split"]])
        for piece in sorted(facts["weights"], key=lambda piece: -piece["num_bytes"])
    ]  # fmt: skip
    return _table(("part", "parameters", "bytes", "over ranks"), rows, left=(0, 3))


def _shares(facts: Facts) -> list[str]:
    rows = [
        (
            str(share["num_gpus"]), _size(share["tensor_bytes"]), _size(share["expert_bytes"]),
            "-" if share["token_bytes"] is None else f"{share['token_bytes']:,.0f} B",
            _size(share["context_bytes"]), "*" if share["cuts"] else "",
        )
        for share in facts["gpus"]
    ]  # fmt: skip
    titles = ("GPUs", "weights/GPU, TP", "DP + EP", "cache/token", "cache/request", "")
    cut = [f"{share['cuts']} on {share['num_gpus']}" for share in facts["gpus"] if share["cuts"]]
    if not cut:
        return _table(titles, rows)
    note = f"* cuts quantised blocks ({'; '.join(cut)}): spread the experts, or load dequantised"
    return [*_table(titles, rows), *wrap(note, 80, subsequent_indent="  ")]


def _verdicts(facts: Facts) -> list[str]:
    lines = []
    for fit in facts["fits"]:
        count = len(fit["devices"])
        device = fit["devices"][0] if count == 1 else f"{count} x {fit['devices'][0]}"
        size = fit["tensor_parallel_size"]
        how = f" with --tensor-parallel-size {size}" if size > 1 else ""
        line = (
            f"{device}: {fit['verdict']}{how}: {format_size(fit['weight_bytes'])} of weights in "
            f"{format_size(fit['room_bytes'])}"
        )
        tokens = f", then a request of {fit['context_tokens']:,} tokens" if fit["context_tokens"] else ""
        lines.extend(wrap(line + tokens, 80, subsequent_indent="  "))
    return lines


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} B" if number >= 10**9 else f"{number / 1e6:,.1f} M"


def _size(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_size(num_bytes)


def _table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]], left: tuple[int, ...] = ()) -> list[str]:
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (titles, *rows)
    ]
