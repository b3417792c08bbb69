"""Scenarios of the swap benchmark with workers that only pretend."""

import sys
from pathlib import Path

import pytest
from rich.console import Console

from hotrack.bench import swap_process
from hotrack.bench.client import BenchError
from hotrack.bench.swap import HOTRACK, Link, SwapResult
from hotrack.bench.swap_cycles import cycles, partial_swaps, swaps, together
from hotrack.bench.swap_faults import faults
from hotrack.bench.swap_options import Subject, SwapOptions
from hotrack.bench.swap_plot import write_svg
from hotrack.bench.swap_process import Worker, workers
from hotrack.bench.swap_table import drawings, row_payload, rows, sleep_bar_ms

FAKE = str(Path(__file__).parents[2] / "fakes" / "swap_worker.py")
MIB = 1 << 20
OPTIONS = SwapOptions(device="cpu", nbytes=64 * MIB, cycles=3, tensor_bytes=MIB)


def subject(*behaviours, name=HOTRACK, peer=False):
    return Subject(name, (sys.executable, FAKE, *behaviours), is_peer=peer)


def quiet(_what, _done, _total):
    pass


def run(scenario, *behaviours, options=OPTIONS, report=quiet):
    with workers() as pool:
        return scenario(pool, subject(*behaviours), options, report)


def test_cycles_measure_and_find_nothing_wrong():
    seen = []
    outcome = run(cycles, report=lambda what, done, total: seen.append((what, done, total)))
    assert outcome.faults == []
    assert outcome.series["sleep"].median == 2.0
    assert outcome.series["wake"].count == 3
    assert outcome.series["wake.copy_ms"].first == 2.0
    assert outcome.bytes["weights"] == 64 * MIB
    assert outcome.bytes["device asleep"] == 100
    assert ("hotrack A: filling", 1, 2) in seen
    assert ("hotrack: cycles", 2, 3) in seen


def test_a_difference_and_a_leak_are_faults():
    assert "hotrack A: 1 tensors differ after wake 2" in run(cycles, "wrong").faults
    leaking = run(cycles, "leak")
    assert leaking.faults == [
        "handles asleep changed over the cycles",
        "handles awake changed over the cycles",
    ]


def test_swaps_alternate_and_are_timed_from_outside():
    outcome = run(swaps)
    assert outcome.faults == []
    assert outcome.series["swap"].count == 3
    assert outcome.series["swap"].median < 1000.0
    assert len(run(swaps, "wrong").faults) == 3


def test_partial_swaps_move_only_the_deficit():
    outcome = run(partial_swaps)
    assert outcome.faults == []
    assert outcome.bytes["deficit"] == outcome.bytes["moved"] == 32 * MIB
    assert outcome.series["swap"].count == 3  # the first, of a whole member, does not count


def test_members_of_several_devices_wake_at_the_same_moment():
    options = SwapOptions(device="cpu", devices=(0, 1), nbytes=MIB, cycles=2)
    outcomes = run(together, options=options)
    assert [outcome.scenario for outcome in outcomes] == ["together, device 0", "together, device 1"]
    assert all(outcome.series["wake"].count == 2 for outcome in outcomes)


def test_faults_pass_when_nothing_changes():
    verdicts = {verdict.fault: verdict for verdict in run(faults)}
    assert [verdict.passed for verdict in verdicts.values()] == [None, True, True, True]
    assert "checksum_mismatch" in verdicts["one bit of the host copy flipped"].found


@pytest.mark.parametrize(
    ("behaviour", "text"), [("accept-corrupt-wake", "wake succeeded"), ("leak-on-refusal", "before")]
)
def test_faults_fail_on_silence_and_on_leaks(behaviour, text):
    verdict = next(v for v in run(faults, behaviour) if "bit" in v.fault)
    assert verdict.passed is False
    assert text in verdict.found


def test_a_dead_worker_is_an_error_with_its_last_words():
    with pytest.raises(BenchError, match=r"ended with code 1 during 'wake': killed by the test"):
        run(cycles, "die-on-wake")


def test_a_silent_worker_is_an_error_and_gone(monkeypatch):
    monkeypatch.setattr(swap_process, "ANSWER_TIMEOUT_S", 0.2)
    with workers() as pool:
        worker = pool.start("mute", (sys.executable, FAKE, "silent"))
        with pytest.raises(BenchError, match="did not answer 'check'"):
            worker.call("check")
    assert not worker.is_alive


def test_interrupted_runs_leave_no_worker():
    started: list[Worker] = []

    def interrupted():
        with workers() as pool:
            started.append(pool.start("one", (sys.executable, FAKE)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not started[0].is_alive


# -- what is shown


def link(gib_per_s=50.0, context=500 * MIB, device="cuda:0"):
    nbytes = 1 << 30
    return Link(device, {"name": "a GPU", "device_bytes": context}, nbytes, [1e3 / gib_per_s] * 3)


def result_of(device, *, peers=()):
    options = SwapOptions(device=device, nbytes=64 * MIB, cycles=3, tensor_bytes=MIB)
    result = SwapResult(options, links=[link()])
    with workers() as pool:
        for who in (subject(), *peers):
            plain = SwapOptions(device="cpu", nbytes=64 * MIB, cycles=3, tensor_bytes=MIB)
            result.outcomes += [cycles(pool, who, plain, quiet), swaps(pool, who, plain, quiet)]
    return result


def test_bars_apply_to_hotrack_on_a_gpu_only():
    peer = subject(name="another", peer=True)
    found = rows(result_of("cuda", peers=[peer]))
    barred = {(row.subject, row.what) for row in found if row.bar is not None}
    assert barred == {(HOTRACK, w) for w in ("sleep", "wake", "host copy", "device bytes asleep", "swap")}
    wake = next(row for row in found if row.what == "wake")
    assert wake.floor == pytest.approx(1.25)  # 64 MiB at 50 GiB/s
    assert wake.bar == pytest.approx(1.375)
    assert wake.passed is False  # the worker says 2 ms
    assert [row.subject for row in found if row.what == "wake"] == [HOTRACK, "another"]
    assert all(row.bar is None for row in rows(result_of("cpu")))


def test_sleep_bar_grows_with_what_is_mapped():
    assert sleep_bar_ms(17 << 30) == pytest.approx(37.0)


def test_tables_and_plot_show_faults_in_words(tmp_path):
    result = result_of("cuda", peers=[subject("wrong", name="a [bad] peer", peer=True)])
    result.skipped["missing"] = "no such file"
    console = Console(record=True, width=140)
    found = rows(result)
    for drawing in drawings(result, found):
        console.print(drawing)
    text = console.export_text()
    assert "a [bad] peer, cycles: a [bad] peer A: 1 tensors differ after wake 1" in text
    assert "missing failed: no such file" in text
    assert "50.0 GiB/s" in text
    assert result.passed  # a peer's differences are its own
    write_svg(tmp_path / "plots" / "swap.svg", "17 & more", found)
    assert "17 &amp; more" in (tmp_path / "plots" / "swap.svg").read_text()
    assert row_payload(found[0])["subject"] == HOTRACK


def test_ours_count():
    result = SwapResult(OPTIONS, outcomes=[run(cycles, "wrong")])
    assert not result.passed
    assert result.payload()["passed"] is False
