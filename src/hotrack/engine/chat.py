"""Messages to prompt text with the model's own chat template, for the offline API.

Templates run in a sandbox. (The HTTP server renders in a separate process with a time limit.)
"""

from collections.abc import Mapping, Sequence

from jinja2 import TemplateError

from hotrack.checkpoint.chat_template import template_environment
from hotrack.checkpoint.tokenizer import TokenizerAssets
from hotrack.core.errors import RequestError


def render_chat(assets: TokenizerAssets, messages: Sequence[Mapping[str, str]]) -> str:
    """Prompt text that ends where the assistant speaks.

    Raises:
        RequestError: the model has no chat template, or the template refused the messages.
    """
    if assets.chat_template is None:
        raise RequestError("this model has no chat template; use generate() with a plain prompt")

    try:
        return (
            template_environment()
            .from_string(assets.chat_template)
            .render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                bos_token=assets.bos_token or "",
                eos_token=assets.eos_token or "",
            )
        )
    except TemplateError as exc:
        raise RequestError(f"the chat template failed: {exc}") from exc
