"""From a pool file to devices and budgets, on machines that a test makes up."""

import pytest

from fakes.nvml import GIB, FakeGpu, FakeNvml
from hotrack.config.pool_file import load_pool_text
from hotrack.core.errors import ConfigError
from hotrack.gateway import devices
from hotrack.gateway.build import member_specs
from hotrack.gateway.devices import find_budgets, settle_devices
from hotrack.members.gpu import Gpus
from hotrack.members.spec import MIB, MemberSpec
from hotrack.plan.ledger import Provenance


@pytest.fixture(autouse=True)
def _cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "torch_knows_cuda", lambda: True)


def two_gpus() -> Gpus:
    return Gpus(lambda: FakeNvml(FakeGpu("GPU-a", hidden=2 * GIB), FakeGpu("GPU-b", total=24 * GIB)))


def specs(text: str, gpus: Gpus) -> dict[str, MemberSpec]:
    return {spec.name: spec for spec in member_specs(settle_devices(load_pool_text(text), gpus))}


def test_auto_is_settled_once_so_the_pool_knows_where_to_measure() -> None:
    text = """
models:
  a: {model: smollm2}
  b: {model: smollm2, engine: {device: 'cuda:1'}}
  c: {model: smollm2, engine: {device: cpu}}
  d: {model: smollm2, env: ['CUDA_VISIBLE_DEVICES=']}
  e: {cmd: 'vllm ${PORT}'}
"""
    found = specs(text, two_gpus())
    assert [found[name].device for name in "abcde"] == ["cuda", "cuda:1", None, None, None]
    assert found["a"].command[-2:] == ("--device", "cuda")
    assert "--device" not in found["d"].command
    assert found["a"].partial_sleep
    assert found["a"].streamed_wake
    assert not found["c"].partial_sleep
    assert [found[name].resets_itself for name in "ace"] == [True, True, False]
    nowhere = specs(text, Gpus(lambda: None))
    assert [nowhere[name].device for name in "ab"] == [None, "cuda:1"]


def test_a_torch_without_cuda_leaves_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_knows_cuda", lambda: False)
    assert specs("models: {a: {model: smollm2}}", two_gpus())["a"].device is None


def test_a_foreign_server_says_where_its_memory_is_and_keeps_to_plain_calls() -> None:
    spec = specs(
        "models: {v: {cmd: 'vllm ${PORT}', memory: {device: 'cuda:1'}, sleep_level: 1}}", two_gpus()
    )["v"]
    assert (spec.device, spec.partial_sleep, spec.streamed_wake, spec.resets_itself) == (
        "cuda:1",
        False,
        False,
        False,
    )


def test_the_budget_of_a_gpu_is_what_others_leave_of_it() -> None:
    config = load_pool_text("models: {a: {model: smollm2, engine: {device: cuda}}}")
    found = find_budgets(config, two_gpus())
    budget = found.of["default"]
    assert budget.total_bytes == 80 * GIB
    assert budget.foreign.num_bytes == 2.5 * GIB  # the driver's own included
    assert budget.foreign.provenance is Provenance.MEASURED
    assert budget.margin.num_bytes == 80 * GIB // 100
    assert budget.device == "cuda:0 (NVIDIA H200)"
    assert found.gpus["default"].uuid == "GPU-a"


def test_a_small_gpu_and_a_stated_margin() -> None:
    config = load_pool_text("models: {a: {model: smollm2, engine: {device: 'cuda:1'}}}")
    assert find_budgets(config, two_gpus()).of["default"].margin.num_bytes == 256 * MIB
    config = load_pool_text(
        "{models: {a: {model: smollm2, engine: {device: cuda}}}, pool: {memory: {margin: 1MiB}}}"
    )
    assert find_budgets(config, two_gpus()).of["default"].margin.num_bytes == MIB


def test_a_stated_budget_wins() -> None:
    config = load_pool_text(
        "{models: {a: {model: smollm2, engine: {device: cuda}}}, pool: {memory: {budget: 10GiB}}}"
    )
    found = find_budgets(config, two_gpus())
    assert found.of["default"].total_bytes == 10 * GIB
    assert found.of["default"].foreign.num_bytes == 0
    assert found.gpus == {}


def test_without_nvml_or_on_a_host_one_member_at_a_time() -> None:
    on_gpu = load_pool_text("models: {a: {model: smollm2, engine: {device: cuda}}}")
    assert find_budgets(on_gpu, Gpus(lambda: None)).of == {}
    on_host = load_pool_text("models: {a: {model: smollm2, engine: {device: cpu}}}")
    assert find_budgets(on_host, two_gpus()).of == {}


def test_members_of_one_group_are_on_one_device() -> None:
    config = load_pool_text("""
models:
  a: {model: smollm2, engine: {device: cuda}}
  b: {model: smollm2, engine: {device: 'cuda:1'}}
""")
    with pytest.raises(ConfigError, match=r"'default' is on more than one device \(a on cuda, b on cuda:1\)"):
        find_budgets(config, two_gpus())
    config = load_pool_text("models: {a: {model: smollm2, engine: {device: cuda}}, b: {cmd: 'x ${PORT}'}}")
    with pytest.raises(ConfigError, match=r"b on the host.*memory\.device"):
        find_budgets(config, two_gpus())
    config = load_pool_text("""
models:
  a: {model: smollm2, engine: {device: cuda}}
  b: {model: smollm2, engine: {device: 'cuda:0'}}
""")
    assert set(find_budgets(config, two_gpus()).of) == {"default"}


def test_two_groups_need_stated_shares_of_one_gpu() -> None:
    text = """
models:
  a: {model: smollm2, engine: {device: cuda}, device_group: left}
  b: {model: smollm2, engine: {device: 'cuda:0'}, device_group: right}
"""
    with pytest.raises(ConfigError, match=r"'left' and 'right' are both on cuda:0"):
        find_budgets(load_pool_text(text), two_gpus())
    found = find_budgets(load_pool_text(text + "pool: {memory: {budget: 30GiB}}"), two_gpus())
    assert set(found.of) == {"left", "right"}


def test_a_device_in_a_pool_file_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"device.*must be one of"):
        load_pool_text("models: {a: {model: smollm2, engine: {device: 'cuda:x'}}}")
