"""From the JSON of one line to a GenerateRequest. Pure.

A field that is not known is refused: one that was left out in silence would be noticed after thousands of answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gateway.admission import check
from gateway.errors import AdmissionError, shown
from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Put = Callable[[inference_pb2.GenerateRequest, Any], None]

DEFAULT_MAX_TOKENS: Final = 16
"""Of completions in OpenAI's form, as OpenAI has it; all others may have as many as the context has room for."""
_SAMPLING: Final = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_STOPPING: Final = ("max_tokens", "min_tokens", "ignore_eos")
_IGNORED: Final = frozenset({"user", "metadata", "store", "service_tier"})
"""Of OpenAI's, those that change no answer."""


def completion(body: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """Of a body of /v1/completions. Raises AdmissionError."""
    body = _without_stream(body)
    return _request({"max_tokens": DEFAULT_MAX_TOKENS, **body}, {**_COMMON, "prompt": _prompt}, "prompt")


def chat_completion(body: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """Of a body of /v1/chat/completions. Raises AdmissionError."""
    body = dict(_without_stream(body))
    if "max_completion_tokens" in body:
        body["max_tokens"] = body.pop("max_completion_tokens")
    return _request(body, {**_COMMON, "messages": _messages}, "messages")


def short(body: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """Of a line in the short form, less its id. Raises AdmissionError."""
    inputs = {"prompt": _prompt, "messages": _messages, "token_ids": _token_ids}
    given = [name for name in inputs if name in body]
    if len(given) != 1:
        told = f"{' and '.join(given)} together" if given else "not set"
        raise AdmissionError("prompt", told, "one of prompt, messages and token_ids is needed")
    return _request(body, {**_COMMON, **inputs}, given[0])


def _request(body: Mapping[str, Any], known: Mapping[str, Put], needed: str) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    if body.get(needed) is None:
        raise AdmissionError(needed, "not set", "is needed")
    for name, value in body.items():
        put = known.get(name)
        if put is None:
            raise AdmissionError(name, "set", f"is no field that is taken here; these are: {', '.join(sorted(known))}")
        if value is not None:
            try:
                put(request, value)
            except (TypeError, ValueError, AttributeError, OverflowError):
                told = shown(value) if isinstance(value, str | int | float) else type(value).__name__
                raise AdmissionError(name, told, "is not of the right kind, or out of range") from None
    check(request)
    return request


def _without_stream(body: Mapping[str, Any]) -> Mapping[str, Any]:
    if body.get("stream"):
        raise AdmissionError("stream", "true", "must be false: results of a batch are whole")
    return {name: value for name, value in body.items() if name not in _IGNORED and name != "stream"}


def _plain(part: str, name: str) -> Put:
    """Sets a field of a message within the request; protobuf checks kind and range, but for true and false."""

    def put(request: inference_pb2.GenerateRequest, value: Any) -> None:
        if isinstance(value, bool) != (name == "ignore_eos"):
            raise TypeError
        if name == "top_k":
            value = max(value, 0)  # -1 is off for some
        elif name == "seed":
            value %= 2**64
        setattr(getattr(request, part), name, value)

    return put


def _n(request: inference_pb2.GenerateRequest, value: Any) -> None:
    if isinstance(value, bool) or value < 1:
        raise ValueError
    request.n = value


def _model(request: inference_pb2.GenerateRequest, value: Any) -> None:
    request.model = value


def _salt(request: inference_pb2.GenerateRequest, value: Any) -> None:
    request.cache_salt = value


def _stop(request: inference_pb2.GenerateRequest, value: Any) -> None:
    request.stopping.stop.extend([value] if isinstance(value, str) else value)


def _stop_tokens(request: inference_pb2.GenerateRequest, value: Any) -> None:
    request.stopping.stop_token_ids.extend(value)


def _bias(request: inference_pb2.GenerateRequest, value: Any) -> None:
    for token, bias in value.items():
        request.sampling.logit_bias[int(token)] = bias


def _prompt(request: inference_pb2.GenerateRequest, value: Any) -> None:
    if isinstance(value, str):
        request.text = value
    else:
        _token_ids(request, value)


def _token_ids(request: inference_pb2.GenerateRequest, value: Any) -> None:
    if not isinstance(value, list) or {type(each) for each in value} - {int}:
        raise TypeError
    request.token_ids.SetInParent()
    request.token_ids.ids.extend(value)


def _messages(request: inference_pb2.GenerateRequest, value: Any) -> None:
    request.chat.SetInParent()
    for index, message in enumerate(value):
        if not isinstance(message, dict) or set(message) - {"role", "content"}:
            raise AdmissionError(f"messages[{index}]", "another thing", "must be an object of role and content")
        role = "system" if message.get("role") == "developer" else message.get("role", "")
        content = message.get("content", "")
        if isinstance(content, list):
            content = "\n".join(_text_of(part, f"messages[{index}].content") for part in content)
        request.chat.messages.add(role=role, content=content)


def _text_of(part: Any, field: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise AdmissionError(field, "a part that is no text", "must be text")
    return str(part["text"])


_COMMON: Final[dict[str, Put]] = {
    **{name: _plain("sampling", name) for name in _SAMPLING},
    **{name: _plain("stopping", name) for name in _STOPPING},
    "model": _model,
    "n": _n,
    "stop": _stop,
    "stop_token_ids": _stop_tokens,
    "logit_bias": _bias,
    "cache_salt": _salt,
}
