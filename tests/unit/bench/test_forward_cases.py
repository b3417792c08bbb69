import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrack.bench.forward_cases import ForwardCase, ForwardRequest, jittered, parse_case, parse_cases
from hotrack.core.errors import ConfigError


def test_the_forms_of_a_request():
    case = parse_case("all=2*1@4096, 512@4096c,3*4@100:3,7")
    assert case.requests == (
        ForwardRequest(1, 4096),
        ForwardRequest(1, 4096),
        ForwardRequest(512, 4096, own_prefix=True),
        *[ForwardRequest(4, 100, num_drafts=3)] * 3,
        ForwardRequest(7, 7),
    )
    assert case.num_tokens == 2 + 512 + 12 + 7
    assert case.num_kv_tokens == 3 * 4096 + 300 + 7
    assert case.requests[2].num_computed == 4096 - 512


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("64*1@8192", "NAME=REQ"),
        ("=1", "NAME=REQ"),
        ("a b=1", "NAME=REQ"),
        ("x=", "'' is no request"),
        ("x=1,,2", "'' is no request"),
        ("x=-1", "'-1' is no request"),
        ("x=1.5", "is no request"),
        ("x=0", "nothing to compute"),
        ("x=0*5", "nothing to compute"),
        ("x=8@4", "includes the 8 query tokens"),
        ("x=2@99:3", "verified by 4 query tokens, not 2"),
        ("x=70000*1", "more than 65536 requests"),
        ("x=1@99999999999", "longer than"),
        ("x=٣", "is no request"),
    ],
)
def test_what_is_wrong_is_quoted(text: str, why: str):
    with pytest.raises(ConfigError, match="case") as caught:
        parse_case(text)
    assert why in caught.value.message


def test_names_are_unique():
    with pytest.raises(ConfigError, match="two cases are called 'a'"):
        parse_cases(["a=1", "b=2", "a=3"])


REQUESTS = st.builds(
    lambda query, prefix, own, drafts: ForwardRequest(1 + drafts if drafts else query, prefix, own, drafts),
    st.integers(1, 5000),
    st.integers(0, 100_000),
    st.booleans(),
    st.integers(0, 7),
).map(lambda r: ForwardRequest(r.query_len, r.query_len + r.kv_len, r.own_prefix, r.num_drafts))
CASES = st.builds(lambda requests: ForwardCase("a.B-1", tuple(requests)), st.lists(REQUESTS, min_size=1))


@given(CASES)
def test_a_written_case_is_read_back(case: ForwardCase):
    assert parse_case(str(case)) == case


@given(CASES, st.integers(0, 9), st.floats(0, 0.9))
def test_jitter_moves_prefixes_only(case: ForwardCase, seed: int, share: float):
    found = jittered(case, share, seed, 110_000)
    assert found == jittered(case, share, seed, 110_000)
    for before, after in zip(case.requests, found.requests, strict=True):
        assert after.query_len == before.query_len
        assert after.own_prefix is before.own_prefix
        assert after.kv_len <= 110_000
        assert bool(after.num_computed) == bool(before.num_computed)
        assert abs(after.num_computed - before.num_computed) <= share * before.num_computed + 1


def test_jitter_spreads_and_depends_on_seed_and_name():
    case = parse_case("decode=64*1@8192")
    lengths = [request.kv_len for request in jittered(case, 0.5, 0, 1 << 20).requests]
    assert min(lengths) < 5000 < 11000 < max(lengths)
    assert jittered(case, 0.5, 1, 1 << 20) != jittered(case, 0.5, 0, 1 << 20)
    other = ForwardCase("other", case.requests)
    assert jittered(other, 0.5, 0, 1 << 20).requests != jittered(case, 0.5, 0, 1 << 20).requests
    with pytest.raises(ConfigError, match="beyond --max-model-len 4096"):
        jittered(case, 0.5, 0, 4096)
