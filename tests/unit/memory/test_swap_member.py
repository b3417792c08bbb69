"""The data-plane side of the swap benchmark, on the CPU."""

import json
import subprocess
import sys

import pytest
import torch

from hotrack.core.errors import ChecksumError, ConfigError
from hotrack.memory import swap_device
from hotrack.memory.swap_contents import RandomBytes, fingerprint, mismatches, synthetic_specs
from hotrack.memory.swap_member import SwapMember

MIB = 1 << 20


@pytest.fixture
def member(tmp_path):
    member = SwapMember()
    member.init("cpu", 5 * MIB, 2 * MIB, seed=3, kv_bytes=MIB, options={"store_dir": str(tmp_path)})
    yield member
    member.manager.close()


def test_specs_add_up():
    assert [spec.nbytes for spec in synthetic_specs(5 * MIB, 2 * MIB)] == [2 * MIB, 2 * MIB, MIB]


def test_contents_are_not_compressible_repeat_with_the_seed_and_differ_by_tensor():
    first, again = RandomBytes(1, torch.device("cpu")), RandomBytes(1, torch.device("cpu"))
    one, two = first.next(MIB), first.next(MIB)
    assert torch.equal(one, again.next(MIB))
    assert not torch.equal(one, two)
    assert torch.bincount(one.int(), minlength=256).min() > 3500  # 4096 expected of each value


def test_fingerprint_sees_one_bit_an_exchange_and_a_last_odd_byte():
    data = RandomBytes(1, torch.device("cpu")).next(MIB)
    wanted = fingerprint(data)
    changed = data.clone()
    changed[-1] ^= 1
    assert fingerprint(changed) != wanted
    exchanged = data.clone()
    exchanged[:8], exchanged[8:16] = data[8:16], data[:8]
    assert fingerprint(exchanged) != wanted
    assert mismatches([data, changed], [wanted, wanted]) == [1]
    odd = data[:13]
    assert fingerprint(odd) != fingerprint(data[:12])
    assert fingerprint(odd.clone()) == fingerprint(odd)


def test_fingerprint_does_not_depend_on_pieces(monkeypatch):
    data = RandomBytes(1, torch.device("cpu")).next(1024)
    whole = fingerprint(data)
    monkeypatch.setattr("hotrack.memory.swap_contents._PIECE_WORDS", 50)
    assert fingerprint(data) == whole


def test_cycle_brings_every_byte_back(member):
    before = member.stats()
    slept = member.sleep()
    assert slept["missing_bytes"] >= 6 * MIB
    assert member.stats()["host_bytes"] == before["host_bytes"]
    woke = member.wake()
    assert woke["report"]["restored_bytes"] == 5 * MIB
    assert member.check() == {"wrong": 0, "graphs_identical": None}
    member.use()


def test_check_sees_a_changed_tensor(member):
    member.tensors[1][7] ^= 1
    assert member.check()["wrong"] == 1


def test_a_flipped_bit_is_refused_and_flipping_it_back_heals(member):
    member.sleep()
    member.corrupt()
    with pytest.raises(ChecksumError):
        member.wake()
    member.corrupt()
    member.wake()
    assert member.check()["wrong"] == 0


def test_graphs_and_models_are_refused_with_a_reason(member):
    with pytest.raises(ConfigError, match="graphs"):
        member.graph_pool()
    with pytest.raises(ConfigError, match="synthetic"):
        member.open_model("x")


def test_floor_copies_what_it_says():
    reply = swap_device.floor("cpu", 2 * MIB, MIB, repeats=3)
    assert reply["bytes"] == 2 * MIB
    assert len(reply["milliseconds"]) == 3
    assert min(reply["milliseconds"]) > 0


def test_a_missing_gpu_is_named():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="sees 0 CUDA devices"):
        swap_device.context("cuda:0")


def test_worker_speaks_json_lines(tmp_path):
    """A whole process: progress before the answer, errors as codes, nothing else on stdout."""
    init = {
        "op": "init",
        "device": "cpu",
        "nbytes": 64 * MIB,
        "tensor_bytes": 16 * MIB,
        "seed": 0,
        "options": {"store_dir": str(tmp_path)},
        "report_progress": True,
    }
    ops = ["sleep", "corrupt", "wake", "corrupt", "wake", "check", "stats", "exit"]
    requests = [init, *({"op": op} for op in ops)]
    done = subprocess.run(
        [sys.executable, "-m", "hotrack.memory.swap_worker"],
        input="".join(json.dumps(request) + "\n" for request in requests),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["progress"][0] // MIB for line in lines if "progress" in line] == [16, 32, 48, 64]
    answers = [line for line in lines if "progress" not in line]
    assert [answer["ok"] for answer in answers] == [True, True, True, False, True, True, True, True, True]
    assert answers[3]["code"] == "checksum_mismatch"
    assert answers[6]["wrong"] == 0
    assert answers[7]["rss_bytes"] > 64 * MIB
