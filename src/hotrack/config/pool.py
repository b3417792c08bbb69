# ruff: noqa: RUF009 - option() is dataclasses.field()
"""The pool file: which models, on which budget, under which policy. llama-swap's keys keep their meaning.

These dataclasses say what may be written and with which defaults; ``config.pool_file`` reads files into them.
``None`` in a policy, sleep or canary option means the pool's own default.
"""

from dataclasses import dataclass, field
from typing import Any

from hotrack.config.engine import DEVICES, DTYPES, HOST_COPIES, LOAD_FORMATS, ONE_DEVICE
from hotrack.config.schema import Anything, Block, Duration, Flag, ListOf, MapOf, Number, Size, Text, option

SECONDS = Number(0, whole=False)
_LOG_LEVELS = ("debug", "info", "warn", "warning", "error")
_ACCEPTED = "accepted, and has no effect: "


@dataclass(frozen=True, slots=True, kw_only=True)
class FiltersConfig:
    """What is changed in a request's body before the member sees it."""

    strip_params: str = option(Text(), "", key="stripParams", doc="Comma-separated body keys to remove.")
    set_params: dict[str, Any] = option(MapOf(Anything()), {}, key="setParams", doc="Body keys to set.")
    set_params_by_id: dict[str, dict[str, Any]] = option(
        MapOf(MapOf(Anything())), {}, key="setParamsByID", doc="Body keys to set when asked by this name."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of hotrack's own engine; the names are those of ``hotrack engine``'s flags."""

    dtype: str | None = option(Text(DTYPES), None, doc="Of weights and KV; auto: the checkpoint's.")
    load_format: str | None = option(
        Text(LOAD_FORMATS), None, doc="dummy makes random weights for a config.json."
    )
    device: str | None = option(
        Text(DEVICES, also=ONE_DEVICE), None, doc="Also cuda:N. auto: a GPU if there is one, else the CPU."
    )
    host_copy: str | None = option(
        Text(HOST_COPIES), None, doc="shared: on a GPU, a restart finds the weights in /dev/shm."
    )
    tensor_parallel_size: int | None = option(Number(1), None, doc="Ranks that share the model.")
    max_model_len: int | None = option(Number(1), None, doc="Prompt plus completion, in tokens.")
    max_num_seqs: int | None = option(Number(1), None, doc="Sequences in one batch.")
    max_num_batched_tokens: int | None = option(Number(1), None, doc="Tokens in one step.")
    block_size: int | None = option(Number(1), None, doc="Tokens in one KV block.")
    gpu_memory_utilization: float | None = option(
        Number(0, 1, whole=False), None, doc="Share of the device for weights, KV and workspace."
    )
    kv_cache_memory_bytes: int | None = option(
        Size(), None, key="kv_cache_memory", doc="KV cache; wins over gpu_memory_utilization."
    )
    enable_prefix_caching: bool | None = option(Flag(), None, doc="Reuse KV of equal prompt beginnings.")
    enforce_eager: bool | None = option(Flag(), None, doc="No CUDA graphs.")
    num_threads: int | None = option(Number(1), None, doc="CPU threads of one rank.")
    seed: int | None = option(
        Number(0), None, doc="Accepted for vLLM; requests bring their own seed, or get a random one."
    )
    args: tuple[str, ...] = option(ListOf(Text()), (), doc="Further command-line arguments, as they are.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberMemory:
    """Per device. What is not stated is measured."""

    awake_bytes: int | None = option(Size(), None, key="awake", doc="Most memory held while awake.")
    residue_bytes: int | None = option(Size(), None, key="residue", doc="Most memory held while asleep.")
    device: str | None = option(
        Text(("cpu", "cuda"), also=ONE_DEVICE),
        None,
        doc="Where a server that is not hotrack's own holds it: on the host, or a GPU (also cuda:N).",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryConfig:
    enabled: bool = option(Flag(), True, doc="Ask the canary after every start and wake.")
    prompts: tuple[str, ...] | None = option(
        ListOf(Text()), None, doc="Greedy prompts asked after every wake."
    )
    max_tokens: int | None = option(Number(1, 256), None, doc="Tokens compared per prompt.")
    logprob_tolerance: float | None = option(
        SECONDS, None, doc="Most that the first token's logprob may change."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One member: hotrack runs ``model``; ``cmd`` starts another server; ``proxy`` alone is run elsewhere."""

    model: str | None = option(Text(), None, doc="Folder, GGUF file, Hugging Face repo id or demo name.")
    engine: EngineOptions = option(
        Block(EngineOptions), EngineOptions, doc="Options of hotrack's own engine."
    )
    cmd: str | None = option(Text(), None, doc="Starts a server that listens on ${PORT} or ${SOCKET}.")
    cmd_stop: str | None = option(
        Text(), None, key="cmdStop", differs=_ACCEPTED + "members are stopped with SIGTERM, then SIGKILL"
    )
    proxy: str | None = option(Text(), None, doc="Base URL of a server run elsewhere.")
    check_endpoint: str = option(
        Text(), "/health", key="checkEndpoint", doc="Path that answers 200 when the server is up."
    )
    ttl_s: float | None = option(
        Number(-1, whole=False), None, key="ttl", doc="Sleep after that many idle seconds."
    )
    unload_timeout_s: float | None = option(Duration(), None, key="unloadTimeout", doc="SIGTERM to SIGKILL.")
    env: tuple[str, ...] = option(ListOf(Text()), (), doc="NAME=value strings.")
    aliases: tuple[str, ...] = option(ListOf(Text()), (), doc="Further names for this model.")
    use_model_name: str | None = option(
        Text(), None, key="useModelName", doc="The name the server itself uses."
    )
    filters: FiltersConfig = option(Block(FiltersConfig), FiltersConfig, doc="Changes to request bodies.")
    metadata: dict[str, Any] = option(MapOf(Anything()), {}, doc="Shown in /v1/models.")
    capabilities: dict[str, Any] = option(MapOf(Anything()), {}, doc="Shown in /v1/models.")
    concurrency_limit: int = option(
        Number(0), 0, key="concurrencyLimit", doc="Requests at once; 0 = no limit.",
        differs="requests above it queue (pool.policy.max_queue) instead of getting a 429",
    )  # fmt: skip
    unlisted: bool = option(Flag(), False, doc="Served, but not shown in /v1/models.")
    name: str = option(Text(), "", doc="Display name.")
    description: str = option(Text(), "", doc="Shown in /v1/models.")
    macros: dict[str, Any] = option(MapOf(Anything()), {}, doc="Names for ${name}.")
    send_loading_state: bool | None = option(
        Flag(), None, key="sendLoadingState", differs=_ACCEPTED + "waiting streams get SSE comments instead"
    )
    timeouts: dict[str, Any] = option(
        MapOf(Anything()), {}, differs=_ACCEPTED + "connecting takes at most 5 s, answers may take any time"
    )
    compat: dict[str, Any] = option(MapOf(Anything()), {}, differs=_ACCEPTED + "websockets are not proxied")
    priority: int = option(Number(), 0, doc="Lower is served first.")
    pinned: bool = option(Flag(), False, doc="Never put to sleep for another member.")
    auto_wake: bool = option(Flag(), True, doc="Wake on a request; otherwise answer 503 model_asleep.")
    sleep_level: int | None = option(Number(0, 2), None, doc="vLLM's sleep level; 0 = stop instead of sleep.")
    device_group: str = option(Text(), "default", doc="Members of one group share devices and one budget.")
    memory: MemberMemory = option(Block(MemberMemory), MemberMemory)
    canary: CanaryConfig | None = option(Block(CanaryConfig), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """What the members may use together on each device of their group."""

    budget_bytes: int | None = option(
        Size(),
        None,
        key="budget",
        doc="Bytes for all members of a group. Default: on a GPU what others leave of it; else one member is "
        "awake at a time.",
    )
    margin_bytes: int | None = option(
        Size(), None, key="margin", doc="Kept free. Default: of a whole GPU 1 %, at least 256 MiB."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepConfig:
    """How members fall asleep and wake; every step has a deadline."""

    level: int | None = option(Number(0, 2), None, doc="1 keeps weights on the host, 2 drops them, 0 stops.")
    start_s: float | None = option(Duration(), None, key="start_timeout", doc="Launch to a healthy answer.")
    drain_s: float | None = option(
        Duration(), None, key="drain_timeout", doc="Running requests may take that long."
    )
    sleep_s: float | None = option(Duration(), None, key="sleep_timeout", doc="The /sleep call.")
    release_s: float | None = option(
        Duration(), None, key="release_timeout", doc="Memory must be measured gone."
    )
    wake_s: float | None = option(
        Duration(), None, key="wake_timeout", doc="The /wake_up call, and memory measured back."
    )
    canary_s: float | None = option(Duration(), None, key="canary_timeout", doc="One canary prompt.")
    probe_s: float | None = option(
        Duration(), None, key="probe_timeout", doc="One health or memory question."
    )
    stop_s: float | None = option(Duration(), None, key="stop_timeout", doc="SIGTERM to SIGKILL.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Fairness between members; see ``hotrack.pool.policy`` for what each does and its default."""

    min_residency_s: float | None = option(
        Duration(), None, key="min_residency", doc="No switch sooner after a member became ready."
    )
    max_residency_s: float | None = option(
        Duration(), None, key="max_residency", doc="Turn of a busy member while others wait."
    )
    max_batch_requests: int | None = option(Number(1), None, doc="Requests in one turn while others wait.")
    max_wait_s: float | None = option(
        Duration(), None, key="max_wait", doc="A request that waited longer makes the switch due."
    )
    max_queue: int | None = option(
        Number(1), None, doc="Requests waiting per member; more get 429 queue_full."
    )
    max_queue_wait_s: float | None = option(
        Duration(), None, key="max_queue_wait", doc="Longest wait; then 504 deadline_exceeded."
    )
    ageing_s: float | None = option(
        Duration(), None, key="ageing", doc="Waiting this long is worth one step of priority."
    )
    probe_interval_s: float | None = option(
        Duration(), None, key="probe_interval", doc="Between health checks of awake members."
    )
    backoff_s: float | None = option(
        Duration(), None, key="backoff", doc="Pause after a failure; doubles with each."
    )
    max_backoff_s: float | None = option(Duration(), None, key="max_backoff", doc="Longest such pause.")
    max_failures: int | None = option(Number(1), None, doc="Failures in a row before quarantine.")
    boot: bool | None = option(
        Flag(), None, doc="Start every member once at start, so later waits are only wakes."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    memory: MemoryConfig = option(Block(MemoryConfig), MemoryConfig)
    sleep: SleepConfig = option(Block(SleepConfig), SleepConfig)
    policy: PolicyConfig = option(Block(PolicyConfig), PolicyConfig)
    canary: CanaryConfig = option(Block(CanaryConfig), CanaryConfig)
    admin_keys: tuple[str, ...] = option(ListOf(Text()), (), doc="Keys for sleep, wake, unload and logs.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupHooks:
    preload: tuple[str, ...] = option(ListOf(Text()), (), doc="Member to have awake when the pool is up.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    on_startup: StartupHooks = option(Block(StartupHooks), StartupHooks)


_BUDGET_DECIDES = _ACCEPTED + "which members are awake together follows from pool.memory, not from lists"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """A whole file. ``warnings``: what was accepted but behaves differently here."""

    models: dict[str, ModelConfig] = option(MapOf(Block(ModelConfig)), {})
    pool: PoolOptions = option(Block(PoolOptions), PoolOptions)
    macros: dict[str, Any] = option(MapOf(Anything()), {}, doc="Names for ${name}.")
    api_keys: tuple[str, ...] = option(
        ListOf(Text()), (), key="apiKeys", doc="Keys clients must send; none: loopback only."
    )
    hooks: Hooks = option(Block(Hooks), Hooks)
    health_check_timeout_s: float | None = option(
        Number(1, whole=False), None, key="healthCheckTimeout", doc="Seconds a member may take to start."
    )
    global_ttl_s: float = option(SECONDS, 0.0, key="globalTTL", doc="Default of ttl; 0 = never.")
    unload_timeout_s: float | None = option(Duration(), None, key="unloadTimeout", doc="SIGTERM to SIGKILL.")
    start_port: int = option(
        Number(1, 65535), 5800, key="startPort", differs=_ACCEPTED + "${PORT} is a free port chosen at start"
    )
    log_level: str = option(Text(_LOG_LEVELS), "info", key="logLevel", doc="Of the gateway.")
    include_aliases: bool = option(
        Flag(), False, key="includeAliasesInList", doc="Aliases get entries of their own in /v1/models."
    )
    send_loading_state: bool = option(
        Flag(), False, key="sendLoadingState", differs=_ACCEPTED + "waiting streams get SSE comments instead"
    )
    log_time_format: str = option(
        Text(), "", key="logTimeFormat", differs=_ACCEPTED + "the log format is fixed"
    )
    log_to_stdout: str = option(
        Text(),
        "proxy",
        key="logToStdout",
        differs=_ACCEPTED + "the gateway logs on stderr, members at /logs/stream",
    )
    groups: dict[str, Any] = option(MapOf(Anything()), {}, differs=_BUDGET_DECIDES)
    routing: dict[str, Any] = option(MapOf(Anything()), {}, differs=_BUDGET_DECIDES)
    matrix: dict[str, Any] = option(MapOf(Anything()), {}, differs=_BUDGET_DECIDES)
    store: Any = option(Anything(), None, differs=_ACCEPTED + "activity is kept in memory")
    metrics_max: int = option(Number(0), 1000, key="metricsMaxInMemory", differs=_ACCEPTED + "see /metrics")
    capture_buffer: int = option(
        Number(0), 0, key="captureBuffer", differs=_ACCEPTED + "requests are never captured"
    )
    performance: Any = option(Anything(), None, differs=_ACCEPTED + "see /metrics")
    ui: Any = option(Anything(), None, differs=_ACCEPTED + "the dashboard at /ui has no settings")
    upstream: Any = option(Anything(), None, differs=_ACCEPTED + "there is no /upstream passthrough")
    profiles: dict[str, Any] = option(
        MapOf(Anything()), {}, differs=_ACCEPTED + "runtime profiles do not exist here"
    )
    selectors: dict[str, Any] = option(
        MapOf(Anything()), {}, differs=_ACCEPTED + "selector names answer 404; use aliases"
    )
    peers: dict[str, Any] = option(
        MapOf(Anything()), {}, differs=_ACCEPTED + "remote peers answer 404; add a model with 'proxy' instead"
    )
    warnings: tuple[str, ...] = field(default=())
