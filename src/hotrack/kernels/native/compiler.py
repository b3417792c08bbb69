"""C sources of the package -> shared libraries in the user's cache, built once."""

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hotrack.config import env

_TIMEOUT_S = 120.0
_PARTIAL = ".tmp"


class NativeUnavailableError(Exception):
    """The library cannot be built or loaded here; the text says why. Its twin must be used."""


class NotThisMachineError(NativeUnavailableError):
    """Nothing is wrong: the twin is what this machine's processor runs best, or all it runs."""


def build_library(source: Path, flags: Sequence[str] = ()) -> Path:
    """Path of the library made from one C file and the headers beside it. Its name holds a digest of its
    contents, which are read before they are trusted: a damaged file is built again. Concurrent builders are
    fine, the last rename wins.

    Raises:
        NativeUnavailableError: no compiler, the compiler refused, or the cache cannot be used or is not ours
            alone.
    """
    compiler = _compiler()
    command = [*compiler, "-std=c11", "-D_GNU_SOURCE", "-O3", "-fPIC", "-shared", *flags]
    key = hashlib.sha256(repr((platform.machine(), platform.libc_ver(), command)).encode())
    folder = env.cache_dir() / "native"
    try:
        for part in (source, *sorted(source.parent.glob("*.h"))):
            key.update(part.read_bytes())
        _make_private(folder)
        _remove_leftovers(folder)
        prefix = f"{source.stem}-{key.hexdigest()[:24]}-"
        return _find(folder, prefix) or _compile(command, source, folder, prefix)
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror or error}"
        raise NativeUnavailableError(f"{reason}; set HOTRACK_CACHE to a folder with room") from error


def _compiler() -> list[str]:
    chosen = env.c_compiler()  # whoever chose one wants no other
    for name in (chosen,) if chosen else ("cc", "gcc", "clang"):
        try:
            words = shlex.split(name)
        except ValueError as error:
            raise NativeUnavailableError(f"CC is {name!r}: {error}; set CC to a C compiler") from error
        if words and shutil.which(words[0]):
            return words
    if chosen:
        raise NativeUnavailableError(f"CC is {chosen!r}, which is no program here; set CC to a C compiler")
    raise NativeUnavailableError("no C compiler found; install gcc or clang, or set CC")


def _make_private(folder: Path) -> None:
    """What is loaded from here runs with our rights, so nobody else may write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(folder, stat.S_ISDIR):
        raise NativeUnavailableError(
            f"{folder} must be a folder that only its owner, this user, can write to"
        )


def _is_ours(path: Path, is_kind: Callable[[int], bool]) -> bool:
    found = path.lstat()
    return is_kind(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _remove_leftovers(folder: Path) -> None:
    """Files of builders that were killed, whatever they were building."""
    for path in folder.glob(f"*{_PARTIAL}"):
        with contextlib.suppress(FileNotFoundError):  # another process tidies up, too
            if time.time() - path.lstat().st_mtime > _TIMEOUT_S:
                path.unlink()


def _find(folder: Path, prefix: str) -> Path | None:
    """A whole library of that name. What is damaged is removed."""
    found = None
    for path in sorted(folder.glob(f"{prefix}*.so")):
        with contextlib.suppress(FileNotFoundError):
            if _is_ours(path, stat.S_ISREG) and path.name == _name(prefix, path):
                found = path
            else:
                path.unlink()
    return found


def _name(prefix: str, library: Path) -> str:
    return f"{prefix}{hashlib.sha256(library.read_bytes()).hexdigest()[:24]}.so"


def _compile(command: Sequence[str], source: Path, folder: Path, prefix: str) -> Path:
    fd, name = tempfile.mkstemp(prefix=prefix, suffix=_PARTIAL, dir=folder)
    built = Path(name)
    try:
        result = subprocess.run(
            [*command, "-o", name, str(source), "-lpthread", "-ldl", "-lm"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
        if result.returncode != 0:
            lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
            raise NativeUnavailableError(f"{command[0]} cannot build {source.name}: {lines[0]}")
        with built.open("rb") as file:
            os.fsync(file.fileno())
        library = folder / _name(prefix, built)
        built.chmod(0o700)
        built.replace(library)
        return library
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailableError(f"{command[0]} cannot build {source.name}: {error}") from error
    finally:
        os.close(fd)
        built.unlink(missing_ok=True)
