"""Cases of the forward benchmark: exact batches, written as ``NAME=REQ[,REQ...]``.

A request is ``[N*]Q[@K][c][:D]``: N times (default 1) Q query tokens of a sequence whose length is K after
the step (default Q). ``c``: the first K - Q tokens are the sequence's own earlier chunks, else a prefix-cache
hit. ``:D``: D of the query tokens are drafts to verify; Q is 1 + D then. Examples::

    decode=64*1@8192            64 sequences decode at context 8192
    mixed=16*1@4096,1*2048      the same step holds a prefill of 2048
    chunk=1*512@4096c           the eighth chunk of a long prompt
    verify=8*4@1024:3           three drafts each
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from hotrack.core.errors import ConfigError

_REQUEST = re.compile(r"(?:(\d+)\*)?(\d+)(?:@(\d+))?(c)?(?::(\d+))?", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
MAX_REQUESTS = 1 << 16
MAX_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """One sequence's part of a step. ``kv_len`` counts the query's tokens."""

    query_len: int
    kv_len: int
    own_prefix: bool = False
    num_drafts: int = 0

    @property
    def num_computed(self) -> int:
        """Tokens that are in the cache before the step."""
        return self.kv_len - self.query_len


@dataclass(frozen=True, slots=True)
class ForwardCase:
    name: str
    requests: tuple[ForwardRequest, ...]

    @property
    def num_tokens(self) -> int:
        return sum(request.query_len for request in self.requests)

    @property
    def num_kv_tokens(self) -> int:
        return sum(request.kv_len for request in self.requests)

    def __str__(self) -> str:
        groups: list[tuple[int, ForwardRequest]] = []
        for request in self.requests:
            if groups and groups[-1][1] == request:
                groups[-1] = (groups[-1][0] + 1, request)
            else:
                groups.append((1, request))
        return f"{self.name}={','.join(_written(count, request) for count, request in groups)}"


def _written(count: int, request: ForwardRequest) -> str:
    context = f"@{request.kv_len}" if request.kv_len != request.query_len else ""
    drafts = f":{request.num_drafts}" if request.num_drafts else ""
    return f"{count}*{request.query_len}{context}{'c' if request.own_prefix else ''}{drafts}"


def parse_case(text: str) -> ForwardCase:
    """Raises ConfigError, which quotes the part that is wrong."""
    name, equals, body = text.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise ConfigError(f"case {text!r}: expected NAME=REQ[,REQ...], for example decode=64*1@8192")
    requests: list[ForwardRequest] = []
    for part in body.split(","):
        count, request = _parse_request(text, part)
        if len(requests) + count > MAX_REQUESTS:
            raise ConfigError(f"case {text!r}: more than {MAX_REQUESTS} requests")
        requests += [request] * count
    return ForwardCase(name, tuple(requests))


def _parse_request(text: str, part: str) -> tuple[int, ForwardRequest]:
    found = _REQUEST.fullmatch(part.strip())
    if found is None:
        raise ConfigError(f"case {text!r}: {part!r} is no request; expected [N*]Q[@K][c][:D] as in 64*1@8192")
    count, query, context, drafts = (int(found[i]) if found[i] else None for i in (1, 2, 3, 5))
    assert query is not None, "the expression has it"
    request = ForwardRequest(query, query if context is None else context, bool(found[4]), drafts or 0)
    reason = None
    if count == 0 or query == 0:
        reason = "nothing to compute"
    elif request.kv_len < query:
        reason = f"the context {request.kv_len} includes the {query} query tokens and is shorter"
    elif request.kv_len > MAX_TOKENS:
        reason = f"the context is longer than {MAX_TOKENS}"
    elif request.num_drafts and query != 1 + request.num_drafts:
        reason = (
            f"{request.num_drafts} drafts are verified by {1 + request.num_drafts} query tokens, not {query}"
        )
    if reason is not None:
        raise ConfigError(f"case {text!r}: {part.strip()!r}: {reason}")
    return 1 if count is None else count, request


def parse_cases(texts: Sequence[str]) -> list[ForwardCase]:
    """Raises ConfigError, also when two cases have one name."""
    cases = [parse_case(text) for text in texts]
    names = [case.name for case in cases]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two cases are called {twice!r}")
    return cases


def jittered(case: ForwardCase, share: float, seed: int, max_model_len: int) -> ForwardCase:
    """The case with every prefix drawn from the uniform distribution of ``1 - share`` to ``1 + share`` times
    its length, the same on every rank and every run; sequences of one length would hide what uneven ones
    cost. Queries stay, and nothing grows beyond ``max_model_len``.

    Raises:
        ConfigError: a request is longer than ``max_model_len`` without jitter.
    """
    too_long = next((r for r in case.requests if r.kv_len > max_model_len), None)
    if too_long is not None:
        raise ConfigError(
            f"case {case.name!r}: a context of {too_long.kv_len} tokens is beyond "
            f"--max-model-len {max_model_len}"
        )
    draw = random.Random(f"{seed}:{crc32(case.name.encode())}")
    requests = []
    for request in case.requests:
        prefix = round(request.num_computed * draw.uniform(1 - share, 1 + share))
        prefix = max(min(prefix, max_model_len - request.query_len), 1 if request.num_computed else 0)
        requests.append(
            ForwardRequest(
                request.query_len, prefix + request.query_len, request.own_prefix, request.num_drafts
            )
        )
    return ForwardCase(case.name, tuple(requests))
