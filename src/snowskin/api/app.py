"""The application: routes, and nothing that decides."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from snowskin import __version__
from snowskin.api.backend import Backend
from snowskin.api.config import ApiConfig
from snowskin.api.errors import ApiError, as_api_error, internal_error
from snowskin.api.formats import ChatFormat, CompletionFormat
from snowskin.api.intake import Intake
from snowskin.api.metrics import CONTENT_TYPE, ApiMetrics
from snowskin.api.prepare import Preparer, model_not_found
from snowskin.api.reply import Front, GenerationReply
from snowskin.api.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from snowskin.api.tokenizer import TextTokenizer
from snowskin.terms.errors import SnowskinError
from snowskin.terms.ids import RequestId

BODIES: tuple[type[BaseModel], ...] = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)

DESCRIPTION = """
Every answer of a generation has an `x-request-id` header; `/snowskin/explain/{request_id}` tells
why that request went where it went. `usage.prompt_tokens_details.cached_tokens` counts the prompt
tokens whose KV was reused.

Errors have OpenAI's body, `{"error": {"message", "type", "param", "code"}}`: 400 names the
parameter, 404 a model that is not served, 429 and 503 come with `Retry-After`. Where the server
has an API key, send it as `Authorization: Bearer KEY`; `/health` and these pages are open.
"""


def create_app(backend: Backend, tokenizer: TextTokenizer, config: ApiConfig) -> FastAPI:
    """The API in front of a backend. Each app has its own metrics and threads."""
    intake = Intake(config)
    front = Front(backend, tokenizer, config, intake, ApiMetrics(config.slo))
    preparer = Preparer(backend.info, tokenizer, config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        intake.close()

    app = FastAPI(
        title="Snowskin",
        version=__version__,
        summary="OpenAI-compatible API over a KVCache-centric disaggregated cluster",
        description=DESCRIPTION,
        redoc_url=None,
        lifespan=lifespan,
    )
    guard = [Depends(_guard(intake))]
    app.include_router(_generation_routes(front, preparer), dependencies=guard)
    app.include_router(_text_routes(front, preparer), dependencies=guard)
    app.include_router(_model_routes(backend), dependencies=guard)
    app.include_router(_operator_routes(front), dependencies=guard)
    app.include_router(_health_route(backend))
    app.add_exception_handler(SnowskinError, partial(_on_known_error, config))
    app.add_exception_handler(ClientDisconnect, _on_departure)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_own_mistake)
    app.openapi = partial(_openapi, app)  # type: ignore[method-assign] # FastAPI's documented way
    return app


def _generation_routes(front: Front, preparer: Preparer) -> APIRouter:
    router = APIRouter(tags=["generation"])

    @router.post("/v1/chat/completions", openapi_extra=_takes(ChatBody))
    async def chat_completions() -> Response:
        """Answer a chat, as one JSON object or as server-sent events."""
        return GenerationReply(front, preparer.chat, ChatFormat)

    @router.post("/v1/completions", openapi_extra=_takes(CompletionBody))
    async def completions() -> Response:
        """Continue a prompt, or several."""
        return GenerationReply(front, preparer.completion, CompletionFormat)

    return router


def _text_routes(front: Front, preparer: Preparer) -> APIRouter:
    router = APIRouter(tags=["text"])

    @router.post("/tokenize", openapi_extra=_takes(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """The tokens of a prompt, or of messages after the chat template."""
        with front.intake.visit():
            return _json(await front.intake.work(request, preparer.tokenize))

    @router.post("/detokenize", openapi_extra=_takes(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of tokens, special ones spelled out."""
        with front.intake.visit():
            return _json(await front.intake.work(request, preparer.detokenize))

    return router


def _model_routes(backend: Backend) -> APIRouter:
    router = APIRouter(tags=["models"])
    info = backend.info
    model = {
        "id": info.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "snowskin",
        "max_model_len": info.max_context_tokens,
    }

    @router.get("/v1/models")
    async def models() -> Response:
        """The served model, in a list."""
        return _json({"object": "list", "data": [model]})

    @router.get("/v1/models/{model_id:path}")
    async def one_model(model_id: str) -> Response:
        """The served model."""
        if model_id != info.model:
            raise model_not_found(model_id, info.model)
        return _json(model)

    return router


def _operator_routes(front: Front) -> APIRouter:
    router = APIRouter(tags=["operator"])
    backend = front.backend

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        text = await front.intake.run(partial(front.metrics.render, backend.status()))
        return Response(text, headers={"content-type": CONTENT_TYPE})

    @router.get("/snowskin/status")
    async def status() -> Response:
        """The whole cluster in one snapshot."""
        return _json(backend.status())

    @router.get("/snowskin/explain/{request_id}")
    async def explain(request_id: str) -> Response:
        """Why a request went where it went, and what it really cost."""
        explanation = backend.explain(RequestId(request_id))
        if explanation is None:
            raise ApiError(
                f"The request {request_id[:64]!r} is unknown, or so old that it was forgotten.",
                status=404,
                code="request_not_found",
                param="request_id",
            )
        return _json(explanation)

    @router.get("/snowskin/requests")
    async def requests(after: str = "0") -> Response:
        """The last requests, as a trace has them: arrival, lengths, names of blocks; no text.

        A page at a time: ask again with the last number as `after`, until a page is empty.
        """
        if not (after.isascii() and after.isdecimal() and len(after) < 19):
            raise ApiError(
                f"after must be a whole number from 0, got {after[:64]!r}.", param="after"
            )
        return _json(backend.served(int(after)))

    return router


def _health_route(backend: Backend) -> APIRouter:
    router = APIRouter(tags=["operator"])

    @router.get("/health")
    async def health() -> Response:
        """200 when requests are served, 503 while nodes are starting. Open to all."""
        ready = backend.status().ready
        return _json({"status": "ready" if ready else "starting"}, status=200 if ready else 503)

    return router


def _guard(intake: Intake) -> Callable[[Request], Any]:
    async def check_key(request: Request) -> None:
        intake.check_key(request)

    return check_key


def _json(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    content = msgspec.json.encode(value)
    return Response(content, status, headers=headers, media_type="application/json")


async def _on_known_error(config: ApiConfig, _: Request, error: Exception) -> Response:
    answer = as_api_error(error, unavailable_retry_s=config.unavailable_retry_s)
    if answer is None:
        raise error
    return _json(answer.body(), status=answer.status, headers=dict(answer.headers()))


async def _on_departure(_: Request, __: Exception) -> Response:
    """Nobody reads this answer."""
    return Response(status_code=400)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    answer = ApiError(
        f"{error.detail}: {request.method} {request.url.path}.", status=error.status_code, code=code
    )
    return _json(answer.body(), status=error.status_code, headers=dict(error.headers or {}))


async def _on_own_mistake(_: Request, __: Exception) -> Response:
    """The server raises the error again after the answer, and so logs it."""
    error = internal_error()
    return _json(error.body(), status=error.status)


def _takes(model: type[BaseModel]) -> dict[str, Any]:
    """The body of a route, for ``/docs``: the routes parse it themselves, off the event loop."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title,
            version=app.version,
            summary=app.summary,
            description=app.description,
            routes=app.routes,
        )
        _, models = models_json_schema(
            [(model, "validation") for model in BODIES],
            ref_template="#/components/schemas/{model}",
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(models["$defs"])
        app.openapi_schema = schema
    return app.openapi_schema
