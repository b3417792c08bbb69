"""What may go wrong in a swap, done on purpose: each fault must be a typed error that changes nothing."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hotrack.bench.client import BenchError
from hotrack.bench.swap_cycles import Outcome, check, pair, start_member
from hotrack.bench.swap_options import Report, Subject, SwapOptions
from hotrack.bench.swap_process import RefusedError, Worker, Workers

SETTLE_S = 10.0
"""How long the driver may take to collect the memory of a killed process."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``passed`` None: could not be tried here, and why."""

    fault: str
    passed: bool | None
    found: str


@dataclass(frozen=True, slots=True)
class Rig:
    workers: Workers
    subject: Subject
    options: SwapOptions
    report: Report


def faults(workers: Workers, subject: Subject, options: SwapOptions, report: Report) -> list[Verdict]:
    """All cases, each with processes of its own."""
    rig = Rig(workers, subject, options, report)
    verdicts = []
    for number, (name, case) in enumerate(CASES.items()):
        report(f"fault: {name}", number, len(CASES))
        try:
            verdicts.append(case(rig, name))
        except (RefusedError, BenchError) as error:
            verdicts.append(Verdict(name, False, error.message))
        finally:
            workers.end_all()
    return verdicts


def _comparable(worker: Worker) -> dict[str, Any]:
    stats = worker.call("stats")
    return {key: stats[key] for key in ("device_bytes", "host_bytes", "handles")}


def _refusal(worker: Worker, op: str) -> RefusedError | None:
    try:
        worker.call(op)
    except RefusedError as error:
        return error
    return None


def _judge(name: str, worker: Worker, code: str, undo: Callable[[], Any]) -> Verdict:
    """A sleeping member's wake must fail with ``code``, change nothing, and succeed after ``undo``."""
    before = _comparable(worker)
    error = _refusal(worker, "wake")
    after = _comparable(worker)
    undo()
    worker.call("wake")
    outcome = Outcome(name, "fault")
    check(worker, outcome, "after the later wake")
    if error is None:
        return Verdict(name, False, f"wake succeeded, expected {code}")
    if error.code != code:
        return Verdict(name, False, f"expected {code}, got {error.code}: {error.message}")
    if before != after:
        return Verdict(name, False, f"before {before}, after {after}")
    if outcome.faults:
        return Verdict(name, False, "; ".join(outcome.faults))
    return Verdict(name, True, f"{error.code}: {error.message}")


def _half_the_memory(rig: Rig, name: str) -> Verdict:
    if not rig.options.is_cuda:
        return Verdict(name, None, "the CPU twin has no memory of a fixed size")
    device = rig.options.device_name()
    worker, facts = start_member(rig.workers, rig.subject, rig.options, rig.report)
    worker.call("sleep")
    ballast = rig.workers.start("ballast")
    ballast.call("context", device=device)
    ballast.call("ballast", device=device, leave_bytes=facts["weight_bytes"] // 2)
    return _judge(name, worker, "wake_failed", lambda: ballast.call("drop_ballast", device=device))


def _corrupt(rig: Rig, name: str) -> Verdict:
    worker, _facts = start_member(rig.workers, rig.subject, rig.options, rig.report)
    worker.call("sleep")
    worker.call("corrupt")
    return _judge(name, worker, "checksum_mismatch", lambda: worker.call("corrupt"))


def _killed_asleep_going(rig: Rig, name: str) -> Verdict:
    """The awake member dies while it gives its memory back; the other one then gets all of it."""
    return _kill(rig, name, "sleep")


def _killed_waking(rig: Rig, name: str) -> Verdict:
    """The member that is to take over dies in the middle of its wake; the first one takes its place again."""
    return _kill(rig, name, "wake")


def _kill(rig: Rig, name: str, op: str) -> Verdict:
    asleep, awake, _ballast, _weights = pair(rig.workers, rig.subject, rig.options, rig.report, 0.0)
    # One whole swap there and back first, which also says how long the operation takes.
    spent = {"sleep": awake.call("sleep")["ms"], "wake": asleep.call("wake")["ms"]}
    asleep.call("sleep")
    if op == "sleep":
        awake.call("wake")
        victim, survivor = awake, asleep
    else:
        victim, survivor = asleep, awake
    before = _comparable(survivor)
    victim.send(op)
    time.sleep(spent[op] / 2e3)
    victim.kill()
    after = _comparable(survivor)
    attempts = _wake_until(survivor, time.monotonic() + SETTLE_S)
    outcome = Outcome(name, "fault")
    survivor.call("use")
    check(survivor, outcome, "after the peer was killed")
    if before != after:
        return Verdict(name, False, f"before {before}, after {after}")
    if outcome.faults:
        return Verdict(name, False, "; ".join(outcome.faults))
    return Verdict(name, True, f"killed after {spent[op] / 2:.0f} ms; the other woke at attempt {attempts}")


def _wake_until(worker: Worker, deadline: float) -> int:
    """Attempts it took; a refusal for want of memory is retried until the deadline."""
    attempt = 1
    while True:
        error = _refusal(worker, "wake")
        if error is None:
            return attempt
        if error.code != "wake_failed" or time.monotonic() > deadline:
            raise error
        attempt += 1
        time.sleep(0.05)


CASES: dict[str, Callable[[Rig, str], Verdict]] = {
    "wake with half the memory free": _half_the_memory,
    "one bit of the host copy flipped": _corrupt,
    "SIGKILL of the peer while it falls asleep": _killed_asleep_going,
    "SIGKILL of the peer while it wakes": _killed_waking,
}
