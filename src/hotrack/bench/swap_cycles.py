"""Scenarios of the swap benchmark: one member over many cycles, two that take turns, one per device."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil

from hotrack.bench.swap_numbers import Leak, Series, leaks
from hotrack.bench.swap_options import Report, Subject, SwapOptions
from hotrack.bench.swap_process import Worker, Workers

BARRIER_S = 0.05
"""Ahead of now: when workers that were told to begin at the same moment begin."""

RSS_READINGS = 100


@dataclass(slots=True)
class Outcome:
    """What one scenario measured for one subject. ``series``: milliseconds by operation; ``bytes``: by what
    they are; ``faults``: what differed and must not; empty means that every byte came back."""

    subject: str
    scenario: str
    series: dict[str, Series] = field(default_factory=dict)
    bytes: dict[str, int | None] = field(default_factory=dict)
    leaks: list[Leak] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    milliseconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, operation: str, milliseconds: float) -> None:
        self.milliseconds.setdefault(operation, []).append(milliseconds)

    def close(self) -> "Outcome":
        self.series = {name: Series.of(values) for name, values in self.milliseconds.items()}
        self.faults += [f"{leak.what} changed over the cycles" for leak in self.leaks if not leak.passed]
        return self


def start_member(
    workers: Workers, subject: Subject, options: SwapOptions, report: Report, number: int = 0, index: int = 0
) -> tuple[Worker, dict[str, Any]]:
    """A worker with a filled, awake member; ``number`` seeds its bytes."""
    name = f"{subject.name} {'ABCDEFGH'[number]}"
    worker = workers.start(name, subject.argv, **subject.environment)
    progress = partial(report, f"{name}: filling")
    facts = worker.call("init", progress=progress, **options.init_arguments(number, index))
    return worker, facts


def check(worker: Worker, outcome: Outcome, when: str) -> None:
    reply = worker.call("check")
    if reply["wrong"]:
        outcome.faults.append(f"{worker.name}: {reply['wrong']} tensors differ {when}")
    if reply["graphs_identical"] is False:
        outcome.faults.append(f"{worker.name}: a graph's replay differs {when}")


def cycles(workers: Workers, subject: Subject, options: SwapOptions, report: Report) -> Outcome:
    """Sleep and wake one member again and again; what could leak is read in every cycle, outside the timing,
    but the resident set only a hundred times: the kernel walks every page for it."""
    outcome = Outcome(subject.name, "cycles")
    available = psutil.virtual_memory().available
    worker, facts = start_member(workers, subject, options, report)
    check(worker, outcome, "before the first sleep")
    asleep, awake = [], []
    stride = max(1, options.cycles // RSS_READINGS)
    for cycle in range(options.cycles):
        report(f"{subject.name}: cycles", cycle, options.cycles)
        resident = cycle % stride == 0
        sleep = worker.call("sleep")
        outcome.add("sleep", sleep["ms"])
        _add_phases(outcome, "sleep", sleep, ("quiesce_ms", "copy_ms", "unmap_ms", "total_ms"))
        asleep.append(worker.call("stats", resident=resident))
        if cycle == 0 and options.is_cuda:
            outcome.bytes["host used"] = available - psutil.virtual_memory().available
        wake = worker.call("wake")
        outcome.add("wake", wake["ms"])
        _add_phases(outcome, "wake", wake, ("map_ms", "copy_ms", "verify_ms", "total_ms"))
        outcome.add("use", worker.call("use")["ms"])
        check(worker, outcome, f"after wake {cycle + 1}")
        awake.append(worker.call("stats", resident=resident))
    outcome.bytes |= {
        "weights": facts["weight_bytes"],
        "mapped": facts["weight_bytes"] + options.kv_bytes,
        "host copy": asleep[0]["host_bytes"],
        "device asleep": asleep[-1]["device_bytes"],
        "device awake": awake[-1]["device_bytes"],
    }
    outcome.leaks = leaks(asleep, "asleep", stride) + leaks(awake, "awake", stride)
    workers.end(worker)
    return outcome.close()


def _add_phases(outcome: Outcome, operation: str, reply: dict[str, Any], phases: Sequence[str]) -> None:
    for phase in phases:
        if phase in reply.get("report", {}):
            outcome.add(f"{operation}.{phase}", reply["report"][phase])


def pair(
    workers: Workers, subject: Subject, options: SwapOptions, report: Report, spare: float
) -> tuple[Worker, Worker, Worker | None, int]:
    """Two members, the first asleep, and (CUDA) a third process that holds device memory so that beside the
    second only ``spare`` times a member's weights are free. Returns also those weights' bytes."""
    first, facts = start_member(workers, subject, options, report, 0)
    first.call("sleep")
    second, _facts = start_member(workers, subject, options, report, 1)
    ballast = None
    if options.is_cuda:
        ballast = workers.start("ballast")
        ballast.call("context", device=options.device_name())
        room = int(spare * facts["weight_bytes"]) + options.slack_bytes
        ballast.call("ballast", device=options.device_name(), leave_bytes=room)
    return first, second, ballast, facts["weight_bytes"]


def swaps(workers: Workers, subject: Subject, options: SwapOptions, report: Report) -> Outcome:
    """Two processes, room for one: sleep A, wake B, read B's last tensor; then the other way round. Timed
    from here, so messages between processes count."""
    outcome = Outcome(subject.name, "swap")
    asleep, awake, ballast, weight_bytes = pair(workers, subject, options, report, 0.0)
    for cycle in range(options.cycles):
        report(f"{subject.name}: swaps", cycle, options.cycles)
        start = time.perf_counter()
        sleep = awake.call("sleep")
        wake = asleep.call("wake")
        use = asleep.call("use")
        outcome.add("swap", (time.perf_counter() - start) * 1e3)
        for operation, reply in (("sleep", sleep), ("wake", wake), ("use", use)):
            outcome.add(operation, reply["ms"])
        asleep, awake = awake, asleep
        check(awake, outcome, f"after swap {cycle + 1}")
    outcome.bytes["weights"] = weight_bytes
    for worker in (asleep, awake, ballast):
        if worker is not None:
            workers.end(worker)
    return outcome.close()


def partial_swaps(workers: Workers, subject: Subject, options: SwapOptions, report: Report) -> Outcome:
    """Room for one and a half members: only what is missing is released, so only that moves."""
    outcome = Outcome(subject.name, "partial swap")
    asleep, awake, ballast, weight_bytes = pair(workers, subject, options, report, 0.5)
    free = weight_bytes // 2 + options.slack_bytes
    missing = {asleep.name: weight_bytes + options.kv_bytes, awake.name: 0}
    moved: list[int] = []
    deficit = 0
    for cycle in range(options.cycles + 1):
        report(f"{subject.name}: partial swaps", cycle, options.cycles + 1)
        if ballast is not None:
            free = ballast.call("free", device=options.device_name())["free_bytes"]
        deficit = max(0, missing[asleep.name] + options.slack_bytes - free)
        start = time.perf_counter()
        missing[awake.name] = awake.call("sleep", nbytes=deficit)["missing_bytes"] if deficit else 0
        copied = asleep.call("wake")["report"]["bytes_copied"]
        asleep.call("use")
        spent = (time.perf_counter() - start) * 1e3
        if cycle:  # the first wakes a member that had slept completely
            outcome.add("swap", spent)
            moved.append(copied)
        if ballast is None:  # without a device that could be full, count
            free += missing[awake.name] - missing[asleep.name]
        missing[asleep.name] = 0
        check(asleep, outcome, f"after partial swap {cycle}")
        asleep, awake = awake, asleep
    outcome.bytes |= {
        "weights": weight_bytes,
        "moved": max(moved),
        "deficit": max(0, deficit - options.kv_bytes),
    }
    for worker in (asleep, awake, ballast):
        if worker is not None:
            workers.end(worker)
    return outcome.close()


def together(workers: Workers, subject: Subject, options: SwapOptions, report: Report) -> list[Outcome]:
    """One member per device; all sleep at the same moment and all wake at the same moment."""
    members = []
    outcomes = []
    for index, device in enumerate(options.devices):
        worker, facts = start_member(workers, subject, options, report, index, index)
        outcome = Outcome(subject.name, f"together, device {device}")
        outcome.bytes |= {
            "weights": facts["weight_bytes"],
            "mapped": facts["weight_bytes"] + options.kv_bytes,
        }
        members.append((worker, outcome))
        outcomes.append(outcome)
    for cycle in range(options.cycles):
        report(f"{subject.name}: together", cycle, options.cycles)
        for operation in ("sleep", "wake"):
            moment = time.monotonic() + BARRIER_S
            for worker, _outcome in members:
                worker.send(operation, at=moment)
            for worker, outcome in members:
                outcome.add(operation, worker.receive(operation)["ms"])
        for worker, outcome in members:
            check(worker, outcome, f"after wake {cycle + 1}")
    for worker, _outcome in members:
        workers.end(worker)
    return [outcome.close() for outcome in outcomes]
