"""The HTTP of the front: OpenAI's paths, `/health`, and `/fleet` with the counters of each process."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from scheduler_adapters.errors import RefusedError, ServiceError
from scheduler_adapters.front.openai import Answer, Asked, Json, Kind, OpenAIError, ServedModel, read_request, room_for

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from starlette.requests import Request

    from scheduler_adapters.front.frontend import Frontend

_MAX_BODY = 32 << 20  # bytes
_GONE = 499  # status of an answer that nobody reads, as nginx has it


def make_app(frontend: Frontend, served: ServedModel) -> Starlette:
    """The application: requests to a frontend, in OpenAI's form."""

    async def health(_: Request) -> Response:
        roles: Json = {"prefill": 0, "decode": 0}
        for member in frontend.members.values():
            roles[member.ready.role] += not member.ready.draining
        return _json(roles, 200 if all(roles.values()) else 503)

    async def fleet(_: Request) -> Response:
        stats = await frontend.stats()
        return _json({name: msgspec.structs.asdict(one) for name, one in stats.items()})

    async def models(_: Request) -> Response:
        return _json({"object": "list", "data": [{"id": served.name, "object": "model", "owned_by": "pagewire"}]})

    def answering(kind: Kind) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                data = await _body(request)
                asked = await asyncio.to_thread(read_request, kind, data, served)  # long texts take long to tokenize
                most = room_for(asked, frontend.capacity)
                if asked.stream:
                    return StreamingResponse(_parts(frontend, served, asked, most), media_type="text/event-stream")
                whole = await _unless_gone(request, _whole(frontend, served, asked, most))
            except (OpenAIError, ServiceError) as error:
                told = _told(error)
                return _json(told.body(), told.status)
            return Response(status_code=_GONE) if whole is None else _json(whole)

        return answer

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/fleet", fleet),
            Route("/v1/models", models),
            Route("/v1/completions", answering("completion"), methods=["POST"]),
            Route("/v1/chat/completions", answering("chat"), methods=["POST"]),
        ]
    )


def _json(content: Json, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _told(error: OpenAIError | ServiceError) -> OpenAIError:
    """What the client is told of an error."""
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


async def _whole(frontend: Frontend, served: ServedModel, asked: Asked, most: int) -> Json:
    answer = Answer(asked, served.tokenizer)
    async with aclosing(frontend.generate(asked.request_id, asked.prompt, most, asked.cache_salt)) as news:
        async for one in news:
            answer.add(one.tokens, one.finished, one.cached_tokens)
    return answer.whole()


async def _parts(frontend: Frontend, served: ServedModel, asked: Asked, most: int) -> AsyncGenerator[bytes]:
    """The events of a stream. Whoever stops reading them closes this, and with it the request."""
    answer = Answer(asked, served.tokenizer)
    try:
        async with aclosing(frontend.generate(asked.request_id, asked.prompt, most, asked.cache_salt)) as news:
            async for one in news:
                yield _event(answer.add(one.tokens, one.finished, one.cached_tokens))
        if asked.include_usage:
            yield _event(answer.usage_part())
    except ServiceError as error:
        yield _event(_told(error).body())
    yield b"data: [DONE]\n\n"


def _event(content: Json) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def _unless_gone(request: Request, work: Awaitable[Json]) -> Json | None:
    """What the work gives; None, and the work is cancelled, where the client hangs up before."""
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
