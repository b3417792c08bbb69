"""Tables of the swap benchmark, and the bars that hotrack sets itself."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.markup import escape
from rich.table import Table

from hotrack.bench.swap import HOTRACK, Link, SwapResult
from hotrack.bench.swap_cycles import Outcome
from hotrack.bench.swap_faults import Verdict
from hotrack.bench.swap_numbers import GIB, MIB, Leak, Row

WAKE_RATIO = 1.10
PARTIAL_RATIO = 1.15
TOGETHER_RATIO = 1 / 0.9
HOST_RATIO = 1.02
RESIDUE_BYTES = 0.6 * GIB
SLEEP_MS, SLEEP_MS_PER_GIB = 20.0, 1.0


def sleep_bar_ms(mapped_bytes: int) -> float:
    return SLEEP_MS + SLEEP_MS_PER_GIB * mapped_bytes / GIB


def rows(result: SwapResult) -> list[Row]:
    """All measured values, by what they are and hotrack first. Bars apply to hotrack on a GPU: on a CPU the
    same code runs over another kind of memory, and the point is that it is right."""
    found: list[Row] = []
    members = 0
    for outcome in result.outcomes:
        barred = result.options.is_cuda and outcome.subject == HOTRACK
        if outcome.scenario in _BY_SCENARIO:
            found += _BY_SCENARIO[outcome.scenario](outcome, result.links[0], barred)
        else:
            found += _together(outcome, result.links[members], barred)
            members += 1
    order = list(dict.fromkeys(row.what for row in found))
    return sorted(found, key=lambda row: order.index(row.what))


def _cycles(outcome: Outcome, link: Link, barred: bool) -> list[Row]:
    name, weights, mapped = outcome.subject, _known(outcome, "weights"), _known(outcome, "mapped")
    floor = link.floor_ms(weights)
    return [
        Row.of(name, "sleep", outcome.series["sleep"], bar=sleep_bar_ms(mapped) if barred else None),
        Row.of(name, "wake", outcome.series["wake"], floor=floor, bar=WAKE_RATIO * floor if barred else None),
        *_bytes_rows(outcome, link, weights, barred),
    ]


def _bytes_rows(outcome: Outcome, link: Link, weights: int, barred: bool) -> Iterator[Row]:
    host, used = outcome.bytes.get("host copy"), outcome.bytes.get("host used")
    asleep, context = outcome.bytes.get("device asleep"), link.context_bytes
    make = partial(Row, subject=outcome.subject, unit="GiB")
    if host is not None:
        bar = HOST_RATIO * weights / GIB if barred else None
        yield make(what="host copy", value=host / GIB, floor=weights / GIB, bar=bar)
    if used is not None:
        yield make(what="host used asleep", value=used / GIB)
    if asleep is not None and context is not None:
        bar = (context + RESIDUE_BYTES) / GIB if barred else None
        note = f"bare context {context / GIB:.2f}"
        yield make(what="device bytes asleep", value=asleep / GIB, bar=bar, note=note)


def _swap(outcome: Outcome, link: Link, barred: bool) -> list[Row]:
    weights = _known(outcome, "weights")
    floor = link.floor_ms(weights)
    bar = WAKE_RATIO * floor + sleep_bar_ms(weights) if barred else None
    return [Row.of(outcome.subject, "swap", outcome.series["swap"], floor=floor, bar=bar)]


def _partial(outcome: Outcome, link: Link, barred: bool) -> list[Row]:
    floor = link.floor_ms(_known(outcome, "deficit"))
    bar = PARTIAL_RATIO * floor if barred else None
    note = f"{_known(outcome, 'moved') / MIB:.0f} MiB moved"
    swap = outcome.series["swap"]
    return [Row.of(outcome.subject, "partial swap", swap, floor=floor, bar=bar, note=note)]


def _together(outcome: Outcome, link: Link, barred: bool) -> list[Row]:
    floor = link.floor_ms(_known(outcome, "weights"))
    bar = TOGETHER_RATIO * floor if barred else None
    what = f"wake {outcome.scenario}"
    return [Row.of(outcome.subject, what, outcome.series["wake"], floor=floor, bar=bar)]


_BY_SCENARIO: dict[str, Callable[[Outcome, Link, bool], list[Row]]] = {
    "cycles": _cycles,
    "swap": _swap,
    "partial swap": _partial,
}


def _known(outcome: Outcome, what: str) -> int:
    value = outcome.bytes[what]
    assert value is not None, what
    return value


def floor_line(link: Link) -> str:
    low, high = min(link.milliseconds), max(link.milliseconds)
    return (
        f"{link.device} ({link.facts['name']}): {link.bytes / GIB:.2f} GiB of plain copies from the host in "
        f"{link.floor_ms(link.bytes):.1f} ms (median of {len(link.milliseconds)}, {low:.1f}-{high:.1f}), "
        f"{link.bytes_per_ms * 1e3 / GIB:.1f} GiB/s"
    )


def table(found: Sequence[Row]) -> Table:
    drawn = Table(title="sleep, wake and swap", caption="floor: plain copies of the same bytes, in this run")
    for column in ("", "who", "first", "median", "p95", "x floor", "bar", "note"):
        left = column in ("", "who", "note")
        drawn.add_column(column, justify="left" if left else "right", no_wrap=left)
    last = None
    for row in found:
        style = {True: "green", False: "red", None: ""}[row.passed]
        if last is not None and row.what != last:
            drawn.add_section()
        drawn.add_row(
            "" if row.what == last else f"{row.what}, {row.unit}",
            escape(row.subject),
            *(_number(value, row.unit) for value in (row.first, row.value, row.p95)),
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.bar is None else f"<= {_number(row.bar, row.unit)}",
            row.note,
            style=style,
        )
        last = row.what
    return drawn


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if unit == "GiB" else f"{value:.1f}"


def leak_table(subject: str, leaks: Sequence[Leak]) -> Table:
    """What stayed equal is a line; what grew or may not be judged exactly is a row."""
    equal = [leak.what for leak in leaks if leak.exact and leak.passed]
    caption = f"the same in every cycle: {', '.join(equal)}" if equal else None
    drawn = Table(title=f"{subject}: what must not change from cycle to cycle", caption=caption)
    for column in ("what", "first", "last", "per cycle", "cycles that differ", ""):
        left = column in ("what", "")
        drawn.add_column(column, justify="left" if left else "right", no_wrap=left)
    for leak in leaks:
        if leak.what in equal:
            continue
        limit = _limit(leak)
        drawn.add_row(
            leak.what,
            f"{leak.first:.0f}",
            f"{leak.last:.0f}",
            "" if leak.exact else f"{leak.per_cycle.value:.0f} ± {leak.per_cycle.error:.0f}",
            str(leak.changed),
            limit if leak.passed else f"NOT {limit}",
            style="" if leak.passed else "red",
        )
    return drawn


def _limit(leak: Leak) -> str:
    if leak.exact:
        return "equal"
    return "too few cycles to judge" if leak.limit is None else f"< {leak.limit:.0f} per cycle"


def fault_table(verdicts: Sequence[Verdict]) -> Table:
    drawn = Table(title="faults")
    for column in ("fault", "", "what happened"):
        drawn.add_column(column)
    for verdict in verdicts:
        word, style = {True: ("pass", "green"), False: ("FAIL", "red"), None: ("skipped", "")}[verdict.passed]
        drawn.add_row(verdict.fault, word, escape(verdict.found), style=style)
    return drawn


def row_payload(row: Row) -> dict[str, Any]:
    return {**asdict(row), "ratio": row.ratio, "passed": row.passed}


def drawings(result: SwapResult, found: Sequence[Row]) -> Iterator[Table | str]:
    """Everything to print, in order; lines that must not be missed are red."""
    for link in result.links:
        yield floor_line(link)
    for link in result.together_links:
        yield f"at the same time: {floor_line(link)}"
    if found:
        yield table(found)
    for outcome in result.outcomes:
        if outcome.leaks:
            yield leak_table(outcome.subject, outcome.leaks)
        for fault in outcome.faults:
            yield f"[red]{escape(f'{outcome.subject}, {outcome.scenario}: {fault}')}[/red]"
    if result.verdicts:
        yield fault_table(result.verdicts)
    for peer, reason in result.skipped.items():
        yield f"[yellow]{escape(f'{peer} failed: {reason}')}[/yellow]"
