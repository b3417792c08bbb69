"""Many sleeps and wakes of the demo models: the same tokens, the same memory, no descriptor left behind.

pytest -m slow -s tests/e2e/test_sleep_cycles.py      # 200 cycles of both models, about five minutes
"""

import os
import statistics
from pathlib import Path
from typing import Any

import psutil
import pytest

from fakes.member_process import MemberProcess
from hotrack.config import env
from hotrack.core.errors import HotrackError
from hotrack.hub.resolve import resolve
from hotrack.members.probe import tree_bytes

MIB = 2**20
PROMPTS = {"tiny-moe": "sort: w t a d z e", "smollm2": "The capital of France is"}
FLAGS = ("--max-model-len", "512", "--kv-cache-memory-bytes", "32MiB")
WARM_UP = 3  # the first cycles settle what allocators keep


class Residue:
    """What a process tree holds."""

    def __init__(self, member: MemberProcess) -> None:
        tree = [psutil.Process(member.process.pid), *member.children()]
        self.memory = tree_bytes(member.process.pid) or 0
        self.descriptors = sum(process.num_fds() for process in tree)
        self.processes = len(tree)
        self.shared = sorted(os.listdir("/dev/shm"))


def answer(member: MemberProcess, model: str) -> str:
    body = {"model": model, "prompt": PROMPTS[model], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    status, reply = member.post("/v1/completions", body)
    assert status == 200, reply
    return str(reply["choices"][0]["text"])


def cycle(member: MemberProcess, level: int) -> tuple[dict[str, Any], Residue, dict[str, Any]]:
    status, slept = member.post(f"/sleep?level={level}")
    assert status == 200, slept
    residue = Residue(member)
    status, woke = member.post("/wake_up")
    assert status == 200, woke
    return slept["report"], residue, woke["report"]


def run_cycles(model: str, cycles: int, level: int, folder: Path) -> None:
    with MemberProcess(model, *FLAGS, folder=folder) as member:
        member.wait_ready()
        expected = answer(member, model)
        asleep: list[Residue] = []
        awake: list[Residue] = []
        swaps: list[float] = []
        for number in range(cycles):
            slept, residue, woke = cycle(member, level)
            assert answer(member, model) == expected, f"cycle {number}"
            swaps.append(slept["total_ms"] + woke["total_ms"])
            asleep.append(residue)
            awake.append(Residue(member))
        fell = awake[-1].memory - asleep[-1].memory
        assert fell > 0.9 * slept["store_bytes"], f"{fell=} {slept=}"
        for series in (asleep, awake):
            settled = [r.memory for r in series[WARM_UP:]]
            assert max(settled) - min(settled) <= 0.02 * max(settled) + MIB, [m // MIB for m in settled]
            # A connection of ours may still be closing; growth would not stop at two.
            descriptors = [r.descriptors for r in series[WARM_UP:]]
            assert max(descriptors) - min(descriptors) <= 2, descriptors
            assert len({r.processes for r in series[WARM_UP:]}) == 1
            assert len({tuple(r.shared) for r in series[WARM_UP:]}) == 1
        print(
            f"{model}: {cycles} cycles at level {level}, sleep + wake {statistics.median(swaps):.0f} ms "
            f"(median), {asleep[-1].memory // MIB} MiB asleep, {awake[-1].memory // MIB} awake; tokens same"
        )


def require(model: str) -> None:
    """SmolLM2 is only used where it has been fetched already."""
    if model == "smollm2" and not list(env.cache_dir().glob("models/smollm2/*.gguf")):
        pytest.skip("smollm2 is not in the cache; `hotrack pull smollm2` fetches it")
    try:
        resolve(model)
    except HotrackError as error:
        pytest.skip(error.message)


@pytest.mark.e2e
@pytest.mark.parametrize("level", [1, 2])
def test_a_few_cycles(level: int, tmp_path: Path) -> None:
    require("tiny-moe")
    run_cycles("tiny-moe", 12, level, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["tiny-moe", "smollm2"])
def test_two_hundred_cycles(model: str, tmp_path: Path) -> None:
    require(model)
    run_cycles(model, 200, 1, tmp_path)
