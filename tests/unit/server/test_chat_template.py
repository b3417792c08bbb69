"""Chat templates: Hugging Face's conventions, and what a hostile one gets."""

import asyncio
import io

import msgspec
import pytest

from fakes.members import InlineTemplate
from hotrack.core.errors import RequestError
from hotrack.openai.requests import ChatMessage, ContentPart
from hotrack.server import template_worker
from hotrack.server.template_wire import RenderJob, RenderResult, frame, read_frame
from hotrack.server.template_worker import Renderer, serve

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HELLO = [ChatMessage(role="user", content="hello")]


def render(source: str | None, messages: list[ChatMessage] = HELLO, **options: object) -> str:
    template = InlineTemplate(source, {"bos_token": "<s>"}, timeout_s=5)
    return asyncio.run(template.render(messages, **options))  # type: ignore[arg-type]


def test_conventions() -> None:
    assert render(CHATML) == "<|user|>hello<|end|>\n<|assistant|>"
    assert (
        render("{{ bos_token }}{{ messages[0].content | tojson }}", [ChatMessage(role="user", content="<é>")])
        == '<s>"<é>"'
    )
    # trim_blocks and lstrip_blocks: a block's own line leaves nothing behind
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}x{% endgeneration %}") == "x"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ enable_thinking }}", kwargs={"enable_thinking": False}) == "False"


def test_text_parts_become_one_string() -> None:
    parts = [ContentPart(type="text", text="a"), ContentPart(type="text", text="b")]
    assert render(CHATML, [ChatMessage(role="user", content=parts)]).startswith("<|user|>a\nb<|end|>")


def test_images_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="image_url") as caught:
        render(CHATML, [ChatMessage(role="user", content=[ContentPart(type="image_url")])])
    assert caught.value.param == "messages[0].content[0]"


def test_continue_final_message() -> None:
    messages = [*HELLO, ChatMessage(role="assistant", content="Once upon")]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(CHATML, messages, **options) == "<|user|>hello<|end|>\n<|assistant|>Once upon"
    with pytest.raises(RequestError, match="contradict"):
        render(CHATML, messages, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(RequestError, match="as written"):
        render("{{ messages[0].content }}", messages, **options)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("x" * ((1 << 20) + 1), "longer than"),
    ],
)
def test_templates_that_fail(source: str | None, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        render(source)


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_worker, "MAX_OUTPUT_CHARS", 100)
    with pytest.raises(RequestError, match="more than 100 characters"):
        render("{% for i in range(1000) %}0123456789{% endfor %}")


def test_reserved_names_cannot_be_overridden() -> None:
    with pytest.raises(RequestError, match="messages"):
        render(CHATML, kwargs={"messages": []})
    with pytest.raises(RequestError, match="empty"):
        render(CHATML, [])


def test_worker_answers_in_order() -> None:
    jobs = [
        RenderJob("{{ x }}", {"x": "a" * 70_000}),
        RenderJob("{% bad", {}),
        RenderJob("{{ x }}", {"x": 2}),
    ]
    source = io.BytesIO(b"".join(frame(msgspec.json.encode(job)) for job in jobs))
    sink = io.BytesIO()
    serve(source, sink, Renderer().render)
    sink.seek(0)
    results = []
    while (payload := read_frame(sink)) is not None:
        results.append(msgspec.json.decode(payload, type=RenderResult))
    assert results[0].text == "a" * 70_000
    assert results[1].error is not None
    assert results[2].text == "2"


def test_any_json_number_reaches_the_template() -> None:
    assert render("{{ x }}", kwargs={"x": 10**40}) == str(10**40)
