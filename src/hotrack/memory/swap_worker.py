"""One process of the swap benchmark: ``python -m hotrack.memory.swap_worker``.

Reads one JSON object per line on stdin, ``{"op": ..., ...}``, and answers each with one on stdout:
``{"ok": true, "ms": ..., ...}`` or ``{"ok": false, "code": ..., "error": ...}``; lines with ``progress`` may
come before an answer. ``"at"`` (seconds of the monotonic clock, the same for all processes) delays an
operation, so that several workers begin at the same moment. ``exit`` or the end of stdin ends the process.

The operations are the methods of ``SwapMember``, and those of ``swap_device`` for processes without a member.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from hotrack.core.child import leave_signals_to_parent
from hotrack.core.errors import HotrackError
from hotrack.memory import swap_device
from hotrack.memory.swap_member import SwapMember

Operation = Callable[..., dict[str, Any]]


def serve(operations: Mapping[str, Operation]) -> None:
    """Answer requests until the end. Whatever libraries print goes to stderr."""
    leave_signals_to_parent()
    with os.fdopen(os.dup(1), "w", buffering=1) as replies:
        os.dup2(2, 1)
        for line in sys.stdin:
            request = json.loads(line)
            name = request.pop("op")
            if name == "exit":
                replies.write('{"ok": true, "ms": 0}\n')
                return
            replies.write(json.dumps(_answer(operations[name], request, replies.write)) + "\n")


def _answer(operation: Operation, arguments: dict[str, Any], write: Callable[[str], Any]) -> dict[str, Any]:
    if arguments.pop("report_progress", False):
        arguments["progress"] = lambda done, total: write(json.dumps({"progress": [done, total]}) + "\n")
    wait = arguments.pop("at", 0.0) - time.monotonic()
    if wait > 0:
        time.sleep(wait)
    start = time.perf_counter()
    try:
        result = operation(**arguments)
    except HotrackError as error:
        return {"ok": False, "code": error.code, "error": error.message}
    except (RuntimeError, OSError, MemoryError) as error:  # a driver's or a peer's: untyped
        return {"ok": False, "code": type(error).__name__, "error": str(error)}
    return {"ok": True, "ms": (time.perf_counter() - start) * 1e3, **result}


def member_operations(member: SwapMember) -> dict[str, Operation]:
    names = ("init", "sleep", "wake", "use", "check", "stats", "corrupt")
    return {name: getattr(member, name) for name in names} | swap_device.OPERATIONS


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the benchmark is gone
        serve(member_operations(SwapMember()))
