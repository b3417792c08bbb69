"""Rules about the project itself: sizes, import weight, error mapping, version."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import hotrack
from hotrack.core import errors
from hotrack.openai.errors import error_body, error_headers

ROOT = Path(__file__).parents[3]
SOURCES = sorted(p for folder in ("src", "tests", "tools") for p in (ROOT / folder).rglob("*.py"))
MAX_LINES = 500
MAX_TRACKED_BYTES = 12 * 2**20
CONTROL_PLANE = (
    "core",
    "config",
    "obs",
    "openai",
    "modelspec",
    "hub",
    "plan",
    "members",
    "pool",
    "gateway",
    "bench",
    "cli",
)
HEAVY = ("torch", "numpy", "tokenizers", "safetensors", "transformers")


def test_no_file_is_longer_than_500_lines():
    too_long = {
        str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().splitlines())) > MAX_LINES
    }
    assert not too_long


def test_tracked_files_stay_small():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    assert sum(p.stat().st_size for p in files if p.exists()) < MAX_TRACKED_BYTES


def modules_of(package: str) -> list[str]:
    root = importlib.import_module(f"hotrack.{package}")
    return [root.__name__, *(m.name for m in pkgutil.walk_packages(root.__path__, f"{root.__name__}."))]


def loaded_after_importing(names: list[str]) -> set[str]:
    code = "import importlib as i, sys\n[i.import_module(n) for n in sys.argv[1:]]\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_whole_control_plane_imports_without_torch():
    names = [name for package in CONTROL_PLANE for name in modules_of(package)]
    assert len(names) > len(CONTROL_PLANE)
    assert not loaded_after_importing(names) & set(HEAVY)


def test_the_member_server_process_imports_without_torch():
    assert "torch" not in loaded_after_importing(modules_of("server"))


def all_errors(cls: type[errors.HotrackError] = errors.HotrackError) -> list[type[errors.HotrackError]]:
    """Those of ``core.errors``; which others exist depends on what other tests have imported."""
    tree = [cls, *(e for sub in cls.__subclasses__() for e in all_errors(sub))]
    return [e for e in tree if e.__module__ == errors.__name__]


@pytest.mark.parametrize("cls", all_errors(), ids=lambda c: c.__name__)
def test_every_error_has_a_complete_openai_body(cls):
    error = cls("what, got, remedy", param="p", retry_after_s=0.2)
    body = error_body(error)["error"]
    assert body == {"message": "what, got, remedy", "type": cls.type, "param": "p", "code": cls.code}
    assert 400 <= error.status < 600
    assert error_headers(error) == {"Retry-After": "1"}


def test_changelog_describes_this_version():
    assert f"## {hotrack.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_public_names():
    assert hotrack.__all__ == ["LLM", "SamplingParams", "__version__"]
    assert hotrack.SamplingParams().temperature == 1.0
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        hotrack.nope  # noqa: B018
