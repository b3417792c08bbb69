"""Options of one member's HTTP server."""

import ipaddress
from dataclasses import dataclass

from hotrack.core.errors import ConfigError
