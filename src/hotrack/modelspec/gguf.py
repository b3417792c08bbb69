"""GGUF headers: metadata and tensor table, checked, without numpy; and the ModelSpec they describe.

Own parser because the file is hostile and the ``gguf`` package's reader builds a numpy view per token (3.6 s
for a 49k vocabulary; this takes 0.03 s). Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from hotrack.core.errors import CheckpointError
from hotrack.modelspec.fields import Fields, shorten
from hotrack.modelspec.parse import parse_config
from hotrack.modelspec.spec import ModelSpec

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_DIMS = 4
MAX_DIM = 1 << 40
DEFAULT_ALIGNMENT = 32

# type id -> struct code; 7 is bool, 8 string, 9 array
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9

# ggml type id -> (name, elements per block, bytes per block)
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}

# GGUF architecture -> family, and GGUF key (after the architecture) -> config.json field
FAMILIES = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
CONFIG_FIELDS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """``shape`` has rows first (GGUF lists them last); ``offset`` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: str
    type_id: int
    offset: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    path: Path
    metadata: dict[str, object]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse and check a GGUF file's header. CheckpointError when it is not one, damaged or unsupported."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is not a file")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data, path).header()
    except (OSError, ValueError) as e:  # mmap refuses an empty file with ValueError
        raise CheckpointError(f"cannot read {path}: {e}") from e


def spec_from_gguf(header: GgufHeader) -> ModelSpec:
    """The ModelSpec of a GGUF file, through the same checks as config.json. Raises CheckpointError."""
    where = str(header.path)
    meta = Fields(header.metadata, where)
    architecture = meta.text("general.architecture")
    if architecture not in FAMILIES:
        raise CheckpointError(
            f"{where}: unsupported GGUF architecture {shorten(architecture)!r}; "
            f"hotrack serves {', '.join(FAMILIES)}",
            code="unsupported_architecture",
        )
    _refuse_unsupported(meta, header, architecture)
    config: dict[str, object] = {
        field: value
        for suffix, field in CONFIG_FIELDS.items()
        if (value := header.metadata.get(f"{architecture}.{suffix}")) is not None
    }
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{where} has no tensor 'token_embd.weight'")
    if architecture == "qwen3moe":
        config |= {"norm_topk_prob": True, "intermediate_size": config.get("intermediate_size", 1)}
    config |= {
        "model_type": FAMILIES[architecture],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "dtype": "float32" if embedding.type == "F32" else "bfloat16",
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(eos_token_ids(header)),
        "rope_scaling": _rope_scaling(header.metadata, architecture),
    }
    if isinstance(eps := config.get("rms_norm_eps"), float):
        config["rms_norm_eps"] = float(f"{eps:.7g}")  # stored as float32: 1e-5, not 9.999999747e-06
    return parse_config(config, where)


def eos_token_ids(header: GgufHeader) -> tuple[int, ...]:
    """End-of-sequence and end-of-turn ids, without repeats."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    ids = [v for k in keys if isinstance(v := header.metadata.get(k), int)]
    return tuple(dict.fromkeys(ids))


def _rope_scaling(metadata: dict[str, object], architecture: str) -> dict[str, object] | None:
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "none":
        return None
    return {"rope_type": kind, "factor": metadata.get(f"{architecture}.rope.scaling.factor")}


def _refuse_unsupported(meta: Fields, header: GgufHeader, architecture: str) -> None:
    if "rope_freqs.weight" in header.tensors:
        raise CheckpointError(
            f"{header.path} carries Llama 3 rope factors as a tensor, which is not supported; "
            "use the safetensors release"
        )
    if (parts := meta.integer("split.count", low=0, high=1 << 16, default=0)) > 1:
        raise CheckpointError(
            f"{header.path} is one of {parts} parts; merge them with 'llama-gguf-split --merge'"
        )
    if architecture == "llama" and meta.get("llama.expert_count"):
        raise CheckpointError(
            f"{header.path} is a Mixture-of-Experts Llama (Mixtral), which is not supported"
        )


class _Cursor:
    """Walks the header; every length is checked against the file before it is used."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def fail(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is a damaged GGUF file: {problem} (near byte {self.at})")

    def header(self) -> GgufHeader:
        if self.data[:4] != MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file: it starts with {bytes(self.data[:4])!r}")
        self.at = 4
        version = self.number("I")
        if version not in VERSIONS:
            raise CheckpointError(f"{self.path}: GGUF version {version} is not supported; 2 and 3 are")
        num_tensors, num_keys = self.number("Q"), self.number("Q")
        if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
            raise self.fail(f"{num_tensors} tensors and {num_keys} metadata keys announced")
        metadata: dict[str, object] = {}
        for _ in range(num_keys):
            key = self.string()
            if key in metadata:
                raise self.fail(f"metadata key {shorten(key)!r} appears twice")
            metadata[key] = self.value(self.number("I"))
        raw = [self.tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self.fail(f"general.alignment is {shorten(alignment)}")
        base = -(-self.at // alignment) * alignment
        return GgufHeader(self.path, metadata, self.placed(raw, base, alignment))

    def number(self, code: str) -> int:
        return int(self.numbers(code, 1)[0])

    def numbers(self, code: str, count: int) -> tuple[int | float | bool, ...]:
        size = struct.calcsize(f"<{code}") * count
        if size > len(self.data) - self.at:
            raise self.fail(f"{count} values of {size} bytes do not fit")
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += size
        return values

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data, at, end = self.data, self.at, len(self.data)
        if count > (end - at) // 8:
            raise self.fail(f"{count} strings do not fit")
        unpack = struct.Struct("<Q").unpack_from
        result = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(data, at)[0]
                if at > end:
                    raise self.fail(f"a string of {at - start} bytes does not fit")
                result.append(data[start:at].decode())
        except (struct.error, UnicodeDecodeError) as e:
            raise self.fail(f"unreadable string: {e}") from e
        self.at = at
        return result

    def value(self, kind: int) -> object:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.numbers(self.scalar(kind), 1)[0]
        element, count = self.number("I"), self.number("Q")
        if element == STRING:
            return self.strings(count)
        return list(self.numbers(self.scalar(element), count))

    def scalar(self, kind: int) -> str:
        if kind not in SCALARS:
            raise self.fail(f"unknown or nested value type {kind}")
        return SCALARS[kind]

    def tensor(self) -> GgufTensor:
        name = self.string()
        num_dims = self.number("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.fail(f"tensor {shorten(name)!r} has {num_dims} dimensions")
        shape = tuple(int(n) for n in reversed(self.numbers("Q", num_dims)))
        if not all(1 <= n <= MAX_DIM for n in shape):
            raise self.fail(f"tensor {shorten(name)!r} has shape {list(shape)}")
        type_id, offset = self.number("I"), self.number("Q")
        if type_id not in TENSOR_TYPES:
            known = ", ".join(n for n, _, _ in TENSOR_TYPES.values())
            raise CheckpointError(
                f"{self.path}: tensor {shorten(name)!r} has GGUF type {type_id}; supported are {known}"
            )
        type_name, block, block_bytes = TENSOR_TYPES[type_id]
        if shape[-1] % block:
            raise self.fail(f"tensor {shorten(name)!r} of type {type_name} has rows of {shape[-1]}")
        return GgufTensor(name, shape, type_name, type_id, offset, shape[-1] // block * block_bytes)

    def placed(self, raw: list[GgufTensor], base: int, alignment: int) -> dict[str, GgufTensor]:
        """Offsets from the file's start; each tensor aligned, inside the file, apart from the others."""
        tensors: dict[str, GgufTensor] = {}
        end = base
        for t in sorted(raw, key=lambda t: t.offset):
            start = base + t.offset
            if t.name in tensors:
                raise self.fail(f"tensor {shorten(t.name)!r} appears twice")
            if start < end or t.offset % alignment:
                raise self.fail(f"tensor {shorten(t.name)!r} overlaps another or is not aligned")
            end = start + t.nbytes
            if end > len(self.data):
                raise CheckpointError(
                    f"{self.path} is truncated: tensor {shorten(t.name)!r} ends at byte {end}, "
                    f"the file at {len(self.data)}"
                )
            tensors[t.name] = GgufTensor(t.name, t.shape, t.type, t.type_id, start, t.row_bytes)
        return tensors
