"""The offline API renders with the sandbox that the server uses."""

import pytest

from fakes.scripted_engine import byte_tokenizer
from hotrack.checkpoint.tokenizer import TokenizerAssets
from hotrack.core.errors import RequestError
from hotrack.engine.chat import render_chat

MESSAGES = [{"role": "user", "content": "<a>"}, {"role": "user", "content": "b"}]


def assets(template: str | None) -> TokenizerAssets:
    return TokenizerAssets(byte_tokenizer(), template, None, (), None, {}, add_bos=False)


def test_conventions_of_hugging_face_templates() -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m.content | tojson }}{% endfor %}"
        "{% generation %}!{% endgeneration %}{{ strftime_now('%Y')[:2] }}"
    )
    assert render_chat(assets(template), MESSAGES) == '"<a>"!20'


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('only one') }}", "only one"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_refusals_are_the_requests_fault(template: str | None, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        render_chat(assets(template), MESSAGES)
