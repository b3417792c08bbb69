"""`hotrack bench swap`: how fast members give the device back and return, against the link and others.

Starts workers and only orchestrates: no tensor library here. Order: host memory is touched once, the link's
floor and a bare context are measured in processes of their own, then every subject runs the same scenarios.
"""

import math
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from hotrack.bench.swap_cycles import Outcome, cycles, partial_swaps, swaps, together
from hotrack.bench.swap_faults import Verdict, faults
from hotrack.bench.swap_numbers import GIB
from hotrack.bench.swap_options import Report, Subject, SwapOptions
from hotrack.bench.swap_process import MODEL_WORKER, Workers, workers

HOTRACK = "hotrack"


def hotrack(options: SwapOptions) -> Subject:
    return Subject(HOTRACK) if options.model is None else Subject(HOTRACK, MODEL_WORKER)


@dataclass(frozen=True, slots=True)
class Link:
    """One device: its facts, the bare context of a process that only opened it, and plain copies to it."""

    device: str
    facts: dict[str, Any]
    bytes: int
    milliseconds: list[float]

    @property
    def bytes_per_ms(self) -> float:
        return self.bytes / median(self.milliseconds)

    def floor_ms(self, nbytes: float) -> float:
        return nbytes / self.bytes_per_ms

    @property
    def context_bytes(self) -> int | None:
        found: int | None = self.facts["device_bytes"]
        return found


@dataclass(slots=True)
class SwapResult:
    options: SwapOptions
    links: list[Link] = field(default_factory=list)
    together_links: list[Link] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Everything that must be equal was, and no fault went wrong. Bars are about speed: not here."""
        ours = [o for o in self.outcomes if o.subject == HOTRACK]
        return not any(o.faults for o in ours) and all(v.passed is not False for v in self.verdicts)

    def payload(self) -> dict[str, Any]:
        return {
            "options": asdict(self.options),
            "links": [
                {**asdict(link), "gib_per_s": link.bytes_per_ms * 1e3 / GIB}
                for link in self.links + self.together_links
            ],
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
            "faults": [asdict(verdict) for verdict in self.verdicts],
            "skipped": self.skipped,
            "passed": self.passed,
        }


def measure(options: SwapOptions, peers: list[Subject], report: Report) -> SwapResult:
    """Every scenario that ``options`` ask for. A peer that fails is named in ``skipped``; hotrack's errors
    end the run."""
    result = SwapResult(options)
    with workers() as pool:
        _prepare(pool, result, report)
        if len(options.devices) > 1:
            result.outcomes += together(pool, hotrack(options), options, report)
            return result
        result.outcomes += _scenarios(pool, hotrack(options), options, report)
        fewer = replace(options, cycles=min(options.cycles, options.peer_cycles))
        for peer in peers:
            try:
                result.outcomes += _scenarios(pool, peer, fewer, report)
            except Exception as error:  # noqa: BLE001 - a peer's failure is a finding, not ours to raise
                result.skipped[peer.name] = str(error)
            finally:
                pool.end_all()
    return result


def measure_faults(options: SwapOptions, report: Report) -> SwapResult:
    """Only the fault cases."""
    result = SwapResult(options)
    with workers() as pool:
        _open(pool, options, 0)
        pool.end_all()
        result.verdicts = faults(pool, hotrack(options), options, report)
    return result


def _scenarios(pool: Workers, subject: Subject, options: SwapOptions, report: Report) -> list[Outcome]:
    outcomes = [cycles(pool, subject, options, report)]
    if options.members > 1:
        outcomes.append(swaps(pool, subject, options, report))
    if options.partial and not subject.is_peer:  # no peer can sleep in part
        outcomes.append(partial_swaps(pool, subject, options, report))
    return outcomes


def _open(pool: Workers, options: SwapOptions, index: int) -> dict[str, Any]:
    worker = pool.start(f"device {options.devices[index]}")
    return worker.call("context", device=options.device_name(index))


def _prepare(pool: Workers, result: SwapResult, report: Report) -> None:
    options = result.options
    facts = [_open(pool, options, index) for index in range(len(options.devices))]
    pool.end_all()
    if options.touch:
        report("touching host memory", 0, 1)
        members = max(options.members, len(options.devices))
        worker = pool.start("touch")
        worker.call("touch", nbytes=math.ceil(1.02 * members * options.nbytes) + GIB)
        pool.end(worker)
    for index, device_facts in enumerate(facts):
        report(f"link floor of {options.device_name(index)}", index, len(facts))
        worker = pool.start("floor")
        reply = worker.call("floor", **_floor_arguments(options, index))
        result.links.append(_link(options, index, device_facts, reply))
        pool.end(worker)
    if len(facts) > 1:
        report("link floor of all devices together", 0, 1)
        together_workers = [pool.start("floor") for _ in facts]
        for index, worker in enumerate(together_workers):
            worker.send("floor", **_floor_arguments(options, index))
        for index, worker in enumerate(together_workers):
            result.together_links.append(_link(options, index, facts[index], worker.receive("floor")))
        pool.end_all()


def _floor_arguments(options: SwapOptions, index: int) -> dict[str, Any]:
    return {
        "device": options.device_name(index),
        "nbytes": options.nbytes,
        "piece_bytes": options.tensor_bytes,
        "repeats": options.floor_repeats,
    }


def _link(options: SwapOptions, index: int, facts: dict[str, Any], reply: dict[str, Any]) -> Link:
    return Link(options.device_name(index), facts, reply["bytes"], reply["milliseconds"])
