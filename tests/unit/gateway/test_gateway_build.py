"""From a pool file to specs, routes and budgets."""

import sys
from dataclasses import fields

import pytest

from hotrack.config.engine import EngineConfig
from hotrack.config.pool import EngineOptions, PolicyConfig, SleepConfig
from hotrack.config.pool_file import load_pool_text
from hotrack.core.errors import ConfigError
from hotrack.gateway.build import check_budget, make_routes, member_specs, pool_policy
from hotrack.gateway.devices import stated_budgets
from hotrack.members.spec import Deadlines
from hotrack.pool.policy import PoolPolicy


def specs(text: str):
    return {spec.name: spec for spec in member_specs(load_pool_text(text))}


def test_a_model_becomes_our_engine_on_a_private_socket() -> None:
    spec = specs(
        "models: {a: {model: m, engine: {max_model_len: 9, kv_cache_memory: 1MiB, "
        "enable_prefix_caching: false, args: [--x]}}}"
    )["a"]
    assert spec.command == (
        *(sys.executable, "-m", "hotrack.server", "m", "--uds", "${SOCKET}", "--served-model-name", "a"),
        *("--max-model-len", "9", "--kv-cache-memory-bytes", "1048576", "--no-enable-prefix-caching", "--x"),
    )
    assert spec.env == {"HOTRACK_API_KEY": ""}  # the gateway's key must not become the member's
    assert (spec.sleep_level, spec.url) == (1, None)


def test_a_command_stops_unless_told_that_it_can_sleep() -> None:
    found = specs(
        "models:\n a: {cmd: 'serve \"x y\" ${PORT}', env: ['K=v=w']}\n"
        " b: {cmd: 'serve ${SOCKET}', sleep_level: 2}"
    )
    assert found["a"].command == ("serve", "x y", "${PORT}")
    assert (found["a"].sleep_level, found["a"].env) == (None, {"K": "v=w"})
    assert found["b"].sleep_level == 2


def test_a_proxy_alone_is_somebody_elses() -> None:
    spec = specs("models: {a: {proxy: 'http://127.0.0.1:9', sleep_level: 1}}")["a"]
    assert (spec.url, spec.command) == ("http://127.0.0.1:9", ())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: {a: {cmd: 'serve'}}", "must contain \\${PORT}"),
        ("models: {a: {cmd: 'serve \"'}}", "cannot be split"),
        ("models: {a: {cmd: '# only a comment'}}", "cmd is empty"),
        ("models: {a: {proxy: 'http://x', sleep_level: 0}}", "cannot sleep"),
    ],
)
def test_impossible_members(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        specs(text)


def test_timeouts_come_from_either_vocabulary() -> None:
    found = specs(
        "healthCheckTimeout: 77\nunloadTimeout: 5\nglobalTTL: 3\npool: {sleep: {drain_timeout: 2s}}\n"
        "models:\n a: {model: x}\n b: {model: y, ttl: 0, unloadTimeout: 9, concurrencyLimit: 4}"
    )
    assert (found["a"].deadlines.start_s, found["a"].deadlines.drain_s, found["a"].deadlines.stop_s) == (
        77,
        2,
        5,
    )
    assert (found["a"].ttl_s, found["b"].ttl_s) == (3, 0)
    assert (found["b"].deadlines.stop_s, found["b"].max_in_flight) == (9, 4)


def test_policy_and_canary_overlay_their_defaults() -> None:
    config = load_pool_text(
        "models:\n a: {model: x}\n b: {model: y, canary: {enabled: false}}\n"
        "pool: {policy: {max_wait: 3s}, canary: {max_tokens: 2}}"
    )
    assert pool_policy(config) == PoolPolicy(max_wait_s=3.0)
    a, b = member_specs(config)
    assert a.canary.max_tokens == 2
    assert b.canary.prompts == ()


def test_routes_know_aliases_filters_and_variants() -> None:
    routes = make_routes(
        load_pool_text(
            """
models:
  a:
    model: x
    aliases: [gpt]
    useModelName: inner
    filters:
      stripParams: "top_p, model,"
      setParams: {seed: 1, model: no}
      setParamsByID: {"a:high": {seed: 2}}
  b: {model: y, unlisted: true}
"""
        )
    )
    assert routes.listed == ["a"]
    assert set(routes.by_name) == {"a", "gpt", "a:high", "b"}
    assert routes.by_name["gpt"].upstream_name == "inner"
    assert routes.by_name["gpt"].strip == {"top_p"}
    assert routes.by_name["gpt"].overrides == {"seed": 1}
    assert routes.by_name["a:high"].overrides == {"seed": 2}
    assert routes.by_name["b"].upstream_name == "b"


def test_a_budget_that_fits_nobody_is_refused_with_its_arithmetic() -> None:
    config = load_pool_text(
        "models:\n a: {model: x, engine: {kv_cache_memory: 100MiB}}\n b: {model: y, memory: {awake: 10MiB}}\n"
        "pool: {memory: {budget: 300MiB, margin: 20MiB}}"
    )
    assert stated_budgets(config)["default"].total_bytes == 300 << 20
    check_budget(config, {"a": 150 << 20})
    with pytest.raises(ConfigError, match=r"'a' cannot be awake .* 300 MiB \(assumed\).*20 MiB.*too much"):
        check_budget(config, {"a": 200 << 20})


def test_without_a_budget_nothing_is_checked() -> None:
    config = load_pool_text("models: {a: {model: x}}")
    assert stated_budgets(config) == {}
    assert check_budget(config, {"a": 1 << 60}) == ()


NOT_IN_A_POOL_FILE = {"model", "served_model_name", "enable_sleep_mode", "pipeline_depth", "rank_timeout_s"}


def test_option_names_follow_the_classes_they_overlay() -> None:
    engine = {f.name for f in fields(EngineConfig)} - NOT_IN_A_POOL_FILE
    assert {f.name for f in fields(EngineOptions)} - {"args"} == engine
    assert {f.name for f in fields(SleepConfig)} - {"level"} == {f.name for f in fields(Deadlines)}
    assert {f.name for f in fields(PolicyConfig)} <= {f.name for f in fields(PoolPolicy)}
