"""Plots as plain SVG, so that a picture needs no plotting library."""

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from hotrack.bench.sweep import CellResult

_WIDTH, _ROW, _LEFT = 760, 30, 210


def sweep_svg(path: Path, title: str, results: Sequence[CellResult]) -> None:
    """Horizontal bars of total output tokens per second, one per cell, and the time to first token."""
    top = max(r.total_tokens_per_s.median for r in results)
    height = 60 + _ROW * len(results)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<text x="12" y="24" font-size="16">{escape(title)}</text>',
    ]
    for i, r in enumerate(results):
        y = 44 + i * _ROW
        width = (_WIDTH - _LEFT - 190) * r.total_tokens_per_s.median / top
        label = f"{r.cell.concurrency} x {r.prompt_tokens:.0f} to {r.cell.output_len}"
        value = f"{r.total_tokens_per_s.median:.0f} tok/s, TTFT {r.ttft_ms.median:.0f} ms"
        parts += [
            f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">{label}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="22" fill="#3b6ea5"/>',
            f'<text x="{_LEFT + width + 6:.1f}" y="{y + 16}">{value}</text>',
        ]
    path.write_text("\n".join([*parts, "</svg>\n"]))
