"""The HTTP API of the frontend: OpenAI's paths, `/health`, `/fleet` with the counters of each process, and metrics.

The same paths exist below `/processes/NAME`. They are for a router that chooses the prefill and the decode process
itself, as vLLM's router does. Such a router asks the prefill process first, and passes the `kv_transfer_params` of its
answer to the decode process. Our parameters name the prefill process, and the processes that may already have pages of
the prompt (`kv_sources`, which any request may name). When the router gets this answer, the prefill process has
computed nothing yet. The decode process then asks it to compute the prompt, and reads the first pages while the last
ones are computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from scheduler_adapters.errors import RefusedError, ServiceError
from scheduler_adapters.front.errors import OpenAIError
from scheduler_adapters.front.frontend import Frontend
from scheduler_adapters.front.openai import (
    Answer,
    ClientRequest,
    Json,
    RequestKind,
    ServedModel,
    read_request,
    room_for,
)
from scheduler_adapters.front.prometheus import FrontCollector
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.prometheus import registry_of
from transfer.wire.allowed_peers import host_of

if TYPE_CHECKING:
    from starlette.requests import Request

_MAX_BODY = 32 << 20  # bytes
_GONE = 499  # status for a client that has disconnected, as in nginx
_LONGEST_TRACEPARENT = 256
_PREFILL, _SOURCES = "prefill_process", "kv_sources"  # in `kv_transfer_params`
_LONGEST_NAME = 256
_LONGEST_PATH = 200
_LONGEST_DIRECTORY = 4000


class _Weights(msgspec.Struct):
    """The body of a roll-out: the directory, also relative to the folder of checkpoints."""

    model: Annotated[str, Meta(min_length=1, max_length=_LONGEST_DIRECTORY)]


def make_app(frontend: Frontend, served: ServedModel, checkpoints: Path | None = None) -> Starlette:
    """Returns the application that serves OpenAI's API from a frontend.

    Clients may give the fleet the weights of a directory below `checkpoints`; with None, they may not.
    """

    async def models(_: Request) -> Response:
        return _json({"object": "list", "data": [{"id": served.name, "object": "model", "owned_by": "pagewire"}]})

    def answering(kind: RequestKind) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            try:
                return await _answered(frontend, served, kind, request)
            except (OpenAIError, ServiceError) as error:
                told = _told(error)
                return _json(told.body(), told.status)
            except ClientDisconnect:
                frontend.count_unsent()
                return Response(status_code=_GONE)

        return respond

    async def health(request: Request) -> Response:
        try:
            return _json({"role": _process(frontend, request).role})
        except OpenAIError as error:
            return _json(error.body(), error.status)

    routes = [*_observed(frontend), *_rolling(frontend, checkpoints), Route("/processes/{name}/health", health)]
    for at in ("", "/processes/{name}"):
        routes += [
            Route(f"{at}/v1/models", models),
            Route(f"{at}/v1/completions", answering("completion"), methods=["POST"]),
            Route(f"{at}/v1/chat/completions", answering("chat"), methods=["POST"]),
        ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _of_http, Exception: _of_a_fault})


async def _of_http(request: Request, error: Any) -> Response:
    """Answers a request for a path or a method that does not exist: `error` is an `HTTPException`."""
    headers: dict[str, str] = error.headers or {}
    allowed = f"; allowed: {headers['Allow']}" if "Allow" in headers else ""
    reason = f"{error.detail}: {request.method} {request.url.path[:_LONGEST_PATH]}{allowed}"
    answer = _json(OpenAIError(reason, status=error.status_code).body(), error.status_code)
    answer.headers.update(headers)
    return answer


async def _of_a_fault(_: Request, error: Exception) -> Response:
    """Answers a request that a fault of ours has ended. The server logs the fault."""
    told = OpenAIError(f"the service failed: {type(error).__name__}", status=500)
    return _json(told.body(), told.status)


async def _answered(frontend: Frontend, served: ServedModel, kind: RequestKind, request: Request) -> Response:
    """Gets the answer from the process that the path names, or else from a process that the frontend chooses."""
    data = await _body(request)
    asked = await asyncio.to_thread(read_request, kind, data, served)  # tokenizing a long text would block the loop
    submit = _submit(asked, room_for(asked, frontend.capacity), request.headers.get("traceparent", ""))
    answer, name = Answer(asked, served.tokenizer), ""
    if "name" in request.path_params:
        process = _process(frontend, request)
        if process.role == "prefill":
            return _json(_prefilled_later(asked, process.name, answer))
        name = process.name
    news = frontend.generate(submit, name)
    if asked.stream:
        parts = _parts(news, answer, include_usage=asked.include_usage)
        return StreamingResponse(parts, media_type="text/event-stream")
    whole = await _unless_gone(request, _whole(news, answer))
    return Response(status_code=_GONE) if whole is None else _json(whole)


def _rolling(frontend: Frontend, checkpoints: Path | None) -> list[Route]:
    """Returns the route that changes the weights of the fleet, if clients may change them."""

    async def weights(request: Request) -> Response:
        try:
            return _json(await _rolled_out(frontend, root, request))
        except (OpenAIError, ServiceError) as error:
            told = _told(error)
            return _json(told.body(), told.status)

    root = (checkpoints or Path()).absolute()
    return [] if checkpoints is None else [Route("/weights", weights, methods=["POST"])]


async def _rolled_out(frontend: Frontend, checkpoints: Path, request: Request) -> Json:
    """Gives the fleet the weights of the directory that the body names. Goes on if the client leaves."""
    try:
        body = msgspec.json.decode(await _body(request), type=_Weights)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise OpenAIError(f"the body is not valid: {error}", param="model") from error
    model = checkpoints / body.model
    if ".." in model.parts or checkpoints not in model.parents:
        raise OpenAIError(f"model is {body.model!r}: a directory below {checkpoints} is needed", param="model")
    running = asyncio.ensure_future(frontend.rollout.to(str(model)))
    try:
        name = await asyncio.shield(running)
    except ServiceError as error:
        refused = isinstance(error, RefusedError)  # then nothing was tried, and another call may be under way
        told = str(error) if refused else f"{error}; every process keeps its weights"
        raise OpenAIError(told, status=409 if refused else 400, param="model") from error
    processes = {one.ready.name: one.ready.weights for one in frontend.members.values()}
    return {"object": "weights", "model": str(model), "weights": name, "processes": processes}


def _process(frontend: Frontend, request: Request) -> msg.Ready:
    """Returns the process that the path names. Raises `OpenAIError` if that process is absent or draining."""
    name = request.path_params["name"]
    member = frontend.members.get(name)
    if member is None or member.ready.draining:
        what = "is unknown" if member is None else "is draining"
        raise OpenAIError(
            f"the process {name[:200]!r} {what}; the processes are: {', '.join(sorted(frontend.members))}", status=503
        )
    return member.ready


def _prefilled_later(asked: ClientRequest, name: str, answer: Answer) -> Json:
    """Returns the answer for a router that has chosen a prefill process.

    The prefill process computes the prompt later, when the decode process asks it.
    """
    if not asked.transfer.get("do_remote_decode"):
        reason = f"{name!r} is a prefill process: it computes prompts for decode processes (do_remote_decode)"
        raise OpenAIError(reason, param="kv_transfer_params")
    answer.add((), "length", 0)
    whole = answer.whole()
    # The number of cached tokens is not known yet, and the router would pass the present number to its client.
    del whole["usage"]["prompt_tokens_details"]
    named = {_SOURCES: asked.transfer[_SOURCES]} if _SOURCES in asked.transfer else {}
    return whole | {"kv_transfer_params": {"do_remote_prefill": True, _PREFILL: name, **named}}


def _observed(frontend: Frontend) -> list[Route]:
    """Returns the routes for operators."""
    registry = registry_of(FrontCollector(frontend))

    async def health(_: Request) -> Response:
        roles: Json = {"prefill": 0, "decode": 0}
        for member in frontend.members.values():
            roles[member.ready.role] += not member.ready.draining
        return _json(roles, 200 if all(roles.values()) else 503)

    async def fleet(_: Request) -> Response:
        stats, members = await frontend.stats(), frontend.members
        told = {name: _where(one.ready) for name, one in members.items()}
        return _json({name: {**msgspec.structs.asdict(one), **told.get(name, {})} for name, one in stats.items()})

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def targets(request: Request) -> Response:
        offered = filter(None, (member.ready.metrics for member in frontend.members.values()))
        return _json([{"targets": [request.url.netloc, *offered]}])

    return [Route("/health", health), Route("/fleet", fleet), Route("/metrics", metrics), Route("/targets", targets)]


def _where(ready: msg.Ready) -> Json:
    """Returns the endpoints of a process's KV events, its weights, and its `kv_source`, which a request may name."""
    source = {"address": ready.pulse, "engines": ready.engines}
    events = {"kv_events": ready.kv_events, "kv_replay": ready.kv_replay}
    return {**events, "kv_source": source, "weights": ready.weights}


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _told(error: OpenAIError | ServiceError) -> OpenAIError:
    """Converts an error from the service to an HTTP error in OpenAI's form."""
    if isinstance(error, OpenAIError):
        return error
    return OpenAIError(str(error), status=503 if isinstance(error, RefusedError) else 500)


async def _body(request: Request) -> bytes:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > _MAX_BODY:
            raise OpenAIError(f"the body is longer than {_MAX_BODY:,} bytes", status=413)
    return bytes(data)


def _submit(asked: ClientRequest, most: int, traceparent: str) -> msg.Submit:
    """Returns the message that asks the service for tokens. An overlong trace header is ignored, as W3C specifies."""
    prefill: Any = asked.transfer.get(_PREFILL, "")
    if not isinstance(prefill, str) or len(prefill) > _LONGEST_NAME:
        raise OpenAIError(f"{_PREFILL} is {str(prefill)[:100]!r}: a process name is needed", param="kv_transfer_params")
    return msg.Submit(
        request_id=asked.request_id,
        prompt=asked.prompt,
        max_new_tokens=most,
        cache_salt=asked.cache_salt,
        ignore_eos=asked.ignore_eos,
        prefill=prefill,
        kv_sources=_sources(asked.transfer),
        traceparent=traceparent if len(traceparent) <= _LONGEST_TRACEPARENT else "",
    )


def _sources(transfer: Json) -> msg.KVSources:
    """Returns the processes that may have pages of the prompt. The decode process checks `allowed_peers` itself."""
    try:
        sources = msgspec.convert(transfer.get(_SOURCES, ()), msg.KVSources)
    except msgspec.ValidationError as error:
        raise OpenAIError(f"{_SOURCES}: {error}", param="kv_transfer_params") from error
    for source in sources:
        if not host_of(source.address):
            reason = f"{_SOURCES}: the address {source.address[:100]!r} is not tcp://host:port"
            raise OpenAIError(reason, param="kv_transfer_params")
    return sources


async def _whole(all_news: AsyncGenerator[msg.Tokens], answer: Answer) -> Json:
    async with aclosing(all_news) as news:
        async for one in news:
            answer.add(one.tokens, one.finished, one.cached_tokens, one.weights)
    return answer.whole()


async def _parts(all_news: AsyncGenerator[msg.Tokens], answer: Answer, *, include_usage: bool) -> AsyncGenerator[bytes]:
    """Yields the events of a stream. If a client stops reading, the generator is closed and the request ends."""
    try:
        async with aclosing(all_news) as news:
            async for one in news:
                yield _event(answer.add(one.tokens, one.finished, one.cached_tokens, one.weights))
        if include_usage:
            yield _event(answer.usage_part())
    except ServiceError as error:
        yield _event(_told(error).body())
    yield b"data: [DONE]\n\n"


def _event(content: Json) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def _unless_gone(request: Request, work: Awaitable[Json]) -> Json | None:
    """Returns the result of `work`. If the client hangs up first, `work` is cancelled and the result is None."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.wait({working, gone})


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
