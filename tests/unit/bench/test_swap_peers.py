"""Finding peers of the swap benchmark, and what is downloaded for them."""

import zipfile

import pytest

from hotrack.bench import swap_peers
from hotrack.bench.swap_peers import find_peers
from hotrack.core.errors import ConfigError
from peers import fetch_swap_peers


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No peer is installed, and the checkout has none."""
    monkeypatch.setattr(swap_peers.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(swap_peers, "FOLDER", tmp_path / "none")


def test_no_peers_is_no_error_unless_a_folder_was_named(nowhere, tmp_path):
    assert find_peers("auto") == []
    assert find_peers("none") == []
    with pytest.raises(ConfigError, match="fetch_swap_peers"):
        find_peers(str(tmp_path))


def test_a_folder_with_one_peer(nowhere, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "cumem_allocator.abi3.so").touch()
    (peer,) = find_peers(str(tmp_path))
    assert peer.name == "vLLM allocator"
    assert peer.is_peer
    assert peer.argv[-1] == "vLLM allocator"
    assert str(tmp_path) in peer.environment["PYTHONPATH"]


def test_outside_a_checkout_auto_finds_nothing_and_a_folder_is_refused(nowhere, monkeypatch, tmp_path):
    monkeypatch.setattr(swap_peers, "WORKER", tmp_path / "gone.py")
    assert find_peers("auto") == []
    with pytest.raises(ConfigError, match="checkout"):
        find_peers(str(tmp_path))


def test_fetching_keeps_what_is_wanted(monkeypatch, tmp_path, capsys):
    def download(requirement, folder):
        wheel = folder / "x.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in ("vllm/cumem_allocator.abi3.so", "vllm/other.so", "torch_memory_saver/__init__.py"):
                archive.writestr(name, requirement)
        return wheel

    monkeypatch.setattr(fetch_swap_peers, "download", download)
    monkeypatch.setattr("sys.argv", ["fetch", str(tmp_path / "out")])
    fetch_swap_peers.main()
    files = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert files == {"vllm/cumem_allocator.abi3.so", "torch_memory_saver/__init__.py"}
