"""How long until the first and the second token under real `vllm serve` processes, with our connector and with vLLM's?

Run it with `.venvs/vllm-serve/bin/python -m benchmarks.vllm_serve`; `make test-engines` makes that environment. The
model is a small Llama with random weights on the CPU, with blocks of 32 tokens. A pair is a prefill and a decode
process with a proxy in front of them. Only one pair runs at a time, because the threads of vLLM's connector poll
without a pause and would take processor time from other pairs. Each pair gets three loads:

- Prompts of 60, 500 and 1,500 tokens, all different, are streamed one at a time. The figures are milliseconds until the
  first token, and until the second one, which is the first that decode makes.
- 30 prompts are sent, 16 at a time. The figures are requests per second, and how many failed.
- Nothing is sent for ten seconds. The figure is processor seconds of each process per second.

`theirs` is vLLM's NIXL connector as shipped, and `theirs-ucx` is the same with the environment variables of
`transfer.nixl.settings`. The machine should be otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.frame import Row, header, progress, table, write
from tests.vllm_serve.client import ask, stream
from tests.vllm_serve.models import make_model
from tests.vllm_serve.server import OURS, THEIRS, Pair, Process, Proxy, Server, Settings
from transfer.nixl.settings import effective_settings

SIZES = (60, 500, 1500)
TOGETHER, AT_ONCE = 30, 16
IDLE_S = 10.0
_WARM_UP = 4
_STATISTICS = "ms percentiles of the n streams of a row; requests a second of one burst of `requests`"

WAYS = {
    "ours": (OURS, {}),
    "theirs": (THEIRS, {}),
    "theirs-ucx": (THEIRS, effective_settings()),
}


def first_two(url: str, prompt: Sequence[int]) -> tuple[float, float]:
    """Milliseconds until the first and until the second token of a stream."""
    start, times = time.perf_counter(), list[float]()
    for part in stream(url, prompt, max_tokens=4):
        times += [(time.perf_counter() - start) * 1e3] * len(part)
    return times[0], times[1]


def percentiles(name: str, times: Sequence[float]) -> Row:
    """The columns with percentiles of a row."""
    ordered = sorted(times)
    return {
        f"{name} {label}": round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)
        for label, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    }


def burst(url: str, numbers: random.Random) -> Row:
    """Sends many requests at once. Returns the requests per second, and how many failed."""
    prompts = [_prompt(numbers, numbers.choice((16, 60, 128, 300, 500, 1000, 1500))) for _ in range(TOGETHER)]
    start = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda prompt: ask(url, prompt, max_tokens=24, timeout=300), prompts))
    took = time.perf_counter() - start
    failed = sum(answer.status != 200 for answer in answers)
    return {"requests": TOGETHER, "requests/s": round(TOGETHER / took, 2), "failed": failed}


def processor_seconds(process: Process) -> float:
    """The processor seconds that a process and all of its descendants have used."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # gone meanwhile
            continue
        if int(fields[3]) == process.process.pid:  # its session
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def idle(pair: Pair) -> Row:
    """The processor seconds per second that either side uses without requests."""
    time.sleep(2)
    before = [processor_seconds(server) for server in pair.both]
    time.sleep(IDLE_S)
    used = [(processor_seconds(server) - was) / IDLE_S for server, was in zip(pair.both, before, strict=True)]
    return {"idle CPU prefill": round(used[0], 3), "idle CPU decode": round(used[1], 3)}


def measure(way: str, folder: Path, repeats: int, rounds: int) -> list[Row]:
    """The rows of one connector: for each prompt size, and for many requests at once."""
    connector, env = WAYS[way]
    settings = Settings(make_model(folder, "llama"), connector=json.dumps(connector), extra="")
    servers = [Server(settings, folder, f"{way}-{side}") for side in ("prefill", "decode")]
    try:
        for server in servers:
            server.env |= env
            server.start()
        for server in servers:
            server.wait()
        pair = Pair(servers[0], servers[1])
        proxy = Proxy(*pair.both, folder)
        try:
            return _rows(way, pair, proxy.url, repeats, rounds)
        finally:
            proxy.stop()
    finally:
        for server in servers:
            server.stop()


def _rows(way: str, pair: Pair, url: str, repeats: int, rounds: int) -> list[Row]:
    rows: list[Row] = []
    for size in SIZES:
        numbers = random.Random(size)  # noqa: S311 - the same prompts for all
        for _ in range(_WARM_UP):
            first_two(url, _prompt(numbers, size))
        times = [first_two(url, _prompt(numbers, size)) for _ in range(repeats)]
        firsts, seconds = ([one[at] for one in times] for at in (0, 1))
        rows.append(
            {
                "connector": way,
                "tokens": size,
                "n": repeats,
                **percentiles("first", firsts),
                **percentiles("second", seconds),
            }
        )
        progress(str(rows[-1]))
    found = [burst(url, random.Random(seed)) for seed in range(rounds)]  # noqa: S311 - likewise
    rates = [one["requests/s"] for one in found]
    rows.append(
        {
            "connector": way,
            "tokens": "16 to 1500",
            "n": rounds,
            "requests": sum(one["requests"] for one in found),
            "requests/s": round(statistics.median(rates), 2),
            "failed": sum(one["failed"] for one in found),
            **idle(pair),
        }
    )
    progress(str(rows[-1]))
    return rows


def _prompt(numbers: random.Random, size: int) -> list[int]:
    return [numbers.randrange(256) for _ in range(size)]


def main() -> int:
    """Runs the benchmark, prints its rows, and writes them if an option says so. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_serve", description=__doc__)
    parser.add_argument("--repeats", type=int, default=60, help="number of streams of each size")
    parser.add_argument("--rounds", type=int, default=3, help="number of bursts")
    parser.add_argument("--ways", default=",".join(WAYS), help="ways to measure, with commas between")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows, with the command, the machine and the code"
    )
    chosen = parser.parse_args()
    if not Path(sys.executable).with_name("vllm").exists():
        progress(
            f"vllm_serve: no vllm beside {sys.executable}: `make test-engines` makes .venvs/vllm-serve that has it"
        )
        return 2
    with tempfile.TemporaryDirectory() as folder:
        rows: list[Row] = []
        ways = chosen.ways.split(",")
        for count, way in enumerate(ways, start=1):
            rows += measure(way, Path(folder), chosen.repeats, chosen.rounds)
            if chosen.json:  # writes the results so far, because one way takes up to 20 minutes
                arguments = f"--ways {','.join(ways[:count])} --repeats {chosen.repeats} --rounds {chosen.rounds}"
                command = f"python -m benchmarks.vllm_serve {arguments}"
                write(chosen.json, {**header(command, _STATISTICS), "rows": rows})
    print(f"\nvllm_serve\n{table(rows)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
