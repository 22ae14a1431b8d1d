"""A minimal proxy for disaggregated prefill and decode: `python -m tests.vllm_serve.proxy PORT PREFILL DECODE`.

It sends each request to prefill with `max_tokens` 1. Then it sends the request to decode, with the params of prefill's
answer. It keeps nothing: a client that gives the params of its last answer lets prefill find decode's KV. If the client
disconnects, both requests are cancelled.
"""

from __future__ import annotations

import sys
import uuid
from typing import Any

import aiohttp
from aiohttp import web

FOR_A_READER: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}


def first_request(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the request to prefill."""
    kept = {key: value for key, value in body.items() if key not in {"stream_options", "min_tokens"}}
    return kept | {"kv_transfer_params": for_a_reader(body.get("kv_transfer_params")), "max_tokens": 1, "stream": False}


def for_a_reader(params: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the params of a request to prefill: those of the last answer, and what makes prefill keep its blocks."""
    return {**(params or {}), **FOR_A_READER}


def make_app(prefill: str, decode: str) -> web.Application:
    async def session(app: web.Application) -> Any:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector) as found:
            app["session"] = found
            yield

    async def handle(request: web.Request) -> web.StreamResponse:
        body, asked = await request.json(), request.app["session"]
        headers = {"X-Request-Id": request.headers.get("X-Request-Id", str(uuid.uuid4()))}
        async with asked.post(prefill + request.path, json=first_request(body), headers=headers) as answer:
            if answer.status != web.HTTPOk.status_code:
                return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")
            params = (await answer.json()).get("kv_transfer_params")
        async with asked.post(
            decode + request.path, json=body | {"kv_transfer_params": params}, headers=headers
        ) as answer:
            stream = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
            await stream.prepare(request)
            async for chunk in answer.content.iter_any():
                await stream.write(chunk)
            await stream.write_eof()
            return stream

    app = web.Application(client_max_size=1 << 28, handler_args={"handler_cancellation": True})
    app.cleanup_ctx.append(session)
    app.router.add_post("/v1/completions", handle)
    app.router.add_post("/v1/chat/completions", handle)
    return app


if __name__ == "__main__":
    web.run_app(make_app(sys.argv[2], sys.argv[3]), host="127.0.0.1", port=int(sys.argv[1]), print=None)
