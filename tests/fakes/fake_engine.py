"""A whole engine on a tiny deterministic model: real scheduler, KV cache, runner and sampler; fake weights
and memory.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from fakes.fake_device import VOCAB, next_token
from hotrack.core.errors import SleepError, WakeError
from hotrack.core.request import EngineOutput, EngineRequest, unpack_tokens
from hotrack.engine.core import EngineCore
from hotrack.engine.device import device_worker
from hotrack.engine.messages import Control, ControlReply, StepFrame, WakeLanded
from hotrack.engine.runner import ModelRunner
from hotrack.engine.scheduler import Scheduler, SchedulerLimits
from hotrack.engine.transitions import Transitions
from hotrack.kvcache.manager import KVCacheManager
from hotrack.kvcache.spec import Paged, group_layers
from hotrack.kvcache.tensors import KVTensors
from hotrack.layers.batch import ForwardBatch
from hotrack.memory.kept import KeptRange
from hotrack.memory.reports import SleepReport, WakeReport

BLOCK_SIZE = 4
GROUPS = group_layers([Paged(1, 1, 1, 4)], BLOCK_SIZE)


class FakeModel:
    """Keeps token ids in the KV cache and predicts ``next_token`` of everything it finds there."""

    def __init__(self) -> None:
        self.asleep = False
        self.fail_after: int | None = None

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        assert not self.asleep
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                raise RuntimeError("injected failure")
        cells = kv.k(0)[:, 0, :, 0]  # [num_blocks, block_size]
        group = batch.groups[0]
        block, offset = group.slot_mapping // BLOCK_SIZE, group.slot_mapping % BLOCK_SIZE
        cells[block, offset] = batch.input_ids.float()
        hidden = []
        for row, (count, length) in enumerate(zip(batch.query_lens_list, batch.seq_lens_list, strict=True)):
            history = [int(t) for t in cells[group.block_tables[row].long()].flatten()[:length].tolist()]
            hidden += [next_token(history[: length - count + i + 1]) for i in range(count)]
        return torch.tensor(hidden, dtype=torch.float32)[:, None]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        ids = hidden.long()  # [R, 1]
        distance = (torch.arange(VOCAB) - ids) % VOCAB
        return -0.5 * distance.float()


class FakeMemory:
    """The memory manager's contract without memory: KV that is not kept is lost in sleep."""

    def __init__(self, storage: Tensor, model: FakeModel) -> None:
        self.storage = storage
        self.model = model
        self.tags: set[str] = set()
        self.fail_next: str | None = None
        self.levels: list[int] = []
        self.asked: list[int | None] = []
        self.kept: list[tuple[int, Tensor]] = []
        self.is_landing = False

    @property
    def sleeping_tags(self) -> tuple[str, ...]:
        return tuple(sorted(self.tags))

    @property
    def missing_bytes(self) -> dict[str, int]:
        return dict.fromkeys(self.tags, 1)

    def sleep(self, level: int, *, nbytes: int | None = None, keep: Sequence[KeptRange] = ()) -> SleepReport:
        if self.fail_next == "sleep":
            self.fail_next = None
            raise SleepError("injected")
        changed = not self.tags
        if "kv_cache" not in self.tags:
            flat = self.storage.flatten()
            self.kept = [(k.offset, flat[k.offset : k.offset + k.nbytes].clone()) for k in keep]
        self.asked.append(nbytes)
        self.tags = {"weights", "kv_cache"}
        self.levels.append(level)
        self.model.asleep = True
        self.storage.zero_()
        return SleepReport(
            level=level,
            changed=changed,
            tags=self.sleeping_tags,
            freed_bytes=self.storage.numel(),
            store_bytes=0,
            rss_before_bytes=0,
            rss_after_bytes=0,
            cycle=len(self.levels),
        )

    def wake(self, tags: Collection[str] | None = None) -> WakeReport:
        if self.fail_next == "wake":
            self.fail_next = None
            raise WakeError("injected")
        woken = self.tags if tags is None else self.tags & set(tags)
        self.tags = self.tags - woken
        if "kv_cache" in woken:
            for offset, data in self.kept:
                self.storage.flatten()[offset : offset + len(data)] = data
        self.model.asleep = "weights" in self.tags
        return WakeReport(
            changed=bool(woken),
            tags=tuple(sorted(woken)),
            restored_bytes=0,
            mapped_bytes=0,
            store_bytes=0,
            rss_before_bytes=0,
            rss_after_bytes=0,
            cycle=len(self.levels),
        )


class FakeEngine:
    """An EngineCore plus the loop that drives it."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        seqs: int = 4,
        budget: int = 16,
        max_len: int = 64,
        depth: int = 1,
        caching: bool = True,
        hash_every: int = 0,
    ) -> None:
        slots = 2 * seqs
        manager = KVCacheManager(
            GROUPS, blocks, num_slots=slots, max_model_len=max_len, enable_prefix_caching=caching
        )
        storage = torch.zeros(blocks, GROUPS[0].row_bytes, dtype=torch.uint8)
        self.model = FakeModel()
        self.memory = FakeMemory(storage, self.model)
        self.runner = ModelRunner(
            self.model,
            KVTensors(GROUPS, [storage], torch.float32),
            manager,
            vocab_size=VOCAB,
            num_slots=slots,
            max_model_len=max_len,
            device=torch.device("cpu"),
            worker=device_worker(1),
        )
        scheduler = Scheduler(manager, SchedulerLimits(seqs, budget, max_len, slots))
        self.core = EngineCore(
            scheduler,
            self.runner,
            Transitions(self.memory),
            vocab_size=VOCAB,
            pipeline_depth=depth,
            hash_every=hash_every,
        )
        self.outputs: dict[str, list[EngineOutput]] = {}
        self.replies: dict[str, ControlReply] = {}
        self.landed: list[WakeLanded] = []
        self.step_index = 0

    def step(
        self,
        adds: Sequence[EngineRequest] = (),
        aborts: Sequence[str] = (),
        controls: Sequence[Control] = (),
    ) -> None:
        frame = StepFrame(self.step_index, tuple(adds), tuple(aborts), tuple(controls))
        self.step_index += 1
        for emission in self.core.step(frame):
            if isinstance(emission, ControlReply):
                self.replies[emission.control_id] = emission
            elif isinstance(emission, WakeLanded):
                self.landed.append(emission)
            else:
                self.outputs.setdefault(emission.request_id, []).append(emission)

    def control(self, op: str, **args: object) -> ControlReply:
        control_id = f"c{self.step_index}"
        self.step(controls=[Control(control_id, op, args)])
        while control_id not in self.replies:
            self.step()
        return self.replies[control_id]

    def run(self, requests: Sequence[EngineRequest] = (), limit: int = 3000) -> dict[str, list[int]]:
        self.step(adds=requests)
        while self.core.has_work:
            self.step()
            limit -= 1
            assert limit, "no progress"
        return {request_id: self.tokens(request_id) for request_id in self.outputs}

    def tokens(self, request_id: str) -> list[int]:
        return [t for output in self.outputs.get(request_id, []) for t in unpack_tokens(output.tokens)]

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.core.close()
