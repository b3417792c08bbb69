"""Every example in the repository loads, and becomes members."""

from pathlib import Path

import pytest

from hotrack.config.pool_file import load_pool_file
from hotrack.gateway.build import make_routes, member_specs, pool_policy

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_loads_without_warnings(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "user")
    monkeypatch.setenv("ADMIN_KEY", "admin")
    config = load_pool_file(path)
    assert config.warnings == ()
    assert len(member_specs(config)) == len(config.models) >= 2
    assert set(make_routes(config).listed) <= set(config.models)
    pool_policy(config)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3
