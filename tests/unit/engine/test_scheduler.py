"""The scheduler against a device that keeps KV cells: invariants for all inputs, then one example per
rule.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.fake_device import VOCAB, Simulation, generate, make_request
from hotrack.core.errors import ContextLengthError, RequestError
from hotrack.core.lifecycle import FinishReason, Phase
from hotrack.core.request import EngineRequest, unpack_tokens
from hotrack.engine.scheduler import Scheduler, SchedulerLimits
from hotrack.kvcache.manager import KVCacheManager
from hotrack.kvcache.spec import Paged, group_layers

GROUPS = group_layers([Paged(1, 2, 2, 2)], block_size=4)


def build(
    *,
    blocks: int = 32,
    seqs: int = 4,
    budget: int = 16,
    max_len: int = 64,
    depth: int = 1,
    caching: bool = True,
) -> Simulation:
    slots = (1 + depth) * seqs
    kv = KVCacheManager(GROUPS, blocks, num_slots=slots, max_model_len=max_len, enable_prefix_caching=caching)
    return Simulation(Scheduler(kv, SchedulerLimits(seqs, budget, max_len, slots)), depth)


@dataclass
class Collected:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, FinishReason] = field(default_factory=dict)

    def take(self, outputs: list) -> None:
        for output in outputs:
            assert output.request_id not in self.ends, f"{output} after the end"
            self.tokens.setdefault(output.request_id, []).extend(unpack_tokens(output.tokens))
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason


def run(sim: Simulation, requests: list[EngineRequest], limit: int = 2000) -> Collected:
    collected = Collected()
    for request in requests:
        sim.scheduler.add(request)
    while sim.scheduler.has_unfinished or sim.in_flight:
        collected.take(sim.step())
        limit -= 1
        assert limit, "no progress"
    return collected


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[int, EngineRequest, int | None]]:
    """(step of arrival, request, step of abort)"""
    entries = []
    for index in range(draw(st.integers(1, 7))):
        prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=14))
        request = make_request(
            f"r{index}",
            prompt,
            draw(st.integers(1, 12)),
            priority=draw(st.integers(0, 2)),
            eos_token_ids=(draw(st.integers(0, VOCAB - 1)),),
            seed=draw(st.integers(0, 3)),
        )
        entries.append((draw(st.integers(0, 12)), request, draw(st.none() | st.integers(0, 25))))
    return entries


@settings(max_examples=250, deadline=None)
@given(
    workloads(),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(8, 20),
    st.integers(0, 2),
    st.booleans(),
)
def test_every_request_ends_once_with_its_own_tokens(
    workload: list, seqs: int, budget: int, blocks: int, depth: int, caching: bool
) -> None:
    sim = build(blocks=blocks, seqs=seqs, budget=budget, max_len=28, depth=depth, caching=caching)
    scheduler, collected = sim.scheduler, Collected()
    arrival = {request.request_id: at for at, request, _ in workload}
    step = 0
    while step < 40 or scheduler.has_unfinished or sim.in_flight:
        for at, request, abort_at in workload:
            if at == step:
                scheduler.add(request)
            if abort_at == step and (output := scheduler.abort(request.request_id)):
                collected.take([output])
        collected.take(sim.step())
        step += 1
        assert step < 2000, "no progress"

    for _, request, abort_at in workload:
        if request.request_id not in collected.ends:
            assert abort_at is not None
            assert abort_at < arrival[request.request_id]
            continue
        expected, got = generate(request, scheduler.max_len), collected.tokens[request.request_id]
        if collected.ends[request.request_id] is FinishReason.ABORT:
            assert got == expected[: len(got)]
        else:
            assert got == expected
    kv = scheduler.kv
    assert kv.num_free_blocks == kv.capacity_blocks
    assert all(sum(plan.counts) <= budget for plan in sim.plans)
    assert all(len(plan.sequences) <= seqs for plan in sim.plans)
    for plan in sim.plans:
        ones = plan.counts[: plan.num_decodes]
        assert ones == [1] * plan.num_decodes
        assert all(count > 1 for count in plan.counts[plan.num_decodes :])
    admitted = [seq.key for plan in sim.plans for seq in plan.admitted]
    for priority in range(3):
        first = list(dict.fromkeys(key for key in admitted if key[0] == priority))
        assert first == sorted(first), "FIFO within a priority"


def test_preemption_and_resume_keep_the_tokens() -> None:
    requests = [make_request(f"r{i}", [i, 2, 3], 20) for i in range(4)]
    sim = build(blocks=9, max_len=28)
    collected = run(sim, requests)
    assert sim.scheduler.counters.preemptions > 0
    for request in requests:
        assert collected.tokens[request.request_id] == generate(request, 28)


def test_lowest_priority_is_preempted_first() -> None:
    sim = build(blocks=9, max_len=28)
    requests = [make_request("low", [1], 20, priority=5), make_request("high", [2], 20, priority=1)]
    for request in requests:
        sim.scheduler.add(request)
    seen: set[str] = set()
    while sim.scheduler.has_unfinished or sim.in_flight:
        sim.step()
        seen |= {s.request_id for s in sim.scheduler._live.values() if s.phase is Phase.PREEMPTED}
    assert seen == {"low"}


def test_decode_is_not_starved_by_a_long_prefill() -> None:
    sim = build(budget=8, blocks=64, max_len=128)
    sim.scheduler.add(make_request("decode", [1], 30))
    for _ in range(3):
        sim.step()
    sim.scheduler.add(make_request("prefill", [1] * 60, 2, priority=-1))
    start = len(sim.plans)
    for _ in range(6):
        sim.step()
    for plan in sim.plans[start:]:
        assert "decode" in [seq.request_id for seq in plan.sequences]
        assert sum(plan.counts) == 8


def test_requests_that_never_fit_are_refused_at_once() -> None:
    scheduler = build(blocks=5, max_len=64).scheduler
    assert scheduler.max_len == 16
    with pytest.raises(ContextLengthError, match="16"):
        scheduler.add(make_request("long", [1] * 16, 1))
    with pytest.raises(RequestError, match="no tokens"):
        scheduler.add(make_request("empty", [], 1))
    scheduler.add(make_request("twice", [1], 1))
    with pytest.raises(RequestError, match="already"):
        scheduler.add(make_request("twice", [1], 1))
    assert scheduler.num_waiting == 1


def test_context_full_ends_with_length() -> None:
    collected = run(build(max_len=8), [make_request("r", [1, 2, 3], 100)])
    assert len(collected.tokens["r"]) == 5
    assert collected.ends["r"] is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [0, 1])
def test_eos_is_honoured_and_the_speculative_token_discarded(depth: int) -> None:
    free = generate(make_request("r", [3, 1], 10), 64)
    eos = free[2]
    cut = free.index(eos) + 1
    requests = [
        make_request("eos", [3, 1], 10, eos_token_ids=(eos,)),
        make_request("ignored", [3, 1], 10, eos_token_ids=(eos,), ignore_eos=True),
        make_request("late", [3, 1], 10, eos_token_ids=(eos,), min_tokens=cut + 1),
    ]
    sim = build(depth=depth)
    collected = run(sim, requests)
    assert collected.tokens["eos"] == free[:cut]
    assert collected.ends["eos"] is FinishReason.STOP
    assert collected.tokens["ignored"] == free
    assert collected.tokens["late"] == generate(requests[2], 64)
    assert sim.scheduler.kv.usage == 0


def test_stop_token_is_named() -> None:
    free = generate(make_request("r", [5], 6), 64)
    sim = build()
    sim.scheduler.add(make_request("r", [5], 6, stop_token_ids=(free[1],)))
    outputs = []
    while sim.scheduler.has_unfinished:
        outputs += sim.step()
    assert outputs[-1].stop_token_id == free[1]
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_prefix_hit_is_counted_and_skips_work() -> None:
    sim = build(budget=64)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    run(sim, [make_request("a", prompt, 1)])
    before = len(sim.plans)
    run(sim, [make_request("b", prompt, 1)])
    assert sim.plans[before].counts == [1]
    assert sim.scheduler.counters.cached_prompt_tokens == 8


def test_prompts_sharing_a_prefix_share_it_within_one_step() -> None:
    sim = build(budget=64)
    for name in "ab":
        sim.scheduler.add(make_request(name, [1, 2, 3, 4, 5, 6], 1))
    sim.step()
    assert sorted(sim.plans[0].counts) == [2, 6]


def test_blocks_of_an_aborted_sequence_stay_until_its_step_is_done() -> None:
    sim = build(depth=1)
    sim.scheduler.add(make_request("r", [1, 2, 3, 4, 5], 8))
    sim.step()
    sim.step()
    assert len(sim.in_flight) == 2
    output = sim.scheduler.abort("r")
    assert output is not None
    assert output.finish_reason is FinishReason.ABORT
    assert sim.scheduler.kv.usage > 0
    assert sim.drain() == []
    assert sim.scheduler.kv.usage == 0
    assert sim.scheduler.abort("r") is None


def test_non_finite_logits_end_the_request_with_an_error() -> None:
    sim = build()
    sim.scheduler.add(make_request("r", [1], 4))
    plan = sim.scheduler.plan()
    assert plan is not None
    result = sim.device.run(plan)
    result.tokens[0] = -1
    (output,) = sim.scheduler.update(plan, result)
    assert output.finish_reason is FinishReason.ERROR
    assert "finite" in output.error


def test_equal_histories_give_equal_plans() -> None:
    digests = []
    for _ in range(2):
        sim = build(blocks=9, max_len=28)
        hashes = []
        for i in range(4):
            sim.scheduler.add(make_request(f"r{i}", [i, 2, 3], 20))
        while sim.scheduler.has_unfinished:
            sim.step()
            hashes.append(sim.plans[-1].digest(sim.scheduler.kv.tables[0]))
        digests.append(hashes)
    assert digests[0] == digests[1]
    assert len(set(digests[0])) > len(digests[0]) // 2
