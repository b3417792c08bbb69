"""``quantization_config`` of a config.json: which weights are stored in which format."""

import re
from dataclasses import dataclass

from hotrack.core.errors import CheckpointError
from hotrack.modelspec.fields import Fields, shorten

MAX_BLOCK = 1 << 16
MXFP4_GROUP = 32


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """FP8 (E4M3) weights, possibly with experts in MXFP4.

    block        (rows, columns) that share a scale; None: all of a tensor do
    scale_bytes  of one scale: 1 (E8M0, a power of two), 2 (bfloat16) or 4 (float32)
    experts      'fp8' | 'mxfp4'
    ignored      names of modules whose weights are not quantised
    """

    block: tuple[int, int] | None
    scale_bytes: int
    experts: str = "fp8"
    ignored: tuple[str, ...] = ()

    def ignores(self, module: str) -> bool:
        """Whether the weight of ``module`` (its published name) is stored as it is."""
        return any(module == name or module.startswith(name + ".") for name in self.ignored)

    def __str__(self) -> str:
        block = f" in blocks of {self.block[0]}x{self.block[1]}" if self.block else " per tensor"
        return f"FP8{block}" + (", experts MXFP4" if self.experts == "mxfp4" else "")


def parse_quant(fields: Fields, family: str) -> QuantSpec | None:
    """None for a checkpoint that is not quantised. Raises CheckpointError for formats that are not read."""
    if fields.get("quantization_config") is None:
        return None
    config = fields.section("quantization_config")
    method = config.text("quant_method", default="")
    if method != "fp8":
        raise CheckpointError(
            f"{fields.where}: the checkpoint is quantised with {shorten(method)!r}, which is not supported; "
            "'fp8' is. Use the FP8 or bfloat16 release, or a GGUF file"
        )
    if (fmt := config.text("fmt", "format", default="e4m3")) != "e4m3":
        raise config.fail("fmt", "'e4m3'", fmt)
    power_of_two = config.text("scale_fmt", default="float") == "ue8m0"
    # Qwen publishes scales in bfloat16, everybody else in float32; no config says so.
    plain_bytes = 2 if family.startswith("qwen") else 4
    return QuantSpec(
        block=_block(config),
        scale_bytes=1 if power_of_two else plain_bytes,
        experts=_experts(fields, config),
        ignored=_ignored(config),
    )


def _block(config: Fields) -> tuple[int, int] | None:
    sizes = config.integers("weight_block_size", high=MAX_BLOCK, max_len=2)
    if not sizes:
        return None
    if len(sizes) != 2 or 0 in sizes:
        raise config.fail("weight_block_size", "two positive integers", list(sizes))
    return sizes[0], sizes[1]


def _experts(fields: Fields, config: Fields) -> str:
    """Published as ``expert_dtype`` fp4, or ``store_dtype`` mxfp4."""
    named = fields.text("expert_dtype", default=config.text("expert_dtype", "store_dtype", default="fp8"))
    if named not in ("fp8", "fp4", "mxfp4"):
        raise fields.fail("expert_dtype", "'fp8', 'fp4' or 'mxfp4'", named)
    group = config.integer("mxfp4_block_size", high=MAX_BLOCK, default=MXFP4_GROUP)
    if group != MXFP4_GROUP:
        raise config.fail("mxfp4_block_size", str(MXFP4_GROUP), group)
    return "fp8" if named == "fp8" else "mxfp4"


def _ignored(config: Fields) -> tuple[str, ...]:
    found = config.get("modules_to_not_convert", "ignored_layers")
    names = [] if found is None else found
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise config.fail("modules_to_not_convert", "a list of module names", found)
    return tuple(re.sub(r"\.weight$", "", n) for n in names if isinstance(n, str))
