"""The cache of compiled libraries: nothing damaged or foreign is loaded, and whatever fails has one type."""

import ctypes
import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hotrack.kernels.native import compiler
from hotrack.kernels.native.compiler import NativeUnavailableError, build_library

needs_compiler = pytest.mark.skipif(
    not any(map(compiler.shutil.which, ("cc", "gcc", "clang"))), reason="no compiler"
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOTRACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    file = tmp_path / "answer.c"
    file.write_text('#include "number.h"\nint answer(void) { return NUMBER; }\n')
    (tmp_path / "number.h").write_text("#define NUMBER 42\n")
    return file


def answer(library: Path) -> int:
    return ctypes.CDLL(str(library)).answer()


@needs_compiler
def test_built_once(source: Path) -> None:
    library = build_library(source)
    before = library.stat().st_mtime_ns
    assert build_library(source) == library
    assert library.stat().st_mtime_ns == before
    assert [p.name for p in library.parent.iterdir()] == [library.name]
    assert answer(library) == 42
    (source.parent / "number.h").write_text("#define NUMBER 43\n")
    assert answer(build_library(source)) == 43


@needs_compiler
@pytest.mark.parametrize("damage", [b"", b"\x7fELF", "half", "one bit", "writable", "link"])
def test_what_is_damaged_or_foreign_is_built_again(source: Path, damage: bytes | str) -> None:
    library = build_library(source)
    whole = library.read_bytes()
    if isinstance(damage, bytes):
        library.write_bytes(damage)
    elif damage == "half":
        library.write_bytes(whole[: len(whole) // 2])
    elif damage == "one bit":
        library.write_bytes(bytes([*whole[:5000], whole[5000] ^ 1, *whole[5001:]]))
    elif damage == "writable":
        library.chmod(0o777)
    else:
        elsewhere = source.parent / "elsewhere.so"
        library.rename(elsewhere)
        library.symlink_to(elsewhere)
    again = build_library(source)
    assert answer(again) == 42
    assert not again.is_symlink()
    assert again.stat().st_mode & 0o022 == 0
    assert list(again.parent.iterdir()) == [again]


@needs_compiler
def test_leftovers_of_dead_builders_go(source: Path) -> None:
    library = build_library(source)
    prefix = library.name.rpartition("-")[0]
    names = (f"{prefix}-old", "answer-of-other-flags-old", f"{prefix}-new")
    *old, new = (library.parent / f"{name}.tmp" for name in names)
    for path in (*old, new):
        path.touch()
    for path in old:
        os.utime(path, (time.time() - 3600,) * 2)
    assert build_library(source) == library
    assert set(library.parent.iterdir()) == {library, new}


@needs_compiler
def test_two_builders_at_once(source: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hotrack.kernels.native.compiler import build_library;"
        "import ctypes; print(ctypes.CDLL(str(build_library(Path(sys.argv[1])))).answer())"
    )
    builders = [
        subprocess.Popen([sys.executable, "-c", code, str(source)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [builder.communicate(timeout=60)[0].strip() for builder in builders] == ["42", "42"]


@needs_compiler
def test_a_compiler_that_refuses(source: Path) -> None:
    source.write_text("this is not C\n")
    with pytest.raises(NativeUnavailableError, match=r"cannot build answer\.c"):
        build_library(source)
    assert list((source.parent / "cache" / "native").iterdir()) == []


def test_a_compiler_that_speaks_no_utf8(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = source.parent / "tool"
    tool.write_bytes(b"#!/bin/sh\nprintf 'erreur \\351\\n' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("CC", str(tool))
    with pytest.raises(NativeUnavailableError, match=r"cannot build answer\.c: erreur"):
        build_library(source)


@pytest.mark.parametrize(
    ("cc", "path", "words"),
    [
        ("gcc '-O2", None, "No closing quotation; set CC"),
        ("/no/such/cc -O2", None, "no program here; set CC"),
        ("", "/nowhere", "no C compiler found"),
    ],
)
def test_no_usable_compiler(
    source: Path, monkeypatch: pytest.MonkeyPatch, cc: str, path: str | None, words: str
) -> None:
    monkeypatch.setenv("CC", cc)
    if path is not None:
        monkeypatch.setenv("PATH", path)
    with pytest.raises(NativeUnavailableError, match=words):
        build_library(source)


@needs_compiler
@pytest.mark.parametrize(
    "where", ["tempfile.mkstemp", "os.fsync", "pathlib.Path.replace", "pathlib.Path.mkdir"]
)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_cache_that_cannot_be_written(
    source: Path, monkeypatch: pytest.MonkeyPatch, where: str, code: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(where, refuse)
        with pytest.raises(NativeUnavailableError, match=rf"{os.strerror(code)}; set HOTRACK_CACHE"):
            build_library(source)
    assert answer(build_library(source)) == 42


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_can_write_to(source: Path, mode: int) -> None:
    folder = source.parent / "cache" / "native"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.raises(NativeUnavailableError, match="only its owner"):
        build_library(source)


def test_a_file_where_the_folder_should_be(source: Path) -> None:
    (source.parent / "cache").mkdir()
    (source.parent / "cache" / "native").write_text("x")
    with pytest.raises(NativeUnavailableError, match="native: "):
        build_library(source)


def test_a_source_that_is_gone(source: Path) -> None:
    source.unlink()
    with pytest.raises(NativeUnavailableError, match=r"answer\.c: No such file"):
        build_library(source)
