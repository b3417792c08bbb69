"""The documentation against the code: links, commands, keys, codes, states, metrics."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from prometheus_client.parser import text_string_to_metric_families

import gen_docs
from hotrack.cli.main import app
from hotrack.config.pool_file import load_pool_text
from hotrack.core import errors
from hotrack.core.lifecycle import MemberState
from hotrack.obs.member_metrics import MemberMetrics
from hotrack.pool.metrics import PoolMetrics

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OPERATIONS = ROOT / "docs" / "operations.md"

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def fenced(page: Path, language: str = r"\w*") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> Iterator[str]:
    """Lines of code blocks, and inline code."""
    for block in fenced(page):
        yield from block.replace("\\\n", " ").splitlines()
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", prose)


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pages
def test_relative_links_resolve(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name} links to {link}"


@pages
def test_named_subcommands_exist(page):
    known = typer.main.get_command(app).commands
    for line in commands(page):
        for match in re.finditer(r"(?<!from )(?<![\w.-])hotrack ([a-z]\w*)(?: ([a-z]\w*))?", line):
            name, sub = match.groups()
            assert name in known, f"{page.name}: {line!r}"
            if sub and hasattr(known[name], "commands"):
                assert sub in known[name].commands, f"{page.name}: {line!r}"


@pages
def test_named_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands(page):
        if line.startswith("make "):
            named = [word for word in line.split("#")[0].split()[1:] if "=" not in word]
            assert targets.issuperset(named), f"{page.name}: {line!r}"


@pages
def test_pool_files_in_the_text_load(page):
    for block in fenced(page, "yaml"):
        load_pool_text(block, page.name)


def test_examples_are_valid(monkeypatch):
    for name in ("API_KEY", "ADMIN_KEY"):
        monkeypatch.setenv(name, "key")
    files = sorted((ROOT / "examples").iterdir())
    assert {".yaml", ".py"} == {path.suffix for path in files if path.is_file()}
    for path in files:
        if path.suffix == ".yaml":
            load_pool_text(path.read_text(), path.name)
        elif path.suffix == ".py":
            ast.parse(path.read_text())


def test_configuration_page_is_generated():
    assert gen_docs.TARGET.read_text() == gen_docs.render(), "run python tools/gen_docs.py"


def test_every_key_and_flag_has_a_meaning():
    rows = [line for line in gen_docs.render().splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert not [row for row in rows if row.endswith("|  |")]


def test_every_environment_variable_is_described():
    source = (ROOT / "src/hotrack/config/env.py").read_text()
    assert set(re.findall(r'environ\.get\("([A-Z_]+)"', source)) <= set(gen_docs.ENVIRONMENT)


def table_names(heading: str) -> set[str]:
    """First cells of the table under a heading of the operations page, without backticks."""
    text = OPERATIONS.read_text()
    assert f"\n## {heading}\n" in text
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)`", section, re.MULTILINE))


def all_errors(cls: type[errors.HotrackError] = errors.HotrackError) -> list[type[errors.HotrackError]]:
    return [cls, *(e for sub in cls.__subclasses__() for e in all_errors(sub))]


def test_error_table_is_complete():
    public = [cls for cls in all_errors() if cls.__module__ == errors.__name__]
    assert {cls.code for cls in public} <= table_names("Errors")


def test_error_table_has_the_right_status():
    statuses = dict(re.findall(r"^\| `([a-z_]+)` \| (\d+) \|", OPERATIONS.read_text(), re.MULTILINE))
    for cls in all_errors():
        if cls.__module__ == errors.__name__ and cls.code in statuses:
            allowed = {str(c.status) for c in all_errors() if c.code == cls.code}
            assert statuses[cls.code] in allowed, cls.__name__


def test_state_table_is_complete():
    assert table_names("Member states") == set(MemberState)


@pytest.mark.parametrize(
    ("heading", "text"),
    [("Pool metrics", PoolMetrics().render([])), ("Member metrics", MemberMetrics("m").render())],
    ids=["pool", "member"],
)
def test_metrics_table_is_complete(heading, text):
    exported = {family.name for family in text_string_to_metric_families(text.decode())}
    exported = {name for name in exported if not name.endswith("_created")}
    assert exported == {name.removesuffix("_total") for name in table_names(heading)}
