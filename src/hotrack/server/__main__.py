"""``python -m hotrack.server MODEL [flags]``: one model behind HTTP."""

import sys
from collections.abc import Sequence

import uvloop

from hotrack.core.errors import HotrackError
from hotrack.obs.log import get_logger, setup_logging
from hotrack.server.flags import parse_flags
from hotrack.server.launch import run

log = get_logger(__name__)


def main(argv: Sequence[str]) -> int:
    """The command line's exit codes: 0 after a clean stop, 2 for options that cannot work, 3 for model files
    that cannot be used, 1 for everything else that went wrong."""
    setup_logging("server")
    try:
        engine_config, server_config = parse_flags(argv)
        setup_logging("server", server_config.log_level)
        return uvloop.run(run(engine_config, server_config))
    except HotrackError as error:
        log.error("%s", error.message)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
