"""Bars of the swap benchmark as SVG."""

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from hotrack.bench.swap_numbers import Row

_WIDTH, _ROW, _LEFT, _RIGHT = 900, 26, 330, 150
_OURS, _PEER, _FLOOR = "#3b6ea5", "#9aa5b1", "#c2452d"


def write_svg(path: Path, title: str, rows: Sequence[Row]) -> None:
    """One bar per row that is a time, on one scale; a red mark where the floor is."""
    timed = [row for row in rows if row.unit == "ms"]
    longest = max((row.value for row in timed), default=1.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{60 + _ROW * len(timed)}" '
        'font-family="sans-serif" font-size="13">',
        f'<text x="12" y="24" font-size="16">Sleep, wake and swap, {escape(title)}</text>',
    ]
    for index, row in enumerate(timed):
        y = 40 + index * _ROW
        end = _LEFT + row.value * scale
        color = _OURS if row.subject == "hotrack" else _PEER
        label = escape(f"{row.what}: {row.subject}")
        ratio = f" ({row.ratio:.2f} x floor)" if row.ratio is not None else ""
        parts += [
            f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{label}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{row.value * scale:.1f}" height="19" fill="{color}"/>',
            f'<text x="{end + 6:.1f}" y="{y + 14}">{row.value:.0f} ms{ratio}</text>',
        ]
        if row.floor is not None:
            x = _LEFT + row.floor * scale
            parts.append(f'<path d="M{x:.1f} {y - 2}v23" stroke="{_FLOOR}" stroke-width="2"/>')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>\n"]))
