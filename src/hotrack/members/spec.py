"""What the pool is told about one member. Plain values: no YAML, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from hotrack.core.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds each step of a member's life may take; every one is enforced."""

    start_s: float = 300.0  # launch to a healthy answer
    drain_s: float = 30.0  # running requests may finish before they are cut
    sleep_s: float = 60.0  # the /sleep call
    release_s: float = 10.0  # memory measured gone after it
    wake_s: float = 60.0  # the /wake_up call, and memory measured back
    canary_s: float = 30.0
    probe_s: float = 5.0  # health, is_sleeping, models, reset_prefix_cache
    stop_s: float = 10.0  # SIGTERM to SIGKILL

    def __post_init__(self) -> None:
        for f in fields(self):
            if not getattr(self, f.name) > 0:
                raise ConfigError(f"deadline {f.name} must be greater than 0, got {getattr(self, f.name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySpec:
    """Short greedy prompts whose answers must not change between a cold start and a wake.

    ``logprob_tolerance`` bounds the change of the first token's logprob. No prompts: the canary is off.
    """

    prompts: tuple[str, ...] = ("The capital of France is",)
    max_tokens: int = 4
    logprob_tolerance: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSpec:
    """One model's server.

    ``command``: argument list of a process to start; ``${SOCKET}`` becomes a private Unix socket path, else
    ``${PORT}`` a free loopback port. ``url`` instead of ``command``: an engine somebody else runs; it is put
    to sleep and woken but never started or stopped.
    ``served_model_name``: what the engine itself calls the model (default: ``name``).
    ``sleep_level``: vLLM's level; None means the engine cannot sleep and gives memory back by being stopped.
    ``awake_bytes`` / ``residue_bytes``: most memory held awake / asleep, per device of the group; None means
    "measure it". ``swap_bytes``: what must leave on sleep and return on wake (the weights); None turns that
    check off. ``tolerance_bytes`` widens each of the three. ``ttl_s``: sleep after that long idle, 0 = never.
    ``max_in_flight``: requests admitted at once, the others queue; None = no limit.
    ``device``: the GPU on which its memory is counted, "cuda" or "cuda:N" as its process numbers them; None:
    resident memory of the host. ``partial_sleep``: its ``/sleep`` takes ``nbytes``, so a swap need not move
    more than is lacking. ``streamed_wake``: its ``/wake_up`` takes ``streamed=true``: it answers while
    weights are still on their way, takes requests, and lets no answer out before they are verified.
    ``resets_itself``: its prefix cache is empty after a wake without ``/reset_prefix_cache``.
    """

    name: str
    command: tuple[str, ...] = ()
    url: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    served_model_name: str | None = None
    device_group: str = "default"
    health_path: str = "/health"
    sleep_level: int | None = 1
    awake_bytes: int | None = None
    residue_bytes: int | None = None
    swap_bytes: int | None = None
    tolerance_bytes: int = 64 * MIB
    priority: int = 0
    pinned: bool = False
    ttl_s: float = 0.0
    max_in_flight: int | None = None
    auto_wake: bool = True
    device: str | None = None
    partial_sleep: bool = False
    streamed_wake: bool = False
    resets_itself: bool = False
    canary: CanarySpec = field(default_factory=CanarySpec)
    deadlines: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a member needs a name")
        if bool(self.command) == bool(self.url):
            raise ConfigError(
                f"member {self.name!r} needs either a command or a url, not both and not neither"
            )
        if self.sleep_level not in (None, 1, 2):
            raise ConfigError(
                f"member {self.name!r}: sleep level must be 1, 2 or none, got {self.sleep_level}"
            )
        if self.url is not None and self.sleep_level is None:
            raise ConfigError(
                f"member {self.name!r} is run by somebody else and cannot sleep, so it could never give "
                "memory back; give it a sleep level, or a command instead of a url"
            )

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.name


def check_members(specs: tuple[MemberSpec, ...]) -> dict[str, str]:
    """Map every name and alias to its member's name.

    Raises:
        ConfigError: no members, or a name or alias is used twice.
    """
    if not specs:
        raise ConfigError("a pool needs at least one member")
    owner: dict[str, str] = {}
    for spec in specs:
        for name in (spec.name, *spec.aliases):
            if name in owner:
                raise ConfigError(
                    f"the name {name!r} is used by two members ({owner[name]!r} and {spec.name!r}); "
                    "names and aliases must be unique"
                )
            owner[name] = spec.name
    return owner
