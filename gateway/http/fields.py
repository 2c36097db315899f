"""The fields of OpenAI's requests that are taken, as pydantic checks and documents them.

Sizes and ranges that the protocol's own bounds are about (``gateway.admission``) are not repeated here: only what the
protocol could not even hold.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from gateway.admission import MAX_MESSAGES, MAX_TOOLS
from gateway.errors import AdmissionError
from kvstore.limits import MAX_BIASES, MAX_STOP_TOKENS, MAX_STOPS

MAX_PROMPTS = 128
"""Of one completions request."""
MAX_PARTS = 1024
"""Of one message."""

Number = Annotated[int, Field(ge=0, lt=2**32)]
Tokens = Annotated[list[Number], Field(max_length=MAX_STOP_TOKENS)]
Name = Annotated[str, Field(max_length=256)]
Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]
Object = dict[str, Any]

_TOKENS = {"type": "array", "items": {"type": "integer"}}
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                _TOKENS,
                {"type": "array", "items": _TOKENS},
            ]
        }
    ),
]


class _Fields(BaseModel):
    # Numbers are numbers: "1" is none, and true is not 1.
    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(_Fields):
    """How a stream is told."""

    include_usage: bool | None = None


class StructuredOutputs(_Fields):
    """vLLM's way to say what form an answer has."""

    json_schema: Annotated[Object | str | None, Field(alias="json")] = None
    regex: str | None = None
    json_object: bool | None = None
    choice: Any = None
    grammar: Any = None
    structural_tag: Any = None


class Common(_Fields):
    """What completions and chat completions have in common."""

    model: str = ""
    n: Number | None = None
    max_tokens: Number | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Number | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_regex: str | None = None
    guided_json: Object | str | None = None


class CompletionFields(Common):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: Number | None = None
    echo: bool | None = None


class Part(_Fields):
    """A part of a message's content."""

    type: str
    text: str | None = None


class CalledFunction(_Fields):
    """Which function, and with what: a JSON object, as text."""

    name: Name
    arguments: str = "{}"


class Called(_Fields):
    """A call that an assistant's message made."""

    id: Name = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Fields):
    """A message of a chat."""

    role: str
    content: str | Annotated[list[Part], Field(max_length=MAX_PARTS)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[Called], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Name | None = None


class Function(BaseModel):
    """A function that the model may call. What it has besides goes to the template as well."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: Name


class Tool(BaseModel):
    """What the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]
    function: Function


class JsonSchema(_Fields):
    """The form of an answer."""

    name: str = ""
    schema_: Annotated[Object | None, Field(alias="schema")] = None


class ResponseFormat(_Fields):
    """Of what form the answer is."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatFields(Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: Number | None = None
    logprobs: bool | None = None
    top_logprobs: Number | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None


class BatchFields(_Fields):
    """POST /v1/batches."""

    input_file_id: Name
    endpoint: Literal["/v1/completions", "/v1/chat/completions"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Key, Value], Field(max_length=16)] | None = None
    output_expires_after: Any = None


def json_text(value: Any, field: str) -> str:
    """An object of the body as text. Raises AdmissionError as ``whole_text``, and for one that is too deep to be
    written: what could just be read may be."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise AdmissionError(field, "set", "is nested too deeply") from None
    return whole_text(text, field)


def whole_text(value: str, field: str) -> str:
    """JSON can write half a character (a lone surrogate), which no text has."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise AdmissionError(field, "text with half a character", "must be valid Unicode") from None
    return value
