"""Does a model fit on given devices? Weights and the cache of one request, against what is free."""

from collections.abc import Sequence
from dataclasses import dataclass

from hotrack.core.tensorspec import DTYPE_BYTES
from hotrack.modelspec.profile import Profile

GPU_SHARE = 0.9  # the engine's default for what it takes of a GPU's free bytes
MAX_GPUS = 16


@dataclass(frozen=True, slots=True)
class Share:
    """What one of ``num_gpus`` holds. Bytes of weights are as published; None for a degree that the model
    does not allow.

    tensor_bytes  all weights split by tensor parallelism, experts included
    expert_bytes  experts dealt out, everything else on each GPU, which then serves its own requests
    cuts          what tensor parallelism would cut inside quantised blocks, and their size; '' if nothing
    """

    num_gpus: int
    tensor_bytes: int | None
    expert_bytes: int | None
    token_bytes: float | None
    context_bytes: int | None
    cuts: str = ""


@dataclass(frozen=True, slots=True)
class Fit:
    """One way of running on this machine.

    tensor_parallel_size   devices
    weight_bytes           on each, as this version keeps weights
    room_bytes             what may be used of each
    context_tokens         the longest single request whose cache fits beside the weights; 0: none
    wanted_tokens          the longest that was asked for
    """

    tensor_parallel_size: int
    weight_bytes: int
    room_bytes: int
    context_tokens: int
    wanted_tokens: int

    @property
    def verdict(self) -> str:
        """'fits', 'fits with a shorter context' or 'does not fit'."""
        if self.context_tokens >= self.wanted_tokens:
            return "fits"
        return "fits with a shorter context" if self.context_tokens else "does not fit"


def shares(profile: Profile, num_tokens: int) -> list[Share]:
    """For 1, 2, 4, ... GPUs, as far as the model allows any of it."""
    found = []
    size = 1
    while size <= MAX_GPUS:
        tensor = profile.allows_tensor_parallel(size)
        experts = size > 1 and profile.num_experts > 0 and profile.num_experts % size == 0
        if tensor or experts:
            cut = profile.breaks_blocks(size) if tensor else None
            found.append(
                Share(
                    num_gpus=size,
                    tensor_bytes=profile.per_gpu(size) if tensor else None,
                    expert_bytes=profile.per_gpu(1, size) if experts else None,
                    token_bytes=profile.bytes_per_token(size) if tensor else None,
                    context_bytes=profile.cache_bytes(num_tokens, size) if tensor else None,
                    cuts=f"{cut.share(size)} {cut.what} in blocks of {cut.block}" if cut else "",
                )
            )
        size *= 2
    return found


def fit_gpus(profile: Profile, free: Sequence[int], num_tokens: int) -> Fit:
    """The fewest GPUs on which a request of ``num_tokens`` fits, else the way that holds the longest one.
    ``free``: bytes of each GPU; at least one."""
    rooms = sorted((int(num_bytes * GPU_SHARE) for num_bytes in free), reverse=True)
    sizes = [size for size in range(1, len(rooms) + 1) if profile.allows_tensor_parallel(size)]
    ways = [_fit(profile, size, rooms[size - 1], num_tokens) for size in sizes]
    return max(ways, key=lambda way: (way.context_tokens, -way.tensor_parallel_size))


def fit_host(profile: Profile, free: int, num_tokens: int) -> Fit:
    """On the CPU, in ``free`` bytes of memory."""
    return _fit(profile, 1, free, num_tokens)


def loaded_bytes(profile: Profile, tensor_parallel_size: int = 1) -> int:
    """Bytes of weights on each device as this version keeps them: dequantised, if it runs the model."""
    dequantised = profile.served and profile.quantisation
    element = DTYPE_BYTES[profile.loaded_dtype] if dequantised else None
    return profile.per_gpu(tensor_parallel_size, bytes_per_parameter=element)


def _fit(profile: Profile, size: int, room: int, num_tokens: int) -> Fit:
    weights = loaded_bytes(profile, size)
    tokens = min(profile.tokens_in(room - weights, size), num_tokens) if room > weights else 0
    return Fit(size, weights, room, tokens, num_tokens)
