"""The paths of the HTTP API."""

from __future__ import annotations

import time
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client.exposition import choose_encoder
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from gateway.errors import shown, status_of
from gateway.http import translate
from gateway.http.context import HttpContext
from gateway.http.exchange import Exchange
from gateway.http.fields import ChatFields, CompletionFields
from gateway.http.problems import Failed, Problem, problem_of
from gateway.rpc import Method, guarded
from kvstore.limits import MAX_REQUEST_ID
from kvstore.tenants import REQUEST_ID
from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prometheus_client import CollectorRegistry

    from gateway.http.batches import BatchApi
    from gateway.http.context import Metadata
    from gateway.http.exchange import Backend
    from gateway.http.translate import Wanted

    Endpoint = Callable[..., Awaitable[Response]]

_SCHEMAS: Final = "#/components/schemas/{model}"
_GONE: Final = 499
"""What logs and metrics show of a client that left before it had an answer; nobody gets it."""


class _App(FastAPI):
    """With the schemas of bodies that FastAPI does not read itself: it would read them whole, whatever their size."""

    def openapi(self) -> dict[str, Any]:
        schema = super().openapi()
        _, found = models_json_schema(
            [(CompletionFields, "validation"), (ChatFields, "validation")], ref_template=_SCHEMAS
        )
        components = schema.setdefault("components", {})
        components.setdefault("schemas", {}).update(found["$defs"])
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}, {}]  # or none, where none are in use
        return schema


class Api:
    """What the paths do."""

    def __init__(
        self,
        backend: Backend,
        registry: CollectorRegistry,
        serves: Callable[[], bool],
        batches: BatchApi | None = None,
    ) -> None:
        """``serves``: whether answers can be had now. ``batches``: None where no files are kept."""
        self._batches = batches
        self._backend = backend
        self._registry = registry
        self._serves = serves
        self._since = int(time.time())
        self._get_model = guarded(Method(inference_pb2.GetModelRequest, backend.service.get_model), backend.doorman)

    def app(self) -> FastAPI:
        """The application, with its documentation at /docs."""
        app = _App(
            title="Octavo",
            description="OpenAI's API for the models of this fleet.",
            redoc_url=None,
            telemetry={"tracing": False, "metrics": False, "logs": False},  # the gateway has its own
        )
        for path, endpoint, kind in (
            ("/v1/completions", self.completions, CompletionFields),
            ("/v1/chat/completions", self.chat_completions, ChatFields),
        ):
            content = {"application/json": {"schema": {"$ref": _SCHEMAS.format(model=kind.__name__)}}}
            extra = {"requestBody": {"required": True, "content": content}}
            app.post(path, response_model=None, openapi_extra=extra)(self._keyed(endpoint))
        app.get("/v1/models", response_model=None)(self._keyed(self.models))
        app.get("/v1/models/{name:path}", response_model=None)(self._keyed(self.model))
        for method, path, of_batches in self._batches.routes() if self._batches is not None else ():
            app.add_api_route(path, self._keyed(of_batches), methods=[method], response_model=None)
        app.get("/health", response_model=None)(self.health)
        app.get("/metrics", response_model=None)(_told(self.metrics))
        app.add_exception_handler(HTTPException, _of_framework)
        app.add_exception_handler(RequestValidationError, _of_framework)
        return app

    def _keyed(self, endpoint: Endpoint) -> Endpoint:
        """For those who have a key: before anything of the request but its head is read."""

        @wraps(endpoint)
        async def answer(request: Request, **path: str) -> Response:
            request.state.caller = self._backend.doorman.caller(_metadata(request))
            return await endpoint(request=request, **path)

        return _told(answer)

    async def completions(self, request: Request) -> Response:
        """OpenAI's completions."""
        return await self._answers(request, translate.completion)

    async def chat_completions(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        return await self._answers(request, translate.chat_completion)

    async def _answers(self, request: Request, make: Callable[[dict[str, Any]], Wanted]) -> Response:
        request_id = _request_id(request)
        wanted = await self._backend.bodies.read(request, make)
        return Exchange(self._backend, wanted, request_id, _metadata(request))

    async def models(self, request: Request) -> Response:
        """The models that can be had now."""
        found = []
        for name in await self._backend.models.names():
            try:
                found.append(await self._told_model(request, name))
            except Failed as failed:
                if failed.problem.status not in (403, 404, 503):  # not for this caller, or just gone
                    raise
        return _json_response({"object": "list", "data": found})

    async def model(self, name: str, request: Request) -> Response:
        """One of them."""
        return _json_response(await self._told_model(request, name))

    async def _told_model(self, request: Request, name: str) -> dict[str, Any]:
        asked = inference_pb2.GetModelRequest(name=name).SerializeToString()
        model: Any = await self._get_model(asked, HttpContext(_metadata(request)))
        return {
            "id": model.name,
            "object": "model",
            "created": self._since,
            "owned_by": "octavo",
            "max_model_len": model.context_length,
        }

    async def health(self) -> Response:
        """Whether answers can be had: 200, or 503."""
        serves = self._serves()
        return _json_response({"status": "ok" if serves else "unavailable"}, 200 if serves else 503)

    async def metrics(self, request: Request) -> Response:
        """For Prometheus: what the gateway's metrics port shows as well. Where keys are in use, for operators: unlike
        that port, this one is meant for callers."""
        self._backend.doorman.operator(_metadata(request))
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        body = await self._backend.bodies.run(lambda: encode(self._registry), large=True)
        return Response(body, headers={"content-type": kind})


def _told(endpoint: Endpoint) -> Endpoint:
    """With failures as OpenAI's API tells them."""

    @wraps(endpoint)
    async def answer(*args: Any, **kwargs: Any) -> Response:
        try:
            return await endpoint(*args, **kwargs)
        except Failed as failed:
            return _problem_response(failed.problem)
        except ClientDisconnect:
            return Response(status_code=_GONE)
        except Exception as error:
            return _problem_response(problem_of(status_of(error), chat="chat" in endpoint.__name__))

    return answer


async def _of_framework(request: Request, error: Exception) -> Response:
    """Paths and methods that there are not."""
    status = error.status_code if isinstance(error, HTTPException) else 422
    message = {
        404: f"there is no {request.method} {shown(request.url.path)}",
        405: f"{request.method} is not allowed for {shown(request.url.path)}",
    }.get(status, str(error))
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return _problem_response(Problem(status, message, code="unknown_url" if status == 404 else None, headers=headers))


def _problem_response(problem: Problem) -> Response:
    headers = {"content-type": "application/json", **problem.headers}
    return Response(problem.body(), problem.status, headers)


def _json_response(value: dict[str, Any], status: int = 200) -> Response:
    return JSONResponse(value, status)


def _request_id(request: Request) -> str:
    """What the client calls its request; empty where that can't be the name of a job."""
    given = request.headers.get("x-request-id", "")
    if len(given) > MAX_REQUEST_ID:
        message = f"X-Request-Id has {len(given)} characters: must have at most {MAX_REQUEST_ID}"
        raise Failed(Problem(400, message, param="X-Request-Id"))
    return given if REQUEST_ID.fullmatch(given) else ""


def _metadata(request: Request) -> Metadata:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw]
