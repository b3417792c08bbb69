"""OpenAI's endpoints."""

from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from hotrack.core.errors import RequestError
from hotrack.openai.parse import unsupported
from hotrack.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from hotrack.openai.responses import DetokenizeResponse, ModelList, TokenizeResponse
from hotrack.server.formats import ChatFormat, CompletionFormat, Format, Wanted
from hotrack.server.generation import Generation
from hotrack.server.http import json_response, read_request, request_id
from hotrack.server.member import Member
from hotrack.server.prompts import chat_prompt, check_num_sequences, completion_prompts
from hotrack.server.respond import respond_stream, respond_whole
from hotrack.server.sampling import budget_field, build_sampling

R = TypeVar("R", bound=GenerationRequest)


class OpenAIEndpoints:
    def __init__(self, member: Member) -> None:
        self._member = member

    async def chat_completions(self, http: Request) -> Response:
        member = self._member
        request = await self._read(http, ChatCompletionRequest)
        sampling = build_sampling(request, member.sampling_defaults, member.codec.vocab_size)
        wanted = _wanted(request)
        prompts = [await chat_prompt(request, member.template, member.codec)]
        response_id = f"chatcmpl-{request_id(http)}"
        generation = member.generation(
            response_id,
            prompts,
            sampling,
            request.priority or 0,
            param="messages",
            budget_param=budget_field(request),
        )
        form = ChatFormat(
            response_id, member.names[0], generation.jobs, prompts, member.codec.decoder, wanted
        )
        return await self._respond(http, request, generation, form)

    async def completions(self, http: Request) -> Response:
        member = self._member
        request = await self._read(http, CompletionRequest)
        wanted = _wanted(request, echo=bool(request.echo))
        if wanted.echo and wanted.logprobs:
            if request.stream:
                raise unsupported(
                    "echo", "echo with logprobs is not supported in a stream; set stream to false"
                )
            request.prompt_logprobs = max(request.logprobs or 0, request.prompt_logprobs or 0)
        sampling = build_sampling(request, member.sampling_defaults, member.codec.vocab_size)
        prompts = await completion_prompts(request, member.codec)
        check_num_sequences(len(prompts), sampling.n)
        response_id = f"cmpl-{request_id(http)}"
        generation = member.generation(response_id, prompts, sampling, request.priority or 0, param="prompt")
        form = CompletionFormat(
            response_id, member.names[0], generation.jobs, prompts, member.codec.decoder, wanted
        )
        return await self._respond(http, request, generation, form)

    async def _read(self, http: Request, schema: type[R]) -> R:
        member = self._member
        request = await read_request(http, schema, member.config.max_body_bytes, member.metrics)
        member.check_model(request.model)
        member.residency.check()  # before any work is spent on the prompt
        return request

    async def _respond(
        self, http: Request, request: GenerationRequest, generation: Generation, form: Format
    ) -> Response:
        respond = respond_stream if request.stream else respond_whole
        return await respond(http, self._member.residency, generation, form)

    async def models(self, _: Request) -> Response:
        return json_response(ModelList([self._member.card(name) for name in self._member.names]))

    async def model(self, http: Request) -> Response:
        name = http.path_params["model"]
        self._member.check_model(name)
        return json_response(self._member.card(name))

    async def tokenize(self, http: Request) -> Response:
        member = self._member
        request = await read_request(http, TokenizeRequest, member.config.max_body_bytes, member.metrics)
        member.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("send exactly one of prompt and messages", param="prompt")
        if request.prompt is not None:
            add_special = request.add_special_tokens is not False
            ids = await member.codec.encode(request.prompt, add_special_tokens=add_special, param="prompt")
        else:
            proceed = bool(request.continue_final_message)
            text = await member.template.render(
                request.messages or [],
                add_generation_prompt=(
                    not proceed if request.add_generation_prompt is None else request.add_generation_prompt
                ),
                continue_final_message=proceed,
                kwargs=request.chat_template_kwargs,
            )
            ids = await member.codec.encode(
                text, add_special_tokens=bool(request.add_special_tokens), param="messages"
            )
        strings = [member.codec.decoder.token_text(i) for i in ids] if request.return_token_strs else None
        return json_response(TokenizeResponse(len(ids), member.codec.max_model_len, ids, strings))

    async def detokenize(self, http: Request) -> Response:
        member = self._member
        request = await read_request(http, DetokenizeRequest, member.config.max_body_bytes, member.metrics)
        member.check_model(request.model)
        if bad := next((i for i in request.tokens if i >= member.codec.vocab_size), None):
            raise RequestError(
                f"tokens: {bad} is not a token id of this model (0 to {member.codec.vocab_size - 1})",
                param="tokens",
            )
        return json_response(DetokenizeResponse(member.codec.decode(request.tokens)))


def _wanted(request: GenerationRequest, *, echo: bool = False) -> Wanted:
    if request.prompt_logprobs is not None and request.stream:
        raise unsupported(
            "prompt_logprobs", "prompt_logprobs are not available in a stream; set stream to false"
        )
    options = request.stream_options
    asked = request.logprobs if isinstance(request, ChatCompletionRequest | CompletionRequest) else None
    continuous = options is not None and bool(options.continuous_usage_stats)
    return Wanted(
        logprobs=asked is not None and asked is not False,
        prompt_logprobs=request.prompt_logprobs is not None,
        token_ids=bool(request.return_token_ids),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=continuous and options is not None and bool(options.include_usage),
        echo=echo,
    )
