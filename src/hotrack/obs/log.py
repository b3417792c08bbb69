"""One-line logs on stderr; every process names itself."""

import logging
import sys

from hotrack.config import env

FORMAT = "%(asctime)s %(levelname).1s %(process_label)s %(name)s: %(message)s"


class _Label(logging.Filter):
    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label

    def filter(self, record: logging.LogRecord) -> bool:
        record.process_label = self.label
        return True


def setup_logging(label: str, level: str | None = None) -> None:
    """Configure the ``hotrack`` logger tree for this process. ``label``: e.g. 'gateway', 'smollm2',
    'smollm2/rank0'."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_Label(label))
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    root = logging.getLogger("hotrack")
    root.handlers[:] = [handler]
    root.setLevel((level or env.log_level()).upper())
    root.propagate = False


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name if name.startswith("hotrack") else f"hotrack.{name}")
