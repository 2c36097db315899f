"""From options to a request."""

from __future__ import annotations

from typing import Any

from octavo.v1 import inference_pb2
from ops.generate import build

UNSET: dict[str, Any] = {
    "chat": False,
    "system": None,
    "model": "",
    "max_tokens": None,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "seed": None,
    "stop": (),
}


def test_what_is_left_out_stays_unset() -> None:
    request = build(prompt="p", **UNSET)
    assert request == inference_pb2.GenerateRequest(
        text="p", sampling=inference_pb2.Sampling(), stopping=inference_pb2.Stopping()
    )
    assert not request.sampling.HasField("temperature")


def test_zero_is_not_unset() -> None:
    request = build(prompt="p", **UNSET | {"temperature": 0.0, "seed": 0, "top_k": 0})
    assert all(request.sampling.HasField(name) for name in ("temperature", "seed", "top_k"))


def test_everything_set() -> None:
    request = build(
        prompt="p",
        chat=True,
        system="s",
        model="m",
        max_tokens=5,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        seed=2**64 - 1,
        stop=("a", "b"),
    )
    assert [(each.role, each.content) for each in request.chat.messages] == [("system", "s"), ("user", "p")]
    assert request.model == "m"
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.25, 7)
    assert request.sampling.seed == 2**64 - 1
    assert (request.stopping.max_tokens, list(request.stopping.stop)) == (5, ["a", "b"])


def test_a_system_message_makes_it_a_chat() -> None:
    request = build(prompt="p", **UNSET | {"system": "s"})
    assert request.WhichOneof("input") == "chat"
