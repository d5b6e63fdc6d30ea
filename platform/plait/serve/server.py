"""An endpoint with OpenAI's interface: each adapter is a model.

A seam: only `plait serve` needs the server's libraries.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import h11
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from plait.core.errors import PlaitError
from plait.data.tokenising import messages_text
from plait.models.base import BaseModel
from plait.serve import metrics, requests
from plait.serve.bodies import MOST_ANSWERS, AdapterBody, Answer, ChatBody, TextBody
from plait.serve.driver import BusyError, Driver
from plait.serve.folders import FolderAdapters, NoAdapterError
from plait.serve.requests import Completion, Update
from plait.utils.paths import user_path
from plait.utils.spelling import did_you_mean

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
JSON = "application/json"
STOPPING_SECONDS = 30
BODY_BYTES = 1 << 20  # most of a request
LOG = logging.getLogger("uvicorn.error")
FAILED = "The server failed; its log says why."
HEALTH = "/health"
SHOWN = "/v1/models, /v1/completions and /v1/chat/completions"
Made = TypeVar("Made")
Updates = AsyncGenerator[tuple[int, Update]]  # with the places of their requests
COMPARED = 100_000  # letters of a name times those of all models: no stream moves while they are compared
WORDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "overloaded_error",
    500: "server_error",
}


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a server.

    Attributes:
        named: the adapter of each fixed name; None: the base model.
        adapters: those that come and go; each is a model under its own name.
        root: the folder from which clients may add adapters; None: they may not.
    """

    named: Mapping[str, str | None]
    adapters: FolderAdapters
    root: Path | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All models."""
        return (*self.named, *self.adapters.names)

    def adapter(self, model: str) -> str | None:
        """The adapter of a model; HTTPException if there is no such model."""
        found = self.named.get(model, model)
        if found is not None and found not in self.adapters:
            shown, names = model[:100], self.names
            few = len(shown) * sum(map(len, names)) <= COMPARED
            meant = did_you_mean(shown, names) if few else ""
            raise HTTPException(404, f"There is no model {shown!r}; /v1/models lists them. {meant}".rstrip())
        return found

    def add(self, name: str, path: str) -> None:
        """Add the adapter of a folder below the root, to which ``path`` is relative unless it is absolute."""
        if self.root is None:
            raise HTTPException(403, "This server takes no adapters: start it with --adapters FOLDER.")
        root = self.root.resolve()
        folder = user_path(root / path).resolve()
        if root not in folder.parents:
            raise HTTPException(403, f"An adapter's folder lies below {self.root}.")
        if name in self.named:
            raise HTTPException(422, f"{name!r} is a fixed name.")
        self.adapters.add(name, folder)

    def remove(self, name: str) -> None:
        """Remove an adapter; requests that have it end as they would."""
        if self.root is None:
            raise HTTPException(403, "This server's adapters are fixed: start it with --adapters FOLDER.")
        self.adapters.remove(name)


class Endpoint:
    """Answers requests with a driver's engine, each answer of at most ``new_tokens`` tokens."""

    def __init__(self, driver: Driver, base: BaseModel, models: Models, new_tokens: int) -> None:
        self._driver = driver
        self._base = base
        self._models = models
        self._new_tokens = new_tokens
        self._started = int(time.time())

    async def models(self) -> Any:
        """All models, in OpenAI's form."""
        return {"object": "list", "data": [self._shown(name) for name in self._models.names]}

    async def model(self, name: str) -> Any:
        """One model."""
        self._models.adapter(name)
        return self._shown(name)

    def _shown(self, name: str) -> Any:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "plait"}

    async def add_adapter(self, body: AdapterBody) -> Response:
        """Add an adapter, as vLLM's endpoint of this name does."""
        if body.lora_path is None:
            raise HTTPException(422, "lora_path: it is the adapter's folder.")
        await run_in_threadpool(self._models.add, body.lora_name, body.lora_path)
        return Response(f"{body.lora_name} was added.")

    async def remove_adapter(self, body: AdapterBody) -> Response:
        """Remove an adapter."""
        self._models.remove(body.lora_name)
        return Response(f"{body.lora_name} was removed.")

    async def health(self) -> Response:
        """Whether requests are answered; supervisors ask for it without a key."""
        ends = self._driver.ends
        return JSONResponse({"status": ends or "ok"}, status_code=503 if ends else 200)

    async def metrics(self) -> Response:
        """Prometheus's page."""
        number = len(self._models.adapters.names)
        return Response(
            metrics.page(self._driver.counts, self._driver.engine, number), media_type=metrics.TYPE
        )

    async def text(self, body: TextBody, request: Request) -> Response:
        """Continue a text."""
        self._models.adapter(body.model)
        if (number := len(body.prompts) * body.n) > MOST_ANSWERS:
            raise HTTPException(422, f"{number} answers: one request may ask for at most {MOST_ANSWERS}.")
        prompts = await run_in_threadpool(lambda: list(map(self._prompt, body.prompts)))  # it takes a while
        return await self._answer(body, prompts, request, chat=False)

    def _prompt(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._tokens(prompt)
        if not all(0 <= token < self._base.vocabulary for token in prompt):
            raise HTTPException(422, f"prompt: its token ids are from 0 to {self._base.vocabulary - 1}.")
        return tuple(prompt)

    def _tokens(self, text: str, **options: bool) -> tuple[int, ...]:
        return tuple(self._base.tokeniser(text, **options)["input_ids"])

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answer a chat."""
        self._models.adapter(body.model)
        if not self._base.tokeniser.chat_template:
            raise HTTPException(422, "The model's tokeniser has no chat template: use /v1/completions.")
        tokens = await run_in_threadpool(self._chat_tokens, body)
        return await self._answer(body, [tokens], request, chat=True)

    def _chat_tokens(self, body: ChatBody) -> tuple[int, ...]:
        text = messages_text(self._base.tokeniser, [message.plain() for message in body.messages])
        return self._tokens(text, add_special_tokens=False)

    async def _answer(
        self, body: TextBody | ChatBody, prompts: Sequence[tuple[int, ...]], request: Request, *, chat: bool
    ) -> Response:
        adapter = self._models.adapter(body.model)
        samplings = body.samplings(self._new_tokens)
        asked = [requests.Request(each, adapter, sampling) for each in prompts for sampling in samplings]
        updates = _finite(self._driver.stream(*asked))
        counted = body.stream_options is not None and body.stream_options.include_usage is True
        answer = Answer(body.model, sum(map(len, prompts)), self._word, chat=chat, counted=counted)
        if body.stream:
            first = await _unless_left(request, anext(updates))  # an error still has a status of its own
            return StreamingResponse(
                _events(answer, first, updates),
                media_type="text/event-stream",
                background=BackgroundTask(updates.aclose),  # of a client that has left before the first piece
            )
        return JSONResponse(answer.whole(await _unless_left(request, _ended(updates))))

    def _word(self, token: int) -> str:
        return str(self._base.tokeniser.decode([token]))


async def _unless_left(request: Request, work: Awaitable[Made]) -> Made:
    """What comes of some work for a client; once the client has left, the work is cancelled."""
    made = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((made, left), return_when=asyncio.FIRST_COMPLETED)
        if made.done():
            return made.result()
        raise HTTPException(499, "The client has left.")
    finally:
        for each in (made, left):
            each.cancel()
        await asyncio.gather(made, left, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _ended(updates: Updates) -> list[Completion]:
    """The completions of all requests, in their order."""
    async with aclosing(updates):
        found = {place: update.ended async for place, update in updates if update.ended is not None}
    return [found[place] for place in sorted(found)]


async def _finite(updates: Updates) -> Updates:
    """The same updates; HTTPException at an end for logits that are not finite."""
    async with aclosing(updates):
        async for place, update in updates:
            if update.ended is not None and update.ended.reason == "not finite":
                raise HTTPException(500, "The adapter's logits are not finite.")
            yield place, update


async def _events(answer: Answer, first: tuple[int, Update], updates: Updates) -> AsyncIterator[str]:
    """A stream's server-sent events, the last of which may be an error. When the client leaves, the iterator
    is closed and pages are freed."""
    try:
        async with aclosing(updates):
            yield _data(answer.piece(*first))
            async for place, update in updates:
                yield _data(answer.piece(place, update))
        if answer.counted:
            yield _data(answer.usage())
        yield "data: [DONE]\n\n"
    except HTTPException as error:
        yield _data(_error_body(error.status_code, str(error.detail)))
    except BusyError as error:
        yield _data(_error_body(503, str(error)))
    except Exception:
        LOG.exception("An answer failed.")
        yield _data(_error_body(500, FAILED))


def _data(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


class Guard:
    """Refuses requests without the key, and bodies that are too long, before they are read."""

    def __init__(self, app: ASGIApp, key: str | None, body_bytes: int) -> None:
        self._app = app
        self._key = key
        self._body_bytes = body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        guarded = scope["type"] == "http" and scope["path"] != HEALTH
        refusal = self._refusal(scope["method"], Headers(scope=scope)) if guarded else None
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, method: str, headers: Headers) -> Response | None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given if scheme.lower() == "bearer" else ""
        if self._key is not None and not hmac.compare_digest(given.encode(), self._key.encode()):
            return _error(401, "The API key is missing or wrong.")
        length = headers.get("content-length", "")
        if method == "POST" and not length.isdecimal():
            return _error(411, "A body needs its Content-Length.")
        if length.isdecimal() and (len(length) > 15 or int(length) > self._body_bytes):
            return _error(413, f"A body has at most {self._body_bytes} bytes.")
        if method == "POST" and headers.get("content-type", "").partition(";")[0] != JSON:
            return _error(415, f"A body is JSON, with the header Content-Type: {JSON}.")
        return None


def make_app(
    endpoint: Endpoint, driver: Driver, *, key: str | None, local: bool, body_bytes: int = BODY_BYTES
) -> FastAPI:
    """The application.

    Args:
        key: what a client must send as its API key; None: nothing.
        local: whether it is served on this machine alone; then other host names are refused, so that no
            web page reaches it through a name of its own.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        driver.stop()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_api_route("/v1/models", endpoint.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", endpoint.model, methods=["GET"])
    app.add_api_route("/v1/completions", endpoint.text, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", endpoint.chat, methods=["POST"], response_model=None)

    app.add_api_route("/v1/load_lora_adapter", endpoint.add_adapter, methods=["POST"], response_model=None)
    app.add_api_route(
        "/v1/unload_lora_adapter", endpoint.remove_adapter, methods=["POST"], response_model=None
    )
    app.add_api_route(HEALTH, endpoint.health, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", endpoint.metrics, methods=["GET"], response_model=None)
    app.add_middleware(Guard, key=key, body_bytes=body_bytes)
    if local:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK))
    _add_errors(app)
    return app


def _add_errors(app: FastAPI) -> None:
    """Errors in OpenAI's form."""

    async def refused(request: Request, error: Any) -> Response:
        path, said, headers = request.url.path[:100], str(error.detail), error.headers or {}
        if said == HTTPStatus.NOT_FOUND.phrase:  # the framework's; ours say more
            said = f"There is nothing at {path}. This server answers {SHOWN}."
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            said = f"{request.method} {path}: It takes {headers.get('Allow', 'another method')}."
        return _error(error.status_code, said, headers)

    async def wrong(_: Request, error: Any) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            place = f"{first['ctx']['error']}, at character {first['loc'][-1] + 1}"
            return _error(422, f"The body is no JSON: {place}.")
        own = "Value error, "  # pydantic's, before what a rule of ours says
        places = [
            (".".join(map(str, each["loc"][1:])), each["msg"].removeprefix(own)) for each in error.errors()
        ]
        return _error(422, "; ".join(f"{place or 'body'}: {said}" for place, said in places)[:1000])

    async def unusable(_: Request, error: Any) -> Response:
        return _error(404 if isinstance(error, NoAdapterError) else 422, str(error)[:1000])

    async def busy(_: Request, error: Any) -> Response:
        return _error(503, str(error), {"Retry-After": str(math.ceil(error.seconds))})

    async def failed(_: Request, __: Any) -> Response:
        return _error(500, FAILED)

    app.add_exception_handler(Exception, failed)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RequestValidationError, wrong)
    app.add_exception_handler(PlaitError, unusable)
    app.add_exception_handler(BusyError, busy)


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(_error_body(status, message), status_code=status, headers=dict(headers or {}))


def _error_body(status: int, message: str) -> Any:
    kind = WORDS.get(status, "invalid_request_error")
    shown = message.encode(errors="backslashreplace").decode()  # it may quote half of a surrogate pair
    return {"error": {"message": shown, "type": kind, "param": None, "code": status}}


class Connection(H11Protocol):
    """A client's connection. uvicorn's own fails, with a traceback, if a body turns out to be malformed while
    its request is answered, or later."""

    def send_400_response(self, msg: str) -> None:
        """End the connection, with this answer if there is none yet."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        if self.cycle is not None:
            self.cycle.disconnected = True  # what else it answers is dropped
            self.cycle.message_event.set()
        self.transport.close()


def run(app: FastAPI, address: socket.socket, driver: Driver) -> None:
    """Serve at a bound address until a signal; requests that run then have some seconds to end.

    Raises:
        PlaitError: the engine's thread has ended, after which nothing can be answered.
    """
    config = uvicorn.Config(
        app, http=Connection, log_level="warning", timeout_graceful_shutdown=STOPPING_SECONDS
    )
    server = uvicorn.Server(config)

    def end() -> None:
        LOG.critical("The engine's thread has ended.", exc_info=driver.error)
        server.should_exit = True

    driver.watch(end)
    with suppress(KeyboardInterrupt):  # raised once more when all has ended
        server.run(sockets=[address])
    if driver.error is not None:
        raise PlaitError(
            f"the engine: {type(driver.error).__name__}: {driver.error}",
            "Without it no request is answered, so the server has ended.",
            "The traceback is above. Start it again.",
        ) from driver.error
