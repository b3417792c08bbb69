"""The dashboard in a headless browser, over a pool of two members. Skips where there is no Chromium."""

from pathlib import Path

import pytest

from fakes.browser import BROWSER, browser
from fakes.served_pool import STUB, served_pool

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(BROWSER is None, reason="needs Chromium")]
POOL = f"""
models:
  alpha: {{cmd: "{STUB} --uds ${{SOCKET}} --name alpha --mib 32", sleep_level: 1}}
  beta: {{cmd: "{STUB} --uds ${{SOCKET}} --name beta --mib 32", sleep_level: 1}}
"""


def test_members_swaps_and_buttons(tmp_path: Path) -> None:
    with served_pool(tmp_path, POOL) as served:
        for model in ("alpha", "beta"):
            served.api.post("/v1/chat/completions", {"model": model, "messages": []})
        with browser(f"{served.api.url}/ui", tmp_path) as page:
            page.until("document.body.innerText.includes('up; awake: beta')")
            page.until("/alpha → beta \\(request\\), \\d+/.test(document.body.innerText)")
            assert page.evaluate("document.querySelectorAll('#memory .bar span').length") == 2
            label = "document.querySelector('#timeline svg:last-of-type').getAttribute('aria-label')"
            assert "of the last 600 seconds" in page.evaluate(label)
            page.evaluate("document.querySelector('[aria-label=\"Wake: alpha\"]').click()")
            page.until("document.body.innerText.includes('up; awake: alpha')")
            page.until("/beta: ready → draining/.test(document.querySelector('#log').innerText)")
            # A phone: the page itself does not scroll sideways, only the table in it.
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert served.members()["alpha"]["state"] == "ready"


def test_it_asks_for_a_key(tmp_path: Path) -> None:
    with (
        served_pool(tmp_path, POOL + "apiKeys: [secret]\n") as served,
        browser(f"{served.api.url}/ui", tmp_path) as page,
    ):
        page.until("document.body.innerText.includes('a key is needed')")
        assert not page.evaluate("document.body.innerText.includes('alpha')")
        page.evaluate("document.querySelector('#key').value = 'secret'")
        page.evaluate("document.querySelector('#login').requestSubmit()")
        page.until("document.body.innerText.includes('alpha')")
        assert page.evaluate("document.querySelector('#login').hidden")
