"""Stands where the gateway's client does, for tests of what the command sends and prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from click.testing import CliRunner

from octavo.v1 import inference_pb2
from octavo.v1.inference_pb2 import Chunk, GenerateResponse
from ops import attach, generate, streaming

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    import grpc.aio
    import pytest


class Service:
    """Stands where the gateway's client does: notes the request, gives the responses that it was told."""

    def __init__(self, *responses: GenerateResponse) -> None:
        self.responses = responses
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.attached: list[tuple[str, dict[int, int], bool]] = []
        self.targets: list[str] = []
        self.settings: dict[str, float] = {}

    def __call__(
        self,
        targets: Sequence[str],
        *,
        on_farewell: Callable[[str, bool], None],
        on_trouble: Callable[[grpc.aio.AioRpcError], None],
        **settings: float,
    ) -> Service:
        self.targets, self.settings = list(targets), settings
        self.on_farewell, self.on_trouble = on_farewell, on_trouble
        return self

    async def __aenter__(self) -> Service:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def generate(
        self, request: inference_pb2.GenerateRequest, *, timeout: float | None
    ) -> AsyncIterator[GenerateResponse]:
        self.requests.append(request)
        for each in self.responses:
            yield each
        await self.then()

    async def attach(
        self, request_id: str, *, after: Mapping[int, int], watch: bool
    ) -> AsyncIterator[GenerateResponse]:
        self.attached.append((request_id, dict(after), watch))
        for each in self.responses:
            yield each
        await self.then()

    async def then(self) -> None:
        """What happens after the responses."""


def run(monkeypatch: pytest.MonkeyPatch, service: Service, *arguments: str) -> Any:
    monkeypatch.setattr(streaming, "Client", service)
    return CliRunner().invoke(generate.command, list(arguments), prog_name="octavo generate")


def run_attach(monkeypatch: pytest.MonkeyPatch, service: Service, *arguments: str) -> Any:
    monkeypatch.setattr(streaming, "Client", service)
    return CliRunner().invoke(attach.command, list(arguments), prog_name="octavo attach")


def response(*chunks: Chunk, **fields: Any) -> GenerateResponse:
    return GenerateResponse(request_id="r", chunks=chunks, **fields)


LAST = Chunk(start=1, token_ids=[2], text=" there", finish=inference_pb2.STOP)
GREETING = Service(response(Chunk(token_ids=[1], text="Hi")), response(LAST, usage={"completion_tokens": 2}))


THREE = Service(
    response(Chunk(token_ids=[1], text="A"), Chunk(choice=2, token_ids=[3], text="C")),
    response(
        Chunk(choice=2, start=1, finish=inference_pb2.LENGTH),
        Chunk(choice=1, token_ids=[2], text="B\nb", finish=inference_pb2.STOP),
    ),
    response(Chunk(start=1, token_ids=[4], text="a", finish=inference_pb2.STOP), usage={"completion_tokens": 4}),
)
