"""Sends requests to a server or a proxy, each over its own connection. Also has the prompts of all tests."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, NamedTuple

TOKENS = 12
"""The number of tokens that answer each prompt."""


def _prompts() -> list[list[int]]:
    """Returns prompts whose lengths are near the ends of blocks and chunks. Some prompts begin with the same tokens."""
    numbers = random.Random(7)
    shared = [numbers.randrange(256) for _ in range(300)]
    alone = [
        [numbers.randrange(256) for _ in range(size)] for size in (1, 5, 31, 32, 33, 64, 65, 100, 257, 512, 1000, 1500)
    ]
    return alone + [[*shared[:kept], *(numbers.randrange(256) for _ in range(9))] for kept in (48, 64, 128, 256, 300)]


PROMPTS = _prompts()


class Answer(NamedTuple):
    """An answer."""

    status: int
    body: dict[str, Any]

    @property
    def tokens(self) -> list[int]:
        """Returns the generated tokens. The result is empty if the request failed."""
        return self.body["choices"][0]["token_ids"] if self.status == 200 else []

    @property
    def params(self) -> Any:
        """Returns the `kv_transfer_params` for a reader."""
        return self.body.get("kv_transfer_params")


def request_body(prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    return {
        "model": "m", "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **more,
    }  # fmt: skip


def _open(url: str, body: dict[str, Any], timeout: float) -> Any:
    headers = {"Content-Type": "application/json", "Connection": "close"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)  # noqa: S310
    return urllib.request.urlopen(request, timeout=timeout)  # noqa: S310


def ask(url: str, prompt: Sequence[int], *, timeout: float = 120, **more: Any) -> Answer:
    """Requests the tokens after a prompt."""
    try:
        with closing(_open(url, request_body(prompt, **more), timeout)) as answer:
            return Answer(answer.status, json.load(answer))
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        try:
            return Answer(error.code, json.loads(text))
        except ValueError:
            return Answer(error.code, {"text": text})


def ask_all(url: str, prompts: Sequence[Sequence[int]], at_once: int = 16, **more: Any) -> list[Answer]:
    """Sends several requests, `at_once` at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: ask(url, prompt, **more), prompts))


def stream(url: str, prompt: Sequence[int], *, timeout: float = 120, **more: Any) -> Iterator[list[int]]:
    """Yields the tokens as they arrive. Closing the iterator closes the connection."""
    with closing(_open(url, request_body(prompt, stream=True, **more), timeout)) as answer:
        for line in answer:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                part = json.loads(line[6:])
                if "error" in part:
                    raise RuntimeError(part["error"]["message"])
                yield part["choices"][0].get("token_ids") or []


def hang_up(url: str, prompt: Sequence[int], after: float, **more: Any) -> None:
    """Sends a request, and closes the connection after this many seconds, whether it has been answered or not."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(request_body(prompt, **more)), headers)
    time.sleep(after)
    connection.close()
