"""One served model: what the endpoints share."""

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hotrack.config.server import ServerConfig
from hotrack.core.errors import ModelNotFoundError
from hotrack.core.request import EngineRequest, pack_tokens
from hotrack.core.sampling import SamplingParams
from hotrack.obs.member_metrics import MemberMetrics
from hotrack.openai.responses import ModelCard
from hotrack.server.chat_template import ChatTemplate
from hotrack.server.codec import Codec
from hotrack.server.generation import Engine, Generation, Job
from hotrack.server.residency import Residency
from hotrack.server.sampling import for_choice, token_budget
from hotrack.server.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class Member:
    """``names``: what clients may call the model; answers carry the first. ``root``: what the server was
    started with."""

    names: tuple[str, ...]
    root: str
    config: ServerConfig
    engine: Engine
    codec: Codec
    template: ChatTemplate
    residency: Residency
    metrics: MemberMetrics
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    _serial: "itertools.count[int]" = field(default_factory=itertools.count)

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFoundError unless ``name`` is this model, or absent."""
        if name is not None and name not in self.names:
            raise ModelNotFoundError(
                f"the model {name!r} does not exist; this server has {', '.join(map(repr, self.names))}",
                param="model",
            )

    def card(self, name: str) -> ModelCard:
        return ModelCard(name, self.created, self.root, self.codec.max_model_len)

    def generation(
        self,
        response_id: str,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        priority: int,
        *,
        param: str,
        budget_param: str = "max_tokens",
    ) -> Generation:
        """Sequences for ``prompts`` times ``sampling.n``, not yet submitted. ``param``: the prompts' field;
        ``budget_param``: the token budget's.

        Raises:
            ContextLengthError: a prompt leaves no room for what was asked.
        """
        jobs: list[Job] = []
        serial = next(self._serial)  # a client may send the same request id twice
        for prompt in prompts:
            max_tokens = token_budget(sampling, len(prompt), self.codec.max_model_len, param, budget_param)
            packed = pack_tokens(prompt)
            for choice in range(sampling.n):
                index = len(jobs)
                params = for_choice(sampling, choice, secrets.randbits(63))
                request = EngineRequest(
                    request_id=f"{response_id}-{serial}-{index}",
                    prompt=packed,
                    sampling=params,
                    max_tokens=max_tokens,
                    eos_token_ids=self.eos_token_ids,
                    priority=priority,
                )
                jobs.append(Job(index, request, SequenceState(self.codec.decoder, params, context=prompt)))
            self.metrics.prompt_tokens.inc(len(prompt))
            self.metrics.prompt_length.observe(len(prompt))
        return Generation(self.engine, self.metrics, jobs)
