"""A member around a scripted engine."""

from typing import Any

from fakes.scripted_engine import CHAT_TEMPLATE, EOS, VOCAB_SIZE, ScriptedEngine, byte_tokenizer
from hotrack.config.server import ServerConfig
from hotrack.obs.member_metrics import MemberMetrics
from hotrack.server.chat_template import ChatTemplate
from hotrack.server.codec import Codec
from hotrack.server.member import Member
from hotrack.server.residency import Residency


class InlineTemplate(ChatTemplate):
    """Renders in this process, so that unit tests start none."""

    async def _exchange(self, request: bytes) -> Any:
        import msgspec

        from hotrack.server.template_wire import RenderJob
        from hotrack.server.template_worker import Renderer

        return Renderer().render(msgspec.json.decode(request[4:], type=RenderJob))


def scripted_member(
    engine: ScriptedEngine, *, template: str | None = CHAT_TEMPLATE, max_model_len: int = 512, **config: Any
) -> Member:
    metrics = MemberMetrics("demo")
    options = ServerConfig(**config)
    return Member(
        names=("demo", "alias"),
        root="/models/demo",
        config=options,
        engine=engine,
        codec=Codec(byte_tokenizer(), max_model_len, VOCAB_SIZE),
        template=InlineTemplate(template, {}, timeout_s=5.0),
        residency=Residency(
            engine, metrics, sleep_enabled=True, max_requests=options.max_concurrent_requests
        ),
        metrics=metrics,
        eos_token_ids=(EOS,),
    )
