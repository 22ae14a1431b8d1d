"""HTTP clients that disconnect. The real server runs over TCP."""

import asyncio
import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import zmq
from starlette.requests import Request
from starlette.testclient import TestClient

from scheduler_adapters.front import app as app_module
from scheduler_adapters.front import frontend as frontend_module
from scheduler_adapters.front.app import make_app
from scheduler_adapters.front.errors import OpenAIError
from scheduler_adapters.front.frontend import Frontend
from scheduler_adapters.front.openai import ServedModel
from scheduler_adapters.hf.tiny import VOCAB_SIZE, ByteTokenizer
from scheduler_adapters.service.sockets import bind_router

GONE = 251
STARTS = {
    "declared": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n",
    "chunked": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
}
PARTS = {"declared": b'{"model": "tiny", ', "chunked": b'8\r\n{"model"\r\n'}


async def exchange(port: int, *sent: bytes) -> bytes:
    """Sends these parts, and then closes the connection. Returns the answer that has arrived before the close."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in sent:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0)
    answer = await reader.read(1 << 16) if sent[-1].endswith(b"}") else b""
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.parametrize("kind", STARTS)
def test_clients_that_go_away_while_they_send_are_counted_in_one_line(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine may need more than ten seconds to send a message.
    monkeypatch.setattr(frontend_module, "_UNSENT_S", 1e6)

    async def run() -> tuple[int, bytes]:
        context: zmq.Context[Any] = zmq.Context()
        frontend = Frontend(bind_router(context, f"ipc://{tmp_path}/front"))
        app = make_app(frontend, ServedModel("tiny", ByteTokenizer(), VOCAB_SIZE))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", log_config=None))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            for _ in range(GONE):
                await exchange(port, STARTS[kind], PARTS[kind])
            for _ in range(3000):
                if frontend.counts.unsent == GONE:
                    break
                await asyncio.sleep(0.01)
            body = json.dumps({"model": "tiny", "prompt": [1, 2, 3]}).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            answer = await exchange(port, head.encode(), body)
            server.should_exit = True
            await serving
        context.destroy(linger=0)
        return frontend.counts.unsent, answer

    with caplog.at_level(logging.WARNING):
        unsent, answer = asyncio.run(run())
    assert unsent == GONE
    assert answer.startswith(b"HTTP/1.1 503"), (
        "the next client must get an answer, which says that no process has joined"
    )
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["a client closed its connection while it sent a request (1 so far)"]
    assert not any(record.exc_info for record in caplog.records)


PATHS = [
    ("GET", "/nothing", 404, ""),
    ("POST", "/v1", 404, ""),
    ("GET", "/v1/chat/completions/x", 404, ""),
    ("GET", "/" + "x" * 5000, 404, ""),
    ("GET", "/v1/completions", 405, "POST"),
    ("PUT", "/v1/chat/completions", 405, "POST"),
    ("DELETE", "/processes/p/v1/completions", 405, "POST"),
    *[("POST", path, 405, "GET, HEAD") for path in ("/v1/models", "/health", "/fleet", "/metrics", "/targets")],
    ("POST", "/processes/p/health", 405, "GET, HEAD"),
    ("GET", "/processes/p/health", 503, ""),
    ("POST", "/v1/chat/completions", 400, ""),
    ("POST", "/v1/completions", 500, ""),
]


class BrokenTokenizer(ByteTokenizer):
    def encode(self, text: str) -> list[int]:
        raise OSError(f"a fault that knows the prompt {text}")


def test_every_error_is_json_in_openais_form(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    served = ServedModel("tiny", BrokenTokenizer(), VOCAB_SIZE)
    client = TestClient(
        make_app(Frontend(bind_router(context, f"ipc://{tmp_path}/front")), served), raise_server_exceptions=False
    )
    for method, path, status, allowed in PATHS:
        answer = client.request(method, path, json={"model": "tiny", "prompt": "secret"})
        assert answer.status_code == status, path[:100]
        assert answer.headers["content-type"] == "application/json"
        error = answer.json()["error"]
        assert sorted(error) == ["code", "message", "param", "type"]
        assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
        assert len(error["message"]) < 300
        assert "secret" not in error["message"]
        assert sorted(answer.headers.get("allow", "").split(", ")) == sorted(allowed.split(", "))
        if status in {404, 405}:
            assert f"{method} {path[:100]}" in error["message"]
            assert answer.headers.get("allow", "") in error["message"]
    context.destroy(linger=0)


def test_a_refused_change_of_weights_does_not_say_that_nothing_changes(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    frontend = Frontend(bind_router(context, f"ipc://{tmp_path}/front"))
    client = TestClient(make_app(frontend, ServedModel("tiny", ByteTokenizer(), VOCAB_SIZE), tmp_path))
    for told in ("no process", f"the processes are getting the weights of '{tmp_path}/a' now"):
        answer = client.post("/weights", json={"model": "a"})
        assert answer.status_code == 409
        assert answer.json()["error"]["message"] == told
        frontend.rollout.is_running = True
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("parts", "taken"),
    [((100,), True), ((101,), False), ((60, 40), True), ((60, 41), False), ((1,) * 100, True), ((1,) * 1000, False)],
)
def test_a_body_is_bounded_whatever_parts_it_comes_in(
    parts: tuple[int, ...], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body is read only up to its limit."""
    monkeypatch.setattr(app_module, "_MAX_BODY", 100)
    came = 0

    async def receive() -> dict[str, Any]:
        nonlocal came
        came += 1
        return {"type": "http.request", "body": bytes(parts[came - 1]), "more_body": came < len(parts)}

    body = app_module._body(Request({"type": "http", "method": "POST", "headers": []}, receive))
    if taken:
        assert asyncio.run(body) == bytes(sum(parts))
        assert came == len(parts)
    else:
        with pytest.raises(OpenAIError, match="^the body is longer than 100 bytes$") as caught:
            asyncio.run(body)
        assert caught.value.status == 413
        assert sum(parts[:came]) == 101
