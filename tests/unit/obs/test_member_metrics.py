"""Series names and values."""

from dataclasses import fields

import pytest

from hotrack.core.lifecycle import EngineState
from hotrack.memory.reports import SleepReport, WakeReport
from hotrack.obs.member_metrics import _BYTES, MemberMetrics


def sample(metrics: MemberMetrics, name: str, **labels: str) -> float:
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith(name + "{")]
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if all(w in line for w in wanted)]
    assert len(values) == 1, (name, labels, values)
    return values[0]


def test_engine_stats() -> None:
    metrics = MemberMetrics("m")
    metrics.update_engine({"running": 3, "waiting": 1, "kv_usage": 0.5, "preemptions": 2, "other": 9})
    metrics.update_engine({"running": 1, "preemptions": 5})
    metrics.update_engine({"preemptions": 5})
    assert sample(metrics, "vllm:num_requests_running", model_name="m", engine="0") == 1
    assert sample(metrics, "vllm:kv_cache_usage_perc") == 0.5
    assert sample(metrics, "vllm:num_preemptions_total") == 5


@pytest.mark.parametrize(
    ("state", "level", "name"),
    [
        (EngineState.AWAKE, 1, "awake"),
        (EngineState.ASLEEP, 0, "awake"),
        (EngineState.ASLEEP, 1, "weights_offloaded"),
        (EngineState.WAKING, 2, "discard_all"),
        (EngineState.FALLING_ASLEEP, 1, "awake"),
    ],
)
def test_sleep_state(state: EngineState, level: int, name: str) -> None:
    metrics = MemberMetrics("m")
    metrics.set_sleep_state(state, level)
    values = {
        other: sample(metrics, "vllm:engine_sleep_state", sleep_state=other)
        for other in ("awake", "weights_offloaded", "discard_all")
    }
    assert values == {other: float(other == name) for other in values}


def test_transitions_are_timed_when_they_succeed() -> None:
    metrics = MemberMetrics("m")
    with metrics.transition("sleep"):
        assert sample(metrics, "vllm:sleep_mode_operations_in_flight", operation="sleep") == 1
    with pytest.raises(ValueError, match="no"), metrics.transition("sleep"):
        raise ValueError("no")
    assert sample(metrics, "vllm:sleep_mode_operation_duration_seconds_count", operation="sleep") == 1
    assert sample(metrics, "vllm:sleep_mode_operations_in_flight", operation="sleep") == 0


def test_two_servers_in_one_process_do_not_mix() -> None:
    one, two = MemberMetrics("one"), MemberMetrics("two")
    one.generation_tokens.inc(5)
    assert sample(one, "vllm:generation_tokens_total") == 5
    assert sample(two, "vllm:generation_tokens_total") == 0


def test_reports() -> None:
    metrics = MemberMetrics("m")
    report = {
        "changed": True, "level": 1, "tags": ("weights",), "freed_bytes": 7, "kept_bytes": 3,
        "store_bytes": 5, "cycle": 2, "unmap_ms": 12.5, "device_before_bytes": 100,
        "device_after_bytes": None, "missing_bytes": {"weights": 7}, "is_sleeping": True,
    }  # fmt: skip
    metrics.report("sleep", report)
    assert sample(metrics, "hotrack:sleep_mode_phase_seconds", operation="sleep", phase="unmap") == 0.0125
    assert sample(metrics, "hotrack:sleep_mode_bytes", operation="sleep", kind="freed") == 7
    assert sample(metrics, "hotrack:sleep_mode_bytes", operation="sleep", kind="device_before") == 100
    assert "device_after" not in metrics.render().decode()
    assert sample(metrics, "hotrack:sleep_mode_cycles") == 2
    assert sample(metrics, "hotrack:host_copy_bytes") == 5
    metrics.report("wake", {**report, "changed": False, "cycle": 9, "missing_bytes": {"weights": 1}})
    assert sample(metrics, "hotrack:sleep_mode_cycles") == 2
    assert sample(metrics, "hotrack:missing_bytes", tag="weights") == 1


def test_every_number_of_a_report_is_exported() -> None:
    for kind in (SleepReport, WakeReport):
        for field in fields(kind):
            if field.name.endswith("_bytes") or field.name.startswith("bytes_"):
                assert field.name in _BYTES or field.name == "store_bytes", field.name
