"""From a pool file to what the pool and the proxy are made of."""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from hotrack.config.pool import CanaryConfig, EngineOptions, ModelConfig, PoolConfig
from hotrack.core.errors import ConfigError
from hotrack.gateway.devices import environment_of, gpu_of, stated_budgets
from hotrack.gateway.request import Route
from hotrack.gateway.routes import Routes
from hotrack.members.spec import CanarySpec, Deadlines, MemberSpec
from hotrack.plan.ledger import MIB, DeviceBudget, Footprint, GpuLedger, assumed, format_bytes, stated
from hotrack.pool.policy import PoolPolicy

T = TypeVar("T")
# What our own engine's processes hold on a CPU besides weights and KV cache, and keep asleep: a floor
# (operations.md shows 242 MiB for a sleeping SmolLM2-135M).
PROCESS_BYTES = 200 * MIB
GPU_PROCESS_BYTES = 600 * MIB  # the same on a GPU: its CUDA context


def member_specs(config: PoolConfig) -> tuple[MemberSpec, ...]:
    """One spec per model, in the file's order.

    Raises:
        ConfigError: a model's keys contradict each other.
    """
    return tuple(_member(name, model, config) for name, model in config.models.items())


def pool_policy(config: PoolConfig) -> PoolPolicy:
    return _overlay(PoolPolicy(), config.pool.policy)


def make_routes(config: PoolConfig) -> Routes:
    """Where each id, alias and ``setParamsByID`` variant goes, and what changes in the body on the way."""
    by_name: dict[str, Route] = {}
    for name, model in config.models.items():
        filters = model.filters
        strip = frozenset(key.strip() for key in filters.strip_params.split(",")) - {"", "model"}
        for alias in (name, *model.aliases, *filters.set_params_by_id):
            overrides = {**filters.set_params, **filters.set_params_by_id.get(alias, {})}
            overrides.pop("model", None)
            by_name[alias] = Route(name, model.use_model_name or name, strip, overrides)
    return Routes(by_name, [name for name, model in config.models.items() if not model.unlisted])


def check_budget(config: PoolConfig, weight_bytes: Mapping[str, int]) -> tuple[str, ...]:
    """Warnings of the plan in which each member is awake alone. ``weight_bytes``: per member, as far as its
    files tell; memory stated in the file wins. What a process of our own engine holds besides is unknown
    before it is measured: with a usual size for it, a plan without room is a warning, not an error.

    Raises:
        ConfigError: a member cannot be awake even alone; the message has the arithmetic.
    """
    warnings: list[str] = []
    specs = {spec.name: spec for spec in member_specs(config)}
    for known, usual in ledgers(config, weight_bytes, stated_budgets(config)):
        warnings += known.check_each_alone()
        for name in known.footprints:
            spec, verdict = specs[name], usual.fits((name,))
            if verdict.spare_bytes < spec.tolerance_bytes:
                usually = format_bytes(_process_bytes(spec.device))
                warnings.append(
                    f"{spec.name} may never fit: a process of the engine usually holds about "
                    f"{usually} besides its weights and KV cache, awake or asleep, and "
                    f"with {format_bytes(spec.tolerance_bytes)} of tolerance that is too much: "
                    f"{verdict.arithmetic}"
                )
    return tuple(warnings)


def ledgers(
    config: PoolConfig, weight_bytes: Mapping[str, int], budgets: Mapping[str, DeviceBudget]
) -> list[tuple[GpuLedger, GpuLedger]]:
    """Per device group that has a budget: what file and model files tell, and the same with the usual size of
    our engine's processes in it."""
    found = []
    for group, budget in budgets.items():
        specs = [spec for spec in member_specs(config) if spec.device_group == group]
        known = [_footprint(spec, config, weight_bytes.get(spec.name, 0)) for spec in specs]
        usual = [_with_process(footprint, config) for footprint in known]
        found.append((GpuLedger.of(budget, known), GpuLedger.of(budget, usual)))
    return found


def _footprint(spec: MemberSpec, config: PoolConfig, weight_bytes: int) -> Footprint:
    kv_bytes = config.models[spec.name].engine.kv_cache_memory_bytes or 0
    pool = assumed(weight_bytes + kv_bytes) if spec.awake_bytes is None else stated(spec.awake_bytes)
    return Footprint(spec.name, pool=pool, residue=stated(spec.residue_bytes))


def _with_process(footprint: Footprint, config: PoolConfig) -> Footprint:
    """With the usual size of our own engine's process wherever the file does not state the whole."""
    model = config.models[footprint.name]
    if model.model is None:
        return footprint
    process = assumed(_process_bytes(gpu_of(model)))
    level = config.pool.sleep.level if model.sleep_level is None else model.sleep_level
    return replace(
        footprint,
        nonpool=process if model.memory.awake_bytes is None else footprint.nonpool,
        residue=process if model.memory.residue_bytes is None and level != 0 else footprint.residue,
    )


def _process_bytes(device: str | None) -> int:
    return PROCESS_BYTES if device is None else GPU_PROCESS_BYTES


def _member(name: str, model: ModelConfig, config: PoolConfig) -> MemberSpec:
    pool = config.pool
    level = pool.sleep.level if model.sleep_level is None else model.sleep_level
    if level is None:
        level = 0 if model.cmd is not None else 1  # any server can be stopped; only some can sleep
    gpu = gpu_of(model)
    ttl = config.global_ttl_s if model.ttl_s is None or model.ttl_s < 0 else model.ttl_s
    return MemberSpec(
        name=name,
        command=_command(name, model),
        url=model.proxy if model.cmd is None and model.model is None else None,
        env=_environment(model),
        aliases=(*model.aliases, *(key for key in model.filters.set_params_by_id if key != name)),
        served_model_name=model.use_model_name,
        device_group=model.device_group,
        health_path=model.check_endpoint,
        sleep_level=level or None,
        awake_bytes=model.memory.awake_bytes,
        residue_bytes=model.memory.residue_bytes,
        priority=model.priority,
        pinned=model.pinned,
        ttl_s=ttl,
        max_in_flight=model.concurrency_limit or None,
        auto_wake=model.auto_wake,
        device=gpu,
        partial_sleep=gpu is not None and model.model is not None,
        streamed_wake=gpu is not None and model.model is not None,
        resets_itself=model.model is not None,
        canary=_canary(model.canary or pool.canary),
        deadlines=_deadlines(model, config),
    )


def _environment(model: ModelConfig) -> dict[str, str]:
    """Extra variables of the member's process. Our own engine listens on a private socket and must not ask
    for the key that the gateway's clients use."""
    own = {} if model.model is None else {"HOTRACK_API_KEY": ""}
    return {**own, **environment_of(model)}


def _deadlines(model: ModelConfig, config: PoolConfig) -> Deadlines:
    deadlines = _overlay(Deadlines(), config.pool.sleep)
    if config.pool.sleep.start_s is None and config.health_check_timeout_s is not None:
        deadlines = replace(deadlines, start_s=config.health_check_timeout_s)
    unload = model.unload_timeout_s or config.unload_timeout_s
    if config.pool.sleep.stop_s is None and unload:
        deadlines = replace(deadlines, stop_s=unload)
    return deadlines


def _canary(config: CanaryConfig) -> CanarySpec:
    return _overlay(CanarySpec(), config) if config.enabled else CanarySpec(prompts=())


def _command(name: str, model: ModelConfig) -> tuple[str, ...]:
    if model.model is not None:
        return (
            *(sys.executable, "-m", "hotrack.server", model.model),
            *("--uds", "${SOCKET}", "--served-model-name", name),
            *engine_flags(model.engine),
        )
    if model.cmd is None:
        return ()
    try:
        command = tuple(shlex.split(model.cmd))
    except ValueError as error:
        raise ConfigError(f"model {name!r}: cmd cannot be split into arguments: {error}") from error
    if not command:
        raise ConfigError(f"model {name!r}: cmd is empty")
    if not any("${PORT}" in part or "${SOCKET}" in part for part in command):
        raise ConfigError(
            f"model {name!r}: cmd must contain ${{PORT}} (or ${{SOCKET}}): hotrack chooses where a server "
            "that it starts listens; for a server that runs already give only 'proxy'"
        )
    return command


def engine_flags(options: EngineOptions) -> list[str]:
    """Command-line flags of ``hotrack engine`` for what is set."""
    flags: list[str] = []
    for field in fields(options):
        value = getattr(options, field.name)
        if value is None or field.name == "args":
            continue
        flag = "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            flags += [flag, str(value)]
    return [*flags, *options.args]


def _overlay(defaults: T, options: Any) -> T:
    """``defaults`` with every field that ``options`` states (is not None there)."""
    known = {field.name for field in fields(defaults)}  # type: ignore[arg-type]
    stated = {f.name: getattr(options, f.name) for f in fields(options) if f.name in known}
    stated = {name: value for name, value in stated.items() if value is not None}
    return replace(defaults, **stated)  # type: ignore[type-var]
