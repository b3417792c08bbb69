"""Streams a checkpoint into the parameters a model declared: checked first, parallel, never two copies."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from torch import Tensor

from hotrack.checkpoint.keep import KeptScales, columns_of, kept_scales, write_kept
from hotrack.checkpoint.open import Checkpoint
from hotrack.checkpoint.stored import StoredTensor
from hotrack.checkpoint.targets import LoadTarget, Source
from hotrack.core.errors import CheckpointError
from hotrack.core.progress import Progress

MAX_THREADS = 8
MAX_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one load did: copies made, stored bytes they cover, wall seconds."""

    num_copies: int
    stored_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Copy:
    parameter: str
    tensor: StoredTensor
    dest: Tensor
    select: tuple[slice, ...]
    stored_bytes: int
    add: float
    scales: KeptScales | None = None

    def write(self) -> None:
        if self.scales is not None:
            write_kept(self.tensor, self.select, self.dest, self.scales)
            return
        self.tensor.copy_into(self.dest, self.select)
        if self.add:
            self.dest.add_(self.add)


def load_weights(
    checkpoint: Checkpoint,
    targets: Mapping[str, LoadTarget],
    *,
    progress: Progress | None = None,
    num_threads: int | None = None,
    is_elsewhere: Callable[[str], bool] | None = None,
    filled: Callable[[str], None] | None = None,
) -> LoadReport:
    """Fill every target's parameter, converting dtypes on the way.

    Everything but the values of scales is checked before the first byte is written: a missing or unexpected
    tensor or a shape or dtype that does not fit is a CheckpointError naming the tensor.
    ``is_elsewhere(name)`` says which unread tensors are fine because another rank holds them.
    ``filled(parameter)`` is called, on this thread, when all of a parameter is there; for one that
    stays quantised also with the name of its scales. Beyond the parameters each thread needs a few MiB.

    Raises ConfigError when the part that a rank keeps quantised does not begin and end with a block.
    """
    begin = time.monotonic()
    copies = _plan(checkpoint, targets)
    _refuse_unexpected(checkpoint, targets, is_elsewhere)
    total = sum(c.stored_bytes for c in copies)
    done, lock = 0, threading.Lock()
    missing = Counter(copy.parameter for copy in copies)

    def run(copy: _Copy) -> str:
        nonlocal done
        copy.write()
        with lock:
            done += copy.stored_bytes
            if progress is not None:
                progress(done, total)
        return copy.parameter

    with ThreadPoolExecutor(num_threads or _usable_cores(), "load") as pool:
        futures = [pool.submit(run, c) for c in copies]
        try:
            for future in as_completed(futures):
                parameter = future.result()
                missing[parameter] -= 1
                if filled is not None and not missing[parameter]:
                    filled(parameter)
                    if (scales := targets[parameter].scales) is not None:
                        filled(scales.name)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return LoadReport(len(copies), total, time.monotonic() - begin)


def _usable_cores() -> int:
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)


def _plan(checkpoint: Checkpoint, targets: Mapping[str, LoadTarget]) -> list[_Copy]:
    """Copies in file order (sequential reads); raises on the first kind of mismatch."""
    wanted = [(p, t, s) for p, t in targets.items() for s in t.sources]
    missing = sorted({s.name for _, _, s in wanted if s.name not in checkpoint and not s.optional})
    if missing:
        raise CheckpointError(
            f"{checkpoint.resolved.path} lacks {len(missing)} tensors the model needs: {_listed(missing)}"
        )
    copies = [_copy(checkpoint, p, t, s) for p, t, s in wanted if s.name in checkpoint]
    return sorted(copies, key=lambda c: (str(c.tensor.file.path), c.tensor.offset))


def _copy(checkpoint: Checkpoint, parameter: str, target: LoadTarget, source: Source) -> _Copy:
    tensor, param = checkpoint.stored(source.name), target.param
    dest = param[source.dest] if source.dest else param
    assert all(s.step in (None, 1) for s in source.select), f"{source=}"
    where = f"{checkpoint.resolved.path}: tensor {source.name!r} for parameter {parameter!r}"
    if len(source.select) > len(tensor.shape):
        raise CheckpointError(
            f"{where} has shape {list(tensor.shape)}; {len(source.select)} dimensions expected"
        )
    shape = tuple(
        len(range(*s.indices(n))) for s, n in zip(source.select, tensor.shape, strict=False)
    ) + tuple(tensor.shape[len(source.select) :])
    if target.scales is not None and shape:
        shape = (*shape[:-1], columns_of(target, shape[-1]))
    if shape != tuple(dest.shape):
        part = f"{list(shape)} of {list(tensor.shape)}" if source.select else f"{list(tensor.shape)}"
        raise CheckpointError(f"{where} has shape {part}; expected {list(dest.shape)}")
    if not tensor.floating or not (dest.is_floating_point() or target.scales is not None):
        raise CheckpointError(
            f"{where} is stored as {tensor.dtype}; expected floating point for {dest.dtype}"
        )
    rows = shape[0] if shape else 1
    scales = kept_scales(target, source, tensor, where) if target.scales is not None else None
    return _Copy(parameter, tensor, dest, source.select, rows * tensor.row_bytes, source.add, scales)


def _refuse_unexpected(
    checkpoint: Checkpoint, targets: Mapping[str, LoadTarget], is_elsewhere: Callable[[str], bool] | None
) -> None:
    known = {s.name for t in targets.values() for s in t.sources}
    tied = checkpoint.spec.tie_word_embeddings
    unexpected = [
        name
        for name in checkpoint.names()
        if name not in known
        and not name.endswith(".rotary_emb.inv_freq")  # old Llama exports store this constant
        and not (tied and name == "lm_head.weight")  # a copy of the embeddings
        and not name.startswith(checkpoint.spec.unread)
        and not (is_elsewhere and is_elsewhere(name))
    ]
    if unexpected:
        raise CheckpointError(
            f"{checkpoint.resolved.path} holds {len(unexpected)} tensors the model does not know: "
            f"{_listed(unexpected)}; its config.json may describe another model"
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(n) for n in names[:MAX_NAMES_SHOWN])
    return shown + (", ..." if len(names) > MAX_NAMES_SHOWN else "")
