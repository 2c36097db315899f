"""From the JSON of one line to a GenerateRequest, by the rules of the HTTP API. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gateway.admission import check
from gateway.errors import AdmissionError, shown
from gateway.http import translate
from gateway.http.fields import ChatFields, CompletionFields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.http.translate import Wanted
    from octavo.v1 import inference_pb2

_INPUTS: Final = ("prompt", "messages", "token_ids")
_NOT_HERE: Final = frozenset({"prompt", "messages", "stream", "stream_options", "user", "echo", "logprobs"})
_NOT_OF_CHATS: Final = frozenset({"top_logprobs", "tools", "tool_choice", "parallel_tool_calls"})


def completion(body: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """Of a body of /v1/completions. Raises AdmissionError."""
    return _checked(_one(translate.completion(body)))


def chat_completion(body: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """Of a body of /v1/chat/completions. Raises AdmissionError."""
    return _checked(_one(translate.chat_completion(body)))


def short(body: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """Of a line in the short form, less its id: fields that are not known are refused. Raises AdmissionError."""
    given = [name for name in _INPUTS if name in body]
    if len(given) != 1:
        told = f"{' and '.join(given)} together" if given else "not set"
        raise AdmissionError("prompt", told, "one of prompt, messages and token_ids is needed")
    name = given[0]
    rest = {field: value for field, value in body.items() if field != name}
    kind = ChatFields if name == "messages" else CompletionFields
    known = set(kind.model_fields) - _NOT_HERE - _NOT_OF_CHATS
    if unknown := sorted(set(rest) - known):
        raise AdmissionError(
            unknown[0], "set", f"is no field that is taken here; these are: {', '.join(sorted(known))}"
        )
    if name == "messages":
        return chat_completion(body)
    if name == "token_ids" and not isinstance(body[name], list):
        raise AdmissionError(name, shown(str(body[name])), "must be a list of token ids")
    request = _one(translate.completion({**rest, "prompt": body[name]}))
    if rest.get("max_tokens") is None:
        request.stopping.ClearField("max_tokens")  # as many as the context has room for
    return _checked(request)


def _one(wanted: Wanted) -> inference_pb2.GenerateRequest:
    """The request of a line: its result is whole, and made without the model's tokenizer."""
    if wanted.stream:
        raise AdmissionError("stream", "true", "must be false: results of a batch are whole")
    if len(wanted.requests) != 1:
        raise AdmissionError("prompt", f"{len(wanted.requests)} prompts", "must be one; give each a line of its own")
    for name, asked in (("echo", wanted.echo), ("logprobs", wanted.logprobs), ("tools", wanted.tools)):
        if asked:
            raise AdmissionError(name, "set", "is not taken in batches; leave it out")
    return wanted.requests[0]


def _checked(request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateRequest:
    check(request)
    return request
