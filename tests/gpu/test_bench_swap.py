"""`hotrack bench swap` on real devices: every byte comes back, nothing leaks, faults change nothing.

Speed is the benchmark's own subject; here only what holds on any machine is asserted.
"""

from dataclasses import replace

import pytest
import torch

from hotrack.bench.swap import HOTRACK, measure, measure_faults
from hotrack.bench.swap_options import SwapOptions
from hotrack.bench.swap_peers import find_peers
from hotrack.bench.swap_table import rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
MIB = 1 << 20
OPTIONS = SwapOptions(
    device="cuda", nbytes=1024 * MIB, cycles=3, kv_bytes=256 * MIB, touch=False, floor_repeats=3
)


def quiet(_what: str, _done: int, _total: int) -> None:
    pass


def faults_of(outcomes) -> list[str]:
    return [fault for outcome in outcomes for fault in outcome.faults]


def test_a_pair_takes_turns_and_moves_only_what_is_missing():
    result = measure(replace(OPTIONS, partial=True), [], quiet)
    assert faults_of(result.outcomes) == []
    scenarios = {outcome.scenario: outcome for outcome in result.outcomes}
    assert set(scenarios) == {"cycles", "swap", "partial swap"}
    cycles = scenarios["cycles"].bytes
    assert cycles["weights"] == OPTIONS.nbytes
    assert cycles["host copy"] <= 1.02 * OPTIONS.nbytes
    context = result.links[0].context_bytes
    if context is not None and cycles["device asleep"] is not None:
        assert cycles["device asleep"] < context + 600 * MIB
        assert cycles["device awake"] >= cycles["device asleep"] + OPTIONS.nbytes + OPTIONS.kv_bytes
    partial = scenarios["partial swap"].bytes
    assert partial["moved"] < 0.8 * OPTIONS.nbytes
    assert result.passed
    assert all(row.value > 0 for row in rows(result))


def test_captured_graphs_replay_after_every_wake():
    result = measure(replace(OPTIONS, graphs=4, members=1), [], quiet)
    assert faults_of(result.outcomes) == []


def test_many_cycles_leak_nothing():
    small = replace(OPTIONS, nbytes=64 * MIB, tensor_bytes=8 * MIB, kv_bytes=16 * MIB, members=1, cycles=200)
    result = measure(small, [], quiet)
    (outcome,) = result.outcomes
    assert [leak for leak in outcome.leaks if not leak.passed] == []
    assert outcome.faults == []


def test_faults_change_nothing():
    result = measure_faults(OPTIONS, quiet)
    assert [(v.fault, v.found) for v in result.verdicts if not v.passed] == []
    assert len(result.verdicts) == 4


@pytest.mark.peer
def test_peers_run_with_the_same_sizes():
    peers = find_peers("auto")
    if not peers:
        pytest.skip("no peers here: python tools/peers/fetch_swap_peers.py .peers")
    result = measure(replace(OPTIONS, nbytes=512 * MIB, peer_cycles=2), peers, quiet)
    assert result.skipped == {}
    assert {outcome.subject for outcome in result.outcomes} == {HOTRACK, *(peer.name for peer in peers)}
    assert faults_of(result.outcomes) == []


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_wake_at_the_same_moment():
    result = measure(replace(OPTIONS, devices=(0, 1)), [], quiet)
    assert faults_of(result.outcomes) == []
    assert len(result.outcomes) == len(result.links) == len(result.together_links) == 2
