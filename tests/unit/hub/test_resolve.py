"""MODEL -> local files: folders, GGUF files, repositories, demo names, and what is none of them."""

import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from hotrack.core.errors import CheckpointError
from hotrack.hub import ResolvedModel, pull, resolve
from hotrack.hub import huggingface as hf
from hotrack.hub.demo import SMOLLM2, TINY_MOE, PackagedModel


@pytest.fixture(autouse=True)
def empty_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTRACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize("spelling", ["./my-model", "my-model", "my-model/"])
def test_folder(spelling, tmp_path):
    folder = model_folder(tmp_path / "my-model")
    assert resolve(spelling) == pull(spelling) == ResolvedModel("folder", folder, "my-model")


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model_folder(tmp_path / "m")
    assert resolve("~/m").path == tmp_path / "m"


def test_gguf_file_and_folder_with_one(tmp_path):
    file = tmp_path / "Some.Q4_K.gguf"
    file.write_bytes(b"GGUF")
    expected = ResolvedModel("gguf", file, "Some.Q4_K")
    assert resolve("Some.Q4_K.gguf") == expected
    assert resolve(".") == expected
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="2 GGUF files"):
        resolve(".")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("", "unknown model ''"),
        ("a\0b", "unknown model"),
        ("smolm2", "did you mean 'smollm2'"),
        ("tinymoe", "did you mean 'tiny-moe'"),
        ("x" * 5000, "unknown model"),
        ("a/b/c", "unknown model"),
        ("../nowhere", "no file or folder"),
        ("/nowhere", "no file or folder"),
        ("gone.gguf", "no file or folder"),
        ("notes.txt", "not a .gguf file"),
        ("empty", "neither config.json nor a GGUF"),
    ],
)
def test_nothing_of_that_name(model, message, tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve(model)
    assert len(caught.value.message) < 500


def test_a_long_path_is_not_a_traceback():
    with pytest.raises(CheckpointError):
        resolve("/" + "x" * 5000)


def test_packaged_demo(tmp_path, monkeypatch):
    folder = model_folder(tmp_path / "pkg")
    monkeypatch.setattr(PackagedModel, "path", folder)
    for name in ("tiny-moe", "Hotrack-Tiny-MoE"):
        assert resolve(name) == pull(name) == ResolvedModel("folder", folder, "tiny-moe")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="reinstall"):
        resolve("tiny-moe")


def test_packaged_demo_lives_in_the_package():
    import hotrack

    assert TINY_MOE.path.parent.parent == Path(hotrack.__path__[0])


def test_cached_demo_needs_no_network(monkeypatch):
    monkeypatch.setattr(type(SMOLLM2), "path", Path("smollm2.gguf").absolute())
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        resolve("smollm2")
    with Path("smollm2.gguf").open("wb") as file:
        file.truncate(SMOLLM2.size)
    assert resolve("SmolLM2-135M-Instruct") == ResolvedModel("gguf", SMOLLM2.path, "smollm2")


def test_repository_in_the_offline_cache(tmp_path):
    snapshot = model_folder(tmp_path / "hf/models--some--repo/snapshots/abc")
    refs = tmp_path / "hf/models--some--repo/refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    assert resolve("some/repo") == pull("some/repo") == ResolvedModel("folder", snapshot, "some/repo")


def test_repository_that_is_not_cached():
    with pytest.raises(
        CheckpointError, match="some/repo is not complete in the local cache and HF_HUB_OFFLINE"
    ):
        resolve("some/repo")


def test_a_folder_wins_over_a_repository(tmp_path):
    model_folder(tmp_path / "some/repo")
    assert resolve("some/repo").path == tmp_path / "some/repo"


def http_error(kind: type[Exception]) -> Exception:
    """Without the HTTP response these classes want, whose type differs between versions."""
    error = kind.__new__(kind)
    Exception.__init__(error, "refused")
    return error


class ConnectError(Exception):
    """Stands for an error of the HTTP library below huggingface_hub."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(GatedRepoError), "accept its terms"),
        (http_error(RepositoryNotFoundError), "no repository 'some/repo'"),
        (LocalEntryNotFoundError("no net"), "could not be reached"),
        (ConnectError("refused"), "ConnectError: refused; try again to resume"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_download_errors_say_what_to_do(error, message, monkeypatch):
    def failing(*_, local_files_only, **__):
        raise LocalEntryNotFoundError("nothing cached") if local_files_only else error

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(hf, "snapshot_download", failing)
    with pytest.raises(CheckpointError, match=message):
        resolve("some/repo")


def test_download_takes_no_code_and_reports_bytes(tmp_path, monkeypatch):
    seen = {}

    def download(repo_id, *, local_files_only, tqdm_class=None, **options):
        if local_files_only:
            raise LocalEntryNotFoundError("nothing cached")
        seen.update(options)
        for desc in ("Fetching 3 files", "Downloading bytes", "Reconstructing (incomplete total...)"):
            with tqdm_class(desc=desc, total=100, unit="B", mininterval=0, name="x") as bar:
                bar.update(40)
                bar.update(60)
        return str(tmp_path)

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(hf, "snapshot_download", download)
    calls = []
    resolved = resolve("some/repo", progress=lambda done, total: calls.append((done, total)))
    assert resolved == ResolvedModel("folder", tmp_path, "some/repo")
    assert calls[-1] == (100, 100)
    assert sorted(calls) == calls
    assert not any(p.endswith((".py", ".bin", ".pt")) or p == "*" for p in seen["allow_patterns"])


def test_pull_from_a_file_is_for_downloaded_demos(tmp_path):
    for model in ("tiny-moe", "some/repo", "."):
        with pytest.raises(CheckpointError, match="only a demo model that is downloaded"):
            pull(model, tmp_path)


def test_import_is_light():
    found = "[m for m in ('torch', 'numpy', 'huggingface_hub') if m in sys.modules]"
    code = f"import sys, hotrack.hub; print({found})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"
