"""Options of `hotrack bench swap`."""

import pytest
from typer.testing import CliRunner

from hotrack.bench import swap as bench
from hotrack.bench.swap import HOTRACK, Link, SwapResult
from hotrack.bench.swap_cycles import Outcome
from hotrack.cli import bench_swap_cmd
from hotrack.cli.main import app
from hotrack.core.errors import ConfigError

GIB = 1 << 30


@pytest.fixture
def asked(monkeypatch):
    """Options that reached the benchmark."""
    seen = []

    def measure(options, peers, report):
        report("measuring", 0, 1)
        seen.append((options, peers))
        link = Link("cpu", {"name": "CPU", "device_bytes": None}, GIB, [1.0])
        return SwapResult(options, [link], outcomes=[Outcome(HOTRACK, "none", faults=list(faults))])

    faults: list[str] = []
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr("hotrack.bench.swap_table.rows", lambda _result: [])
    measure.seen, measure.faults = seen, faults
    return measure


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", "swap", *arguments])


def test_defaults_depend_on_the_device(asked):
    assert invoke("--device", "cpu").exit_code == 0
    assert invoke("--device", "cuda", "--peers", "none").exit_code == 0
    (cpu, _), (cuda, _) = asked.seen
    assert (cpu.nbytes, cpu.cycles, cpu.touch, cpu.members) == (GIB // 4, 5, False, 2)
    assert (cuda.nbytes, cuda.cycles, cuda.touch, cuda.tensor_bytes) == (17 * GIB, 20, True, 64 << 20)
    assert cuda.device_name() == "cuda:0"


def test_sizes_are_bytes(asked):
    arguments = ("--gib", "0.5", "--tensor-mib", "4", "--kv-gib", "0.25", "--chunk-mib", "8", "--no-touch")
    assert invoke("--device", "cuda", "--devices", "0,1", "--peers", "none", *arguments).exit_code == 0
    ((options, _),) = asked.seen
    assert (options.nbytes, options.kv_bytes) == (GIB // 2, GIB // 4)
    assert (options.tensor_bytes, options.chunk_bytes) == (4 << 20, 8 << 20)
    assert options.devices == (0, 1)
    assert options.device_name(1) == "cuda:1"
    assert options.touch is False


def test_a_difference_ends_with_1(asked):
    asked.faults.append("3 tensors differ")
    done = invoke("--device", "cpu")
    assert done.exit_code == 1
    assert "3 tensors differ" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--device", "tpu"), "auto, cpu or cuda"),
        (("--devices", "0,x"), "numbers separated by commas"),
        (("--devices", "1,1"), "different"),
        (("--device", "cpu", "--gib", "0"), "at least 1 MiB"),
        (("--device", "cpu", "--plot", "x.png"), "something.svg"),
        (("--device", "cpu", "--graphs", "2"), "need --device cuda"),
    ],
)
def test_wrong_options_say_what_is_right(asked, arguments, text):
    done = invoke(*arguments)
    assert isinstance(done.exception, ConfigError)
    assert text in done.exception.message
    assert asked.seen == []


def test_auto_is_cpu_without_a_driver(monkeypatch):
    monkeypatch.setattr(bench_swap_cmd.Path, "exists", lambda _self: False)
    assert bench_swap_cmd._device("auto") == "cpu"
    monkeypatch.setattr(bench_swap_cmd.Path, "exists", lambda _self: True)
    assert bench_swap_cmd._device("auto") == "cuda"
