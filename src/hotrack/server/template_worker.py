"""Renders chat templates in a process of its own: a template comes with the model files, so it is not
trusted.

The sandbox keeps templates from reaching Python; this process keeps them from using up time and memory: the
parent kills it when a render takes too long, the kernel refuses it memory beyond a limit, and it has no
secrets. Started as ``python -m hotrack.server.template_worker``.
"""

import resource
import sys
from collections.abc import Callable
from typing import BinaryIO

import jinja2
import msgspec

from hotrack.checkpoint.chat_template import template_environment
from hotrack.core.child import leave_signals_to_parent
from hotrack.server.template_wire import RenderJob, RenderResult, frame, read_frame

MEMORY_LIMIT_BYTES = 1 << 30
MAX_OUTPUT_CHARS = 32 << 20


class Renderer:
    """Compiles each template once."""

    def __init__(self) -> None:
        self._env = template_environment()
        self._compiled: dict[str, jinja2.Template] = {}

    def render(self, job: RenderJob) -> RenderResult:
        try:
            template = self._compiled.get(job.template)
            if template is None:
                template = self._compiled[job.template] = self._env.from_string(job.template)
            pieces, size = [], 0
            for piece in template.generate(job.variables):
                size += len(piece)
                if size > MAX_OUTPUT_CHARS:
                    return RenderResult(error=f"it produced more than {MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
            return RenderResult(text="".join(pieces))
        except MemoryError:
            return RenderResult(error=f"it needed more than {MEMORY_LIMIT_BYTES >> 20} MiB of memory")
        except Exception as error:  # noqa: BLE001 anything a hostile template raises is its own failure
            return RenderResult(error=f"{type(error).__name__}: {error}"[:2000])


def serve(source: BinaryIO, sink: BinaryIO, render: Callable[[RenderJob], RenderResult]) -> None:
    """Answer jobs one after the other until ``source`` ends."""
    decoder = msgspec.json.Decoder(RenderJob)
    while (payload := read_frame(source)) is not None:
        sink.write(frame(msgspec.json.encode(render(decoder.decode(payload)))))
        sink.flush()


def main() -> None:
    leave_signals_to_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(sys.stdin.buffer, sys.stdout.buffer, Renderer().render)


if __name__ == "__main__":
    main()
