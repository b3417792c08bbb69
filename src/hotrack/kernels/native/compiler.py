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
from collections.abc import Sequence
from pathlib import Path

from hotrack.config import env

_TIMEOUT_S = 120.0


class NativeUnavailableError(Exception):
    """The library cannot be built or loaded here; the text says why. Its twin must be used."""


def build_library(source: Path, flags: Sequence[str] = ()) -> Path:
    """Path of the library made from one C file. Concurrent builders are fine: the last rename wins.

    Raises:
        NativeUnavailableError: no compiler, the compiler refused, or the cache is not ours alone.
    """
    compiler = _compiler()
    text = source.read_bytes()
    command = [*compiler, "-std=c11", "-D_GNU_SOURCE", "-O3", "-fPIC", "-shared", *flags]
    key = hashlib.sha256(repr((platform.machine(), platform.libc_ver(), command)).encode() + text)
    folder = _private_folder(env.cache_dir() / "native")
    library = folder / f"{source.stem}-{key.hexdigest()[:24]}.so"
    if not library.exists():
        _compile(command, source, library)
    return library


def _compiler() -> list[str]:
    for name in filter(None, (env.c_compiler(), "cc", "gcc", "clang")):
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return words
    raise NativeUnavailableError("no C compiler found; install gcc or clang, or set CC")


def _private_folder(folder: Path) -> Path:
    """What is loaded from here runs with our rights, so nobody else may write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise NativeUnavailableError(f"cannot use {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise NativeUnavailableError(
            f"{folder} must be a folder that only its owner, this user, can write to"
        )
    return folder


def _compile(command: Sequence[str], source: Path, library: Path) -> None:
    fd, name = tempfile.mkstemp(prefix=library.stem, suffix=".tmp", dir=library.parent)
    os.close(fd)
    try:
        result = subprocess.run(
            [*command, "-o", name, str(source), "-lpthread", "-ldl", "-lm"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if result.returncode != 0:
            lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
            raise NativeUnavailableError(f"{command[0]} cannot build {source.name}: {lines[0]}")
        os.replace(name, library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"{command[0]} cannot build {source.name}: {error}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
