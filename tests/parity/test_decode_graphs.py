"""Decode steps from captured graphs, with a capture that runs the same code again over the same memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fakes.stepped_engine import SteppedEngine, request
from fakes.tiny_checkpoints import write_tiny
from hotrack.engine import build, runner
from hotrack.engine.graphs import (
    LENGTH,
    SAMPLED,
    SIZES,
    SLOTS,
    TOKEN,
    Outputs,
    Replay,
    graph_bytes,
    graph_size,
    pad_decodes,
)
from hotrack.kernels.base import AttentionPlan, Ops
from hotrack.kernels.paged import HeadShape, PagedBatch
from hotrack.models import registry

REQUESTS = [
    request("long", [(7 * i) % 500 for i in range(90)], 24),
    request("short", [5, 6, 7], 20),
    request("sampled", range(3, 40), 20, temperature=0.9, top_p=0.8, seed=11, repetition_penalty=1.2),
    request("biased", [9, 8, 7], 12, logit_bias={4: 3.0}, min_tokens=4),
    request("logprobs", [5, 6, 7, 8], 12, logprobs=3, prompt_logprobs=2),
]


class DeviceLengths(Ops):
    """As a GPU's kernels: lengths come from the tensors alone. What the host says is only a bound."""

    def plan_attention(self, batch: PagedBatch, heads: HeadShape, dtype: torch.dtype) -> AttentionPlan:
        assert batch.seq_lens_device is not None
        lengths = batch.seq_lens_device.tolist()
        assert all(real <= bound for real, bound in zip(lengths, batch.seq_lens, strict=True))
        return super().plan_attention(replace(batch, seq_lens=lengths), heads, dtype)


class Rerun:
    """A replay writes into the tensors that the capture returned."""

    def __init__(self) -> None:
        self.replays = 0
        self.error: Exception | None = None

    def __call__(self, function: Callable[[], Outputs]) -> tuple[Outputs, Replay]:
        if self.error is not None:
            raise self.error
        outputs = function()

        def replay() -> None:
            self.replays += 1
            for static, new in zip(outputs, function(), strict=True):
                static.copy_(new)

        return outputs, replay


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"), "qwen3_moe")


@pytest.fixture
def rerun(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rerun]:
    capture = Rerun()
    monkeypatch.setattr(registry, "select_ops", lambda *_: DeviceLengths())
    monkeypatch.setattr(build, "_capture", lambda *_: capture)
    monkeypatch.setattr(runner, "to_host", torch.clone)  # a copy, as from a GPU: replays overwrite
    return capture


@pytest.fixture(scope="module")
def expected(path: Path) -> dict[str, list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "select_ops", lambda *_: DeviceLengths())
        return run(path)[0]


def run(path: Path, **options: object) -> tuple[dict[str, list[int]], SteppedEngine]:
    engine = SteppedEngine(path, device="cpu", dtype="float32", max_num_batched_tokens=32, **options)
    found = engine.run(REQUESTS)
    engine.built.close()
    return found, engine


def test_tokens_are_those_of_eager_steps(path: Path, rerun: Rerun, expected: dict[str, list[int]]) -> None:
    found, engine = run(path)
    assert found == expected
    assert len({token for tokens in found.values() for token in tokens}) > 10
    assert rerun.replays >= 15
    assert len(engine.core.runner.graphs.sizes) >= 2  # requests end, so batches shrink


@pytest.mark.parametrize("depth", [0, 1])
def test_padding_rows_leave_no_trace(path: Path, rerun: Rerun, depth: int) -> None:
    """Alone, and as one of five padded to eight."""
    engine = SteppedEngine(path, device="cpu", dtype="float32", pipeline_depth=depth)
    alone = engine.run(REQUESTS[:1])["long"]
    others = [request(f"r{i}", [i + 3, 4, 5], 30) for i in range(4)]
    among = engine.run([*REQUESTS[:1], *others])["long"]
    assert among == alone
    assert 8 in engine.core.runner.graphs.sizes
    engine.built.close()


def test_a_failed_capture_costs_no_token(
    path: Path, rerun: Rerun, expected: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    rerun.error = RuntimeError("operation not permitted when stream is capturing\nand more")
    found, engine = run(path)
    assert found == expected
    assert rerun.replays == 0
    failure = engine.core.runner.graphs.failure
    assert failure is not None
    told = [r.message for r in caplog.records if "without CUDA graphs" in r.message]
    assert len(told) == 1
    assert told[0].endswith("RuntimeError: operation not permitted when stream is capturing")


def test_graphs_outlive_a_sleep(path: Path, rerun: Rerun) -> None:
    engine = SteppedEngine(path, device="cpu", dtype="float32")
    before = engine.run(REQUESTS[:2])
    graphs = engine.core.runner.graphs.sizes
    engine.do("sleep", level=1)
    engine.do("wake")
    assert engine.run(REQUESTS[:2]) == before
    assert engine.core.runner.graphs.sizes == graphs
    engine.built.close()


def test_sizes() -> None:
    assert [graph_size(n) for n in (1, 3, 9, 33, 65, 256, 257)] == [1, 4, 16, 48, 96, 256, None]
    assert graph_bytes(8, 1000) < graph_bytes(64, 1000) < graph_bytes(256, 1000) == graph_bytes(999, 1000)


def test_padded_rows_name_nothing_that_exists() -> None:
    table = np.array([[3, 4], [5, 0], [6, 7]], np.int32)
    inputs = pad_decodes(
        np.array([17, 40, 99]), np.array([17, 4, 20]), np.array([18, 41, 100]),
        [(table, np.array([65, 84, 116]))], nowhere=128,
    )  # fmt: skip
    assert inputs is not None
    assert inputs.size == 4
    assert inputs.num_seqs == 3
    assert inputs.small[LENGTH].tolist() == [18, 5, 21, 1]
    assert inputs.small[SAMPLED].tolist() == [18, 41, 100, 128]
    assert inputs.small[TOKEN, 3] == inputs.small[SLOTS, 3] == 0
    assert inputs.tables[0].tolist() == [[3, 4], [5, 0], [6, 7], [0, 0]]
    many = np.arange(SIZES[-1] + 1)
    assert pad_decodes(many, many, many, [], nowhere=0) is None


def test_an_invalid_row_is_minus_one(path: Path, rerun: Rerun) -> None:
    """NaN and infinity end their own request only."""
    engine = SteppedEngine(path, device="cpu", dtype="float32")
    model = engine.core.runner.model
    logits = model.compute_logits

    def damaged(hidden: Tensor) -> Tensor:
        found = logits(hidden)
        if len(found) > 1:
            found[0, 3] = torch.nan
        return found

    model.compute_logits = damaged
    small = torch.zeros(SLOTS + 1, 2, dtype=torch.int64)
    small[LENGTH] = 1
    small[SAMPLED] = len(engine.core.runner._token_table) - 1
    graphs = engine.core.runner.graphs
    with torch.inference_mode():
        assert graphs.prepare(2)
        _, tokens = graphs.replay(small, [torch.zeros(2, 1, dtype=torch.int32)])
    assert tokens[0] == -1
    assert tokens[1] >= 0
    engine.built.close()
