"""From the JSON of an OpenAI request to GenerateRequests. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import ValidationError

from gateway.errors import AdmissionError, shown
from gateway.http import refused
from gateway.http.fields import MAX_PROMPTS, ChatFields, CompletionFields, json_text, whole_text
from gateway.http.structure import put_structure
from gateway.http.tool_choice import must_call, put_call, wants_tools
from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic import BaseModel

    from gateway.http.fields import Common, Message

    F = TypeVar("F", bound=BaseModel)

SLICE: Final = 65536
DEFAULT_MAX_TOKENS: Final = 16
"""Of completions, as OpenAI has it; an answer to a chat may have as many as the context has room for."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one HTTP request asks for."""

    chat: bool
    requests: tuple[inference_pb2.GenerateRequest, ...]
    """One for each prompt, without ids."""
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    """Each text begins with its prompt's."""
    output: bool = True
    """False: only the prompt is asked for. The one token that an answer has at least is left out."""
    tools: bool = False
    """Calls are to be read out of the text."""
    must_call: bool = False
    """Each text is a call, and nothing else."""
    parallel_calls: bool = True

    @property
    def n(self) -> int:
        """Answers to each prompt."""
        return max(1, self.requests[0].n)

    @property
    def logprobs(self) -> bool:
        """Whether tokens are told with their log-probabilities."""
        return self.requests[0].HasField("logprobs")


def completion(body: Mapping[str, Any]) -> Wanted:
    """Of POST /v1/completions. Raises AdmissionError."""
    refused.check(body, chat=False)
    fields = checked(CompletionFields, body)
    echo = bool(fields.echo)
    common = _common(fields)
    put_structure(common, fields, None)
    most = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    only_prompt = echo and most == 0
    common.stopping.max_tokens = 1 if only_prompt else most
    if fields.logprobs is not None:
        common.logprobs = fields.logprobs
        if echo:
            common.prompt_logprobs = fields.logprobs
    requests = tuple(_with_prompt(common, prompt) for prompt in prompts_of(body.get("prompt")))
    usage = _include_usage(fields)
    return Wanted(False, requests, _stream(fields), usage, echo, output=not only_prompt)


def chat_completion(body: Mapping[str, Any]) -> Wanted:
    """Of POST /v1/chat/completions. Raises AdmissionError."""
    refused.check(body, chat=True)
    fields = checked(ChatFields, body)
    request = _common(fields)
    put_structure(request, fields, fields.response_format)
    most = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    if most is not None:
        request.stopping.max_tokens = most
    if fields.logprobs:
        request.logprobs = fields.top_logprobs or 0
    elif fields.top_logprobs:
        raise AdmissionError("top_logprobs", str(fields.top_logprobs), "needs logprobs: true")
    for index, message in enumerate(fields.messages):
        _add_message(request.chat, message, f"messages[{index}]")
    if not fields.messages:
        raise AdmissionError("messages", "empty", "must have at least 1 message")
    tools, must = wants_tools(fields), must_call(fields)
    if must:
        put_call(request, body["tools"], must)
    if tools:
        # As the client wrote them: a template may show any of it.
        request.chat.tools.extend(json_text(tool, f"tools[{index}]") for index, tool in enumerate(body["tools"]))
    return Wanted(
        True,
        (request,),
        _stream(fields),
        _include_usage(fields),
        tools=tools,
        must_call=bool(must),
        parallel_calls=fields.parallel_tool_calls is not False,
    )


def checked(kind: type[F], body: Mapping[str, Any]) -> F:
    """The fields of a body. Raises AdmissionError for the first one that is wrong."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)
    # Of a field that may be of several kinds each is told to be wrong: what is found deepest tells the most, and of
    # that what is not about the kind. The kind is in the path, as a word that is no field.
    same = (each for each in wrong if each["loc"][:1] == wrong[0]["loc"][:1])
    first = max(same, key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")))
    path = [part for part in first["loc"] if isinstance(part, int) or (part.isidentifier() and part != "str")]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    value = first["input"]
    told = shown(value) if isinstance(value, str | int | float) else "set" if value else "not set"
    if first["type"] == "missing":
        told = "not set"
    raise AdmissionError(name or "body", told, first["msg"][:1].lower() + first["msg"][1:])


def prompts_of(value: Any) -> list[str | list[int]]:
    """The prompts of a completions request: one or several, each text or token ids. Raises AdmissionError."""
    several: list[Any] = value if isinstance(value, list) else [value]
    if several and type(several[0]) is int:
        several = [several]
    if not several or len(several) > MAX_PROMPTS:
        raise AdmissionError("prompt", f"{len(several)} prompts", f"must be 1 to {MAX_PROMPTS}")
    for index, prompt in enumerate(several):
        field = "prompt" if several is not value else f"prompt[{index}]"
        if type(prompt) not in (str, list) or type(prompt) is not type(several[0]):
            raise AdmissionError(field, type(prompt).__name__, "must be text or token ids, all prompts alike")
        if isinstance(prompt, list) and not (prompt and all(map(_fit, _slices(prompt)))):
            raise AdmissionError(field, f"a list of {len(prompt)}", "must be text, or at least 1 token id")
    return several


def _slices(ids: list[Any]) -> Iterator[list[Any]]:
    """A million ids without a line of Python for each, nor others waiting for the interpreter until all are done."""
    return (ids[at : at + SLICE] for at in range(0, len(ids), SLICE))


def _fit(ids: list[Any]) -> bool:
    return set(map(type, ids)) == {int} and 0 <= min(ids) <= max(ids) < 2**32


def _common(fields: Common) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(model=whole_text(fields.model, "model"))
    request.n = 1 if fields.n is None else fields.n
    if fields.n == 0:
        raise AdmissionError("n", "0", "must be at least 1")
    if fields.cache_salt:
        request.cache_salt = whole_text(fields.cache_salt, "cache_salt")
    sampling, stopping = request.sampling, request.stopping
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty"):
        if (value := getattr(fields, name)) is not None:
            setattr(sampling, name, value)
    if fields.top_k is not None:
        sampling.top_k = max(fields.top_k, 0)  # -1 is vLLM's off
    if fields.seed is not None:
        sampling.seed = fields.seed % 2**64
    for token, bias in (fields.logit_bias or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 11 and int(token) < 2**32):
            raise AdmissionError("logit_bias", f"for {shown(token)}", "must be for token ids")
        sampling.logit_bias[int(token)] = bias
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    stopping.stop.extend(whole_text(stop, f"stop[{index}]") for index, stop in enumerate(stops))
    stopping.stop_token_ids.extend(fields.stop_token_ids or ())
    stopping.min_tokens = fields.min_tokens or 0
    stopping.ignore_eos = bool(fields.ignore_eos)
    stopping.include_stop = bool(fields.include_stop_str_in_output)
    return request


def _with_prompt(common: inference_pb2.GenerateRequest, prompt: str | list[int]) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    request.CopyFrom(common)
    if isinstance(prompt, str):
        request.text = whole_text(prompt, "prompt")
    else:
        for ids in _slices(prompt):
            request.token_ids.ids.extend(ids)
    return request


def _stream(fields: Common) -> bool:
    if fields.stream_options is not None and not fields.stream:
        raise AdmissionError("stream_options", "set", "needs stream: true")
    return bool(fields.stream)


def _include_usage(fields: Common) -> bool:
    return fields.stream_options is not None and bool(fields.stream_options.include_usage)


def _add_message(chat: inference_pb2.Chat, message: Message, field: str) -> None:
    role = "system" if message.role == "developer" else message.role
    added = chat.messages.add(role=whole_text(role, f"{field}.role"), content=_content(message, f"{field}.content"))
    added.name = whole_text(message.name or "", f"{field}.name")
    added.tool_call_id = whole_text(message.tool_call_id or "", f"{field}.tool_call_id")
    for index, call in enumerate(message.tool_calls or ()):
        parts = {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        place = f"{field}.tool_calls[{index}]"
        added.tool_calls.add(**{name: whole_text(value, f"{place}.{name}") for name, value in parts.items()})


def _content(message: Message, field: str) -> str:
    """Parts are paragraphs, as vLLM and llama.cpp have it."""
    content = message.content
    if content is None and not message.tool_calls:
        raise AdmissionError(field, "null", "must be text, unless the message has tool_calls")
    texts = [content or ""] if content is None or isinstance(content, str) else []
    for index, part in enumerate(() if content is None or isinstance(content, str) else content):
        if part.type != "text" or part.text is None:
            raise AdmissionError(f"{field}[{index}].type", shown(part.type), "must be text, with text")
        texts.append(part.text)
    return whole_text("\n".join(texts), field)
