"""On which GPUs the members of a pool file are, and what those GPUs have for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version

from hotrack.config.pool import ModelConfig, PoolConfig
from hotrack.core.errors import ConfigError
from hotrack.members.gpu import Gpu, Gpus
from hotrack.plan.ledger import MIB, DeviceBudget, measured, operator

MARGIN_SHARE = 100  # one part of so many stays free
MIN_MARGIN = 256 * MIB


@dataclass(frozen=True, slots=True)
class Budgets:
    """``of``: what the members of each device group may use together. ``gpus``: of the groups whose budget is
    what others leave of a GPU."""

    of: dict[str, DeviceBudget] = field(default_factory=dict)
    gpus: dict[str, Gpu] = field(default_factory=dict)


def gpu_of(model: ModelConfig) -> str | None:
    """The device of a member on a GPU, "cuda" or "cuda:N"; None: on the host, or not settled yet."""
    device = model.engine.device if model.model is not None else model.memory.device
    return device if device is not None and device.startswith("cuda") else None


def environment_of(model: ModelConfig) -> dict[str, str]:
    """What its process finds beyond our own environment."""
    return dict(entry.split("=", 1) for entry in model.env)


def settle_devices(config: PoolConfig, gpus: Gpus) -> PoolConfig:
    """``config`` with a device for each of our own engines that leaves the choice to us ('auto'): a GPU where
    there is one and the installed torch can use it. So the pool measures where the engine really is."""
    models = dict(config.models)
    for name, model in models.items():
        if model.model is None or model.engine.device not in (None, "auto") or not torch_knows_cuda():
            continue
        if gpus.available(environment_of(model)):
            models[name] = replace(model, engine=replace(model.engine, device="cuda"))
    return replace(config, models=models)


def torch_knows_cuda() -> bool:
    """By the name of the installed build; nothing is imported."""
    try:
        return "+cpu" not in version("torch")
    except PackageNotFoundError:
        return False


def stated_budgets(config: PoolConfig) -> dict[str, DeviceBudget]:
    """What each device group may use, when the file says so."""
    budget_bytes = config.pool.memory.budget_bytes
    return {} if budget_bytes is None else budgets_of(config, budget_bytes)


def budgets_of(config: PoolConfig, budget_bytes: int) -> dict[str, DeviceBudget]:
    """``budget_bytes`` for each device group, with the file's margin."""
    groups = dict.fromkeys(model.device_group for model in config.models.values())
    margin = operator(config.pool.memory.margin_bytes or 0)
    return {group: DeviceBudget(budget_bytes, margin=margin, device=group) for group in groups}


def find_budgets(config: PoolConfig, gpus: Gpus) -> Budgets:
    """The stated budgets, or for groups on a GPU all that other processes leave of it, but for a margin.
    Before any member runs: whatever is in use then is foreign.

    Raises:
        ConfigError: members of one group are on different devices, or two groups share a GPU without a stated
            budget, or there is no such GPU.
    """
    found = {group: _gpu_of_group(group, models, gpus) for group, models in _groups(config).items()}
    budgets = Budgets(stated_budgets(config))
    if budgets.of:
        return budgets
    owner: dict[str, str] = {}
    for group, gpu in found.items():
        if gpu is None:
            continue
        if gpu.uuid in owner:
            raise ConfigError(
                f"device groups {owner[gpu.uuid]!r} and {group!r} are both on {gpu.name}: put their models "
                "into one group, or give each group its share with pool.memory.budget"
            )
        owner[gpu.uuid] = group
        memory = gpu.memory()
        margin = config.pool.memory.margin_bytes
        kept = max(MIN_MARGIN, memory.total // MARGIN_SHARE) if margin is None else margin
        budgets.of[group] = DeviceBudget(memory.total, measured(memory.used), operator(kept), gpu.name)
        budgets.gpus[group] = gpu
    return budgets


def _groups(config: PoolConfig) -> dict[str, dict[str, ModelConfig]]:
    groups: dict[str, dict[str, ModelConfig]] = {}
    for name, model in config.models.items():
        groups.setdefault(model.device_group, {})[name] = model
    return groups


def _gpu_of_group(group: str, models: Mapping[str, ModelConfig], gpus: Gpus) -> Gpu | None:
    """None: on the host, or nobody can tell of its GPU."""
    places = {name: gpu_of(model) for name, model in models.items()}
    found = {
        name: gpus.find(device, environment_of(models[name])) if device is not None else None
        for name, device in places.items()
    }
    distinct = {
        (place is not None, gpu.uuid if (gpu := found[name]) else place) for name, place in places.items()
    }
    if len(distinct) > 1:
        shown = ", ".join(f"{name} on {place or 'the host'}" for name, place in places.items())
        raise ConfigError(
            f"device group {group!r} is on more than one device ({shown}); members of one group take turns "
            "on one device, so give the others a device_group of their own (where a server of another kind "
            "holds its memory is said by memory.device)"
        )
    return next(iter(found.values()))
