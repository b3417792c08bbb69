"""``X-Request-Id``: the caller's, where it is harmless in logs and headers, else one of ours."""

import re
import secrets
from collections.abc import Iterable

HEADER = b"x-request-id"
_HARMLESS = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,128}")


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The request's id. ``headers``: (name, value) pairs, names in lower case; a value that is not 1 to 128
    letters, digits and ``._:/+=@~-``, or comes more than once, is replaced."""
    given = [value for name, value in headers if name == HEADER]
    if len(given) == 1 and _HARMLESS.fullmatch(given[0]):
        return given[0]
    return secrets.token_hex(16).encode()
