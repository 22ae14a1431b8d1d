"""`pagewire serve` in real processes: the front and its processes, each of which has a log, and a client."""

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import openai

from scheduler_adapters.hf.tiny import ByteTokenizer
from tests.forked import ForkedProgram

WITHIN_S = 90.0
COMMON = ("--page-size", "16", "--cache-mb", "8", "--max-tokens", "2048", "--token-budget", "128", "--lease-s", "3")


class Served:
    """A fleet whose processes were started separately or by one command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.addresses = folder / "addresses.json"
        self.processes: dict[str, ForkedProgram] = {}
        self._logs: dict[str, IO[bytes]] = {}

    def command(self, *arguments: str) -> list[str]:
        """Returns the command that starts a process."""
        return [sys.executable, "-m", "pagewire", "serve", *arguments]

    def start(self, name: str, *arguments: str) -> None:
        command = self.command(*arguments)
        self._logs[name] = (self.folder / f"{name}.log").open("ab")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.processes[name] = ForkedProgram(command, self._logs[name], environment)

    def join(self, role: str, name: str, *more: str) -> None:
        self.start(name, role, "--name", name, "--address-file", str(self.addresses), *COMMON, *more)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    @property
    def url(self) -> str:
        return json.loads(self.addresses.read_bytes())["http"]

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:  # noqa: S310
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return json.loads(error.read())

    def until(self, condition: Callable[[], object], what: str, within_s: float = WITHIN_S) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            logs = {name: self.log(name)[-600:] for name in self.processes}
            assert time.monotonic() < deadline, f"waited {within_s} s for {what}: {logs}"
            time.sleep(0.02)

    def until_there(self, prefills: int, decodes: int) -> None:
        self.until(self.addresses.exists, "the front")
        wanted = {"prefill": prefills, "decode": decodes}
        self.until(lambda: self.get("/health") == wanted, f"{wanted}")

    def ended(self, name: str) -> int | None:
        """Waits until a process ends by itself. Returns its exit status."""
        process = self.processes[name]
        self.until(lambda: process.poll() is not None, f"the end of {name}")
        return process.poll()

    def signal(self, name: str, number: signal.Signals) -> None:
        pid = self.processes[name].pid
        assert pid is not None
        os.kill(pid, number)

    def until_nothing_is_held(self) -> dict[str, Any]:
        self.until(
            lambda: not any(one["pages_held"] or one["open_requests"] for one in self.get("/fleet").values()),
            "pages to come back",
        )
        return self.get("/fleet")

    def close(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stdin.close()
            self._logs[name].close()


def tokens_of(answer: Any) -> list[int]:
    """Returns the tokens of a completion whose request had `return_token_ids` set."""
    return answer.choices[0].token_ids


def complete(client: openai.OpenAI, prompt: str | Sequence[int], new: int = 24, **more: Any) -> Any:
    text = prompt if isinstance(prompt, str) else list(prompt)
    extra = {"return_token_ids": True}
    return client.completions.create(model="pagewire", prompt=text, max_tokens=new, extra_body=extra, **more)


def streamed(
    client: openai.OpenAI,
    prompt: str,
    new: int,
    on_part: Callable[[int], None] = lambda _: None,
    on_accepted: Callable[[], None] = lambda: None,
) -> Any:
    """Returns the tokens and the text of a stream, and the last message of the stream."""
    tokens: list[int] = []
    text, last = "", None
    parts = complete(client, prompt, new, stream=True, stream_options={"include_usage": True})
    on_accepted()  # The HTTP status has arrived. No token has arrived yet.
    for number, part in enumerate(parts):
        if part.choices:
            tokens += part.choices[0].token_ids
            text += part.choices[0].text
        on_part(number)
        last = part
    return tokens, text, last


def encoded(text: str) -> list[int]:
    return ByteTokenizer().encode(text)
