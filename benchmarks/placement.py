"""How many prompt tokens does a fleet find cached, under each rule for assigning prompts to prefill processes?

`python -m benchmarks.placement` runs `pagewire serve` as five processes on this host: a front, two prefill and two
decode processes, with a small Llama. It serves the scaled-down conversation trace (`fleet_trace`) over HTTP, several
requests at a time. One run has a single prefill process with a cache as large as both. The other runs place prompts by
round robin, by each decode process's own guess, and by Dynamo's `SelectionService`, which follows our KV events. The
last run also uses Dynamo. In it one process on each side is killed and one is drained; each ended process is restarted
at once. Each output must equal that of the model's own greedy `generate`. At the end each process must drain, exit with
0 and report that it holds no page. The exit status is 0 only if all of this holds, and 2 if there is no trace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import httpx
import torch

from benchmarks.fleet_trace import PAGE, TraceError, TraceRequest, ideal_hit_rate, read_requests
from benchmarks.frame import Row, header, progress, table, write
from benchmarks.trace_replay import FOLDER, TRACES
from scheduler_adapters.hf.runner import is_rounding_tie, load_model, reference_tokens

CONCURRENCY = 16
CACHE_MB = 128.0  # cache of the prefill processes together: 4,096 pages. The first 600 requests fill about 15,000
_START_S = 300.0
_END_S = 120.0


class Setting(NamedTuple):
    """One run: its prefill processes, their share of `CACHE_MB`, its placement rule, and whether processes exit."""

    name: str
    prefills: int
    share: int
    placement: str
    goes: bool = False


SETTINGS = (
    Setting("one cache", 1, 2, "guess"),
    Setting("in turns", 2, 1, "in-turns"),
    Setting("own guess", 2, 1, "guess"),
    Setting("dynamo", 2, 1, "dynamo"),
    Setting("dynamo with kills and drains", 2, 1, "dynamo", goes=True),
)
DUE = (
    ("prefill-1", signal.SIGKILL),
    ("decode-1", signal.SIGKILL),
    ("prefill-2", signal.SIGTERM),
    ("decode-2", signal.SIGTERM),
)
"""After each further fifth of the requests, the next of these processes is killed or drained, by this signal."""


@dataclass(slots=True)
class Answered:
    """The result of a request."""

    request: TraceRequest
    tokens: list[int] = field(default_factory=list[int])
    cached: int = 0
    error: str = ""
    first_s: float = 0.0


class Served:
    """The processes of one run."""

    def __init__(self, folder: Path, setting: Setting, longest: int) -> None:
        self._folder, self._setting = folder, setting
        self._address = folder / "address.json"
        self._longest = longest
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._log: IO[bytes] = (folder / "log").open("ab")
        self.drained: dict[str, int] = {}
        self.start("front", "front", "--http-port", "0", "--placement", setting.placement)
        for number in range(setting.prefills):
            self.begin(f"prefill-{number + 1}")
        for number in range(2):
            self.begin(f"decode-{number + 1}")

    def begin(self, name: str) -> None:
        """Starts a prefill or decode process that joins the frontend."""
        role = name.partition("-")[0]
        sizes = ("--page-size", PAGE, "--max-tokens", self._longest, "--max-requests", CONCURRENCY)
        memory = CACHE_MB * self._setting.share if role == "prefill" else CACHE_MB / 2
        more = ("--cache-mb", memory, "--token-budget", 256, "--placement", self._setting.placement)
        self.start(name, role, "--name", name, *map(str, (*sizes, *more)))

    def start(self, name: str, *arguments: str) -> None:
        """Starts `pagewire serve` with these arguments."""
        command = (sys.executable, "-m", "pagewire", "serve", *arguments, "--address-file", self._address)
        self._processes[name] = subprocess.Popen(command, stdout=self._log, stderr=self._log)  # noqa: S603

    def end(self, name: str, how: signal.Signals) -> None:
        """Kills or drains a process. Keeps the exit status of a drained process."""
        self._processes[name].send_signal(how)
        status = self._processes[name].wait(_END_S)
        if how == signal.SIGTERM:
            self.drained[f"{name}#{len(self.drained)}"] = status

    async def ready(self) -> str:
        """Waits until all processes have joined. Returns the URL."""
        wanted = {"prefill": self._setting.prefills, "decode": 2}
        deadline = time.monotonic() + _START_S
        async with httpx.AsyncClient() as client:
            while time.monotonic() < deadline:
                if self._address.exists():
                    url = json.loads(self._address.read_bytes())["http"]
                    if (await client.get(f"{url}/health")).json() == wanted:
                        return url
                await asyncio.sleep(0.1)
        raise TimeoutError((self._folder / "log").read_text()[-2000:])

    def close(self) -> str:
        """Drain all processes: first decode, last the frontend. Returns the log."""
        for name in sorted(self._processes, key=lambda name: ("decode", "prefil", "front").index(name[:6])):
            self.end(name, signal.SIGTERM)
        self._log.close()
        return (self._folder / "log").read_text()

    def kill(self) -> None:
        """Kills the remaining processes."""
        for process in self._processes.values():
            process.kill()
            process.wait()


async def ask(client: httpx.AsyncClient, request: TraceRequest) -> Answered:
    """Sends one request, and reads its answer as a stream."""
    answered, begun = Answered(request), time.monotonic()
    body = {
        "model": "pagewire",
        "prompt": list(request.prompt),
        "max_tokens": request.new,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            answered.error = (await answer.aread()).decode()
            return answered
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            part = json.loads(line[6:])
            if "error" in part:
                answered.error = part["error"]["message"]
            for choice in part.get("choices", ()):
                answered.first_s = answered.first_s or time.monotonic() - begun
                answered.tokens += choice["token_ids"]
            if part.get("usage"):
                answered.cached = part["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answered


async def serve_all(served: Served, setting: Setting, requests: list[TraceRequest]) -> tuple[list[Answered], Row]:
    """Serves the requests, with kills and drains if the setting says so. Returns the final counters of each process."""
    url = await served.ready()
    answered: list[Answered] = []
    waiting = iter(requests)
    due = list(DUE) if setting.goes else []

    async def one_after_another(client: httpx.AsyncClient) -> None:
        for request in waiting:
            answered.append(await ask(client, request))
            if due and len(answered) >= (len(DUE) + 1 - len(due)) * len(requests) // (len(DUE) + 1):
                name, how = due.pop(0)
                await asyncio.to_thread(served.end, name, how)
                served.begin(name)

    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        await asyncio.gather(*(one_after_another(client) for _ in range(CONCURRENCY)))
        await served.ready()
        deadline = time.monotonic() + 30
        while True:
            stats = (await client.get("/fleet")).json()
            held = {name: one["pages_held"] + one["open_requests"] for name, one in stats.items()}
            if not any(held.values()) or time.monotonic() > deadline:
                return answered, stats
            await asyncio.sleep(0.05)


def run(setting: Setting, requests: list[TraceRequest]) -> tuple[list[Answered], Row]:
    """Makes one run. Returns its row without the verdicts."""
    longest = max(len(one.prompt) + one.new for one in requests)
    with tempfile.TemporaryDirectory(prefix="pagewire-placement-") as folder:
        served = Served(Path(folder), setting, longest)
        try:
            begun = time.monotonic()
            answered, stats = asyncio.run(serve_all(served, setting, requests))
            seconds = time.monotonic() - begun
            log = served.close()
        finally:
            served.kill()
    prompt_tokens = sum(len(one.request.prompt) for one in answered)
    firsts = sorted(one.first_s for one in answered if one.first_s)
    row: Row = {
        "placement": setting.name,
        "hit_rate": round(sum(one.cached for one in answered) / prompt_tokens, 4),
        "prompt_tokens_by_prefill": [one["prompt_tokens"] for one in stats.values() if one["role"] == "prefill"],
        "first_token_s_median": round(firsts[len(firsts) // 2], 3),
        "errors": sorted({one.error for one in answered if one.error}),
        "failed": sum(bool(one.error) for one in answered),
        "pages_held": sum(one["pages_held"] for one in stats.values()),
        "drained": len(served.drained),
        "drained_badly": [name for name, status in served.drained.items() if status],
        "drains_with_pages_held": log.count("pages held") - log.count(": 0 pages held"),
        "seconds": round(seconds, 1),
    }
    return answered, row


def verdicts(model: Any, answered: list[Answered], known: dict[TraceRequest, list[int]]) -> Row:
    """Compares each request's tokens with the model's own, and counts the outcomes.

    The tokens that a failed request has returned must equal the first tokens of the model's output.
    """
    found = {"equal": 0, "rounding_ties": 0, "wrong": 0}
    for one in answered:
        if one.request not in known:
            known[one.request] = reference_tokens(model, one.request.prompt, one.request.new)
        theirs = known[one.request]
        if one.tokens == (theirs[: len(one.tokens)] if one.error else theirs):
            found["equal"] += not one.error
        elif is_rounding_tie(model, one.request.prompt, one.tokens, theirs):
            found["rounding_ties"] += 1
        else:
            found["wrong"] += 1
    return found


def main() -> int:
    """Run, print, and write. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    parser.add_argument("--requests", type=int, default=600, help="number of requests of the trace (600)")
    parser.add_argument(
        "--only", help="settings to run, with commas between: " + ", ".join(one.name for one in SETTINGS)
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and the machine")
    chosen = parser.parse_args()
    try:
        requests = read_requests(FOLDER / TRACES[0], chosen.requests)
    except TraceError as error:
        progress(f"placement: {error}. The trace is no part of the project; PAGEWIRE_TRACES names a folder that has it")
        return 2
    torch.set_num_threads(1)
    os.environ.setdefault("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    model, known, rows = load_model(None), dict[TraceRequest, list[int]](), list[Row]()
    for setting in SETTINGS:
        if chosen.only and setting.name not in chosen.only.split(","):
            continue
        progress(f"placement: {setting.name}")
        answered, row = run(setting, requests)
        rows.append(row | verdicts(model, answered, known))
        progress(f"placement: {rows[-1]}")
    print(table(rows))
    ideal = round(ideal_hit_rate(requests), 4)
    if chosen.json:
        command = f"python -m benchmarks.placement --requests {chosen.requests}"
        found = {
            "requests": chosen.requests,
            "concurrency": CONCURRENCY,
            "infinite_cache_hit_rate": ideal,
            "runs": rows,
        }
        write(chosen.json, {**header(command, "one run each; counts"), **found})
    bad = any(
        row["wrong"] or row["pages_held"] or row["drained_badly"] or row["drains_with_pages_held"] for row in rows
    )
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
