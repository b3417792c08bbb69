"""Files written for llama-swap: every key of its format is accepted, and what differs is said."""

import pytest

from hotrack.config.pool_file import load_pool_text
from hotrack.gateway.build import make_routes, member_specs

EVERY_KEY = """
healthCheckTimeout: 500
logLevel: info
logTimeFormat: rfc3339
logToStdout: both
store: {path: /tmp/x.sqlite}
metricsMaxInMemory: 10
captureBuffer: 15
ui: {activity: {session_id: [X-Session-ID]}}
performance: {disabled: false, every: 15s}
startPort: 10001
sendLoadingState: true
includeAliasesInList: true
globalTTL: 5
unloadTimeout: 10
macros:
  "server": >
    /opt/llama-server --port ${PORT}
  "ctx": 4096
  "args": "--ctx-size ${ctx}"
apiKeys: ["sk-1", "${env.LLAMA_SWAP_KEY}"]
upstream: {ignorePaths: ['.*\\.js$']}
profiles: {coding: {description: d, pins: {llm: big, image: ~}}}
selectors: {coder: {strategy: warm, targets: [big], settings: {spillover: 4}}}
models:
  big:
    macros: {"ctx": 16384, "temp": 0.7}
    cmd: |
      # ${server} is defined above
      ${server}
      --model x.gguf ${args} --temp ${temp}
    name: Big
    description: A big one
    env: ["CUDA_VISIBLE_DEVICES=0,1"]
    proxy: http://127.0.0.1:${PORT}
    checkEndpoint: /custom
    ttl: 60
    unloadTimeout: 20
    compat: {ignoreWebsockets: true}
    useModelName: vendor/big
    filters:
      stripParams: "temperature, top_k"
      setParams: {top_p: 0.9}
      setParamsByID: {"${MODEL_ID}:high": {effort: high}}
    aliases: [gpt-4o-mini]
    metadata: {temperature: "${temp}", list: [1, "in ${MODEL_ID}"]}
    concurrencyLimit: 3
    sendLoadingState: false
    timeouts: {connect: 30}
    capabilities: {in: [text], tools: true, context: 32000}
  small: {unlisted: true, cmd: "serve ${PORT}", cmdStop: "docker stop ${MODEL_ID} ${PID}", ttl: -1}
hooks: {on_startup: {preload: [coder, big]}}
routing:
  router:
    use: group
    settings: {groups: {g: {swap: true, exclusive: false, persistent: true, members: [big]}}}
  scheduler: {use: fifo, settings: {fifo: {priority: {big: 10}}}}
peers: {other: {proxy: http://192.168.1.23, models: [m], apiKey: k}}
"""


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_SWAP_KEY", "sk-2")


def test_every_key_is_accepted_and_differences_are_said() -> None:
    config = load_pool_text(EVERY_KEY)
    differing = {warning.split(":")[0] for warning in config.warnings}
    assert differing == {
        "logTimeFormat", "logToStdout", "store", "metricsMaxInMemory", "captureBuffer", "ui", "performance",
        "startPort", "sendLoadingState", "upstream", "profiles", "selectors", "routing", "peers",
        "models.big.compat", "models.big.concurrencyLimit", "models.big.sendLoadingState",
        "models.big.timeouts",
        "models.small.cmdStop", "hooks.on_startup.preload",
    }  # fmt: skip


def test_keys_keep_their_meaning() -> None:
    config = load_pool_text(EVERY_KEY)
    big, small = member_specs(config)
    assert big.command == (
        *("/opt/llama-server", "--port", "${PORT}", "--model", "x.gguf"),
        *("--ctx-size", "4096", "--temp", "0.7"),  # a macro keeps what it was defined with
    )
    assert (big.ttl_s, small.ttl_s) == (60, 5)
    assert (big.deadlines.start_s, big.deadlines.stop_s, small.deadlines.stop_s) == (500, 20, 10)
    assert big.env == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert (big.health_path, big.served_model_name, big.max_in_flight) == ("/custom", "vendor/big", 3)
    assert big.sleep_level is None  # nobody said that it can sleep: it is stopped and started
    assert config.api_keys == ("sk-1", "sk-2")
    assert config.models["big"].metadata == {"temperature": 0.7, "list": [1, "in big"]}
    routes = make_routes(config)
    assert routes.listed == ["big"]
    assert routes.by_name["big:high"].overrides == {"top_p": 0.9, "effort": "high"}
    assert routes.by_name["gpt-4o-mini"].strip == {"temperature", "top_k"}
