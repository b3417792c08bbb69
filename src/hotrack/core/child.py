"""Child processes that end with their parent, and not before it says so."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def bound_to_parent() -> Callable[[], None]:
    """For ``preexec_fn``: the kernel kills the child when the thread that starts it ends (Linux), so that not
    even ``kill -9`` leaves an orphan. Only system calls run between fork and exec.
    """
    parent = os.getpid()

    def arm() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # it died before the call
                os._exit(1)

    return arm


def leave_signals_to_parent() -> None:
    """In the child: ignore SIGINT and SIGTERM. A terminal or a supervisor sends them to a whole group of
    processes; the parent ends this one when its work is done. (Not inherited: uvloop's children begin with
    the default signal handling.)
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
