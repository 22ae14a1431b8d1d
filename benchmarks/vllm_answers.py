"""How many answers with status 200 are wrong, under real `vllm serve` processes, with our connector and with vLLM's?

Run it with `.venvs/vllm-serve/bin/python -m benchmarks.vllm_answers`; `make test-engines` makes that environment. The
models are small, with random weights, on the CPU in float32. A plain server answers every prompt once. Then each way
gets a prefill and a decode server with pools of 2,048 tokens, and this program hands requests over as a proxy does. An
answer is *right* if it has the plain server's tokens, *wrong* if it has status 200 and others, and *failed* otherwise.
The cases, in rounds:

- `burst`: prompts, several at a time. Many begin alike, and both prefix caches are on.
- `swapped`: each of two requests has the reference of the other's prompt.
- `stale`: a reference that was read is used again for its prompt, when decode no longer has the prompt.
- `reused`: it is used for another prompt.
- `evicted`: it is used again when prefill has overwritten its blocks.
- `expired`: nobody has read it, its lease is over, and prefill has overwritten its blocks.
- `restarted`: prefill was killed and started again, and has computed other prompts since.
- `killed`, `stopped`: a server is killed during a burst and started again, or is stopped for longer than a lease.
- `resets`: both prefix caches are reset all the time during a burst.
- `cancelled`: half of the clients of a burst leave.

After each round, the program waits until no block is held. `none` is one server without a connector. The figures are
counts, so the machine may be busy, but then a way takes hours.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.frame import Row, header, progress, table, write
from tests.vllm_serve.client import ask, hang_up
from tests.vllm_serve.models import make_model
from tests.vllm_serve.proxy import FOR_A_READER
from tests.vllm_serve.server import OURS, THEIRS, Server, Settings

WAYS = {"ours": json.dumps(OURS), "theirs": json.dumps(THEIRS), "none": ""}
OK = 200
LEASE_S = 6
BLOCK, BLOCKS = 32, 64
AT_ONCE, BATCH, BURST = 6, 6, 24
SHORT = 100  # tokens; as many prompts of this length as a batch has fit a pool of two groups
_ALPHABET = 256
_STATISTICS = "counts; `held`: the most blocks that were still held after a round, longer than any lease"
_BROKEN = (OSError, http.client.HTTPException, ValueError)


def prompts_of(count: int) -> list[list[int]]:
    """Returns prompts of 3 to 400 tokens. Two of three begin like others."""
    numbers = random.Random(11)  # noqa: S311 - the same prompts for all
    shared = [[numbers.randrange(_ALPHABET) for _ in range(300)] for _ in range(4)]
    found: list[list[int]] = []
    for at in range(count):
        head = shared[numbers.randrange(4)][: numbers.choice((32, 64, 100, 128, 200))] if at % 3 else []
        found.append([*head, *(numbers.randrange(_ALPHABET) for _ in range(numbers.choice((3, 31, 32, 33, 90, 200))))])
    return found


def answers_of(folder: Path, settings: Settings, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the tokens of a plain server without a prefix cache. Prompts run one at a time."""
    server = Server(replace(settings, connector="", prefix_cache=False), folder, f"plain-{settings.model.name}")
    server.start()
    try:
        server.wait()
        return [ask(server.url, prompt).tokens for prompt in prompts]
    finally:
        server.stop()


@dataclass
class Rig:
    """The servers of a way, and the counts of their answers.

    Attributes:
        servers: prefill and decode; a single server if there is no connector.
        prompts: the prompts.
        wanted: the right tokens of each prompt.
        numbers: draws prompts.
        counts: answers by case and result.
        held: the most blocks that were held after a round.
        crashes: how often a server has ended by itself.
    """

    servers: list[Server]
    prompts: list[list[int]]
    wanted: list[list[int]]
    numbers: random.Random
    counts: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    held: int = 0
    crashes: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    @property
    def prefill(self) -> Server:
        """The first server."""
        return self.servers[0]

    @property
    def decode(self) -> Server:
        """The server that answers."""
        return self.servers[-1]

    @property
    def hands_over(self) -> bool:
        """Whether the servers have a connector."""
        return len(self.servers) > 1

    def draw(self, count: int, most: int = 1000) -> list[int]:
        """Returns the numbers of different prompts, of at most `most` tokens."""
        return self.numbers.sample([at for at, prompt in enumerate(self.prompts) if len(prompt) <= most], count)

    def prefilled(self, at: int) -> Any:
        """Returns the reference to a prompt that prefill has computed; None without one."""
        if not self.hands_over:
            return None
        with contextlib.suppress(*_BROKEN):
            answer = ask(self.prefill.url, self.prompts[at], max_tokens=1, kv_transfer_params=FOR_A_READER)
            return answer.params if answer.status == OK else None
        return None

    def all_prefilled(self, chosen: Sequence[int]) -> list[Any]:
        """Returns the references to several prompts, which run at the same time."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self.prefilled, chosen))

    def ask(self, case: str, at: int, params: Any) -> None:
        """Asks decode for a prompt with a reference, and counts the answer."""
        result = "failed"
        if params is not None or not self.hands_over:
            with contextlib.suppress(*_BROKEN):
                answer = ask(self.decode.url, self.prompts[at], kv_transfer_params=params)
                if answer.status == OK:
                    result = "right" if answer.tokens == self.wanted[at] else "wrong"
        with self._lock:
            self.counts[case, result] += 1

    def ask_all(self, case: str, chosen: Sequence[int], params: Sequence[Any]) -> None:
        """Asks for several prompts at the same time."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(self.ask, [case] * len(chosen), chosen, params))

    def serve(self, case: str, at: int) -> None:
        """Hands a prompt over, as a proxy does."""
        self.ask(case, at, self.prefilled(at))

    def serve_all(self, case: str, chosen: Sequence[int]) -> None:
        """Hands several prompts over at the same time."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(self.serve, [case] * len(chosen), chosen))

    def overwrite(self) -> None:
        """Makes prefill compute so many other prompts that they take its whole pool."""
        for _ in range(2 * BLOCK * BLOCKS // 600):
            with contextlib.suppress(*_BROKEN):
                ask(self.prefill.url, [self.numbers.randrange(_ALPHABET) for _ in range(600)], max_tokens=1)

    def forget(self, server: Server) -> None:
        """Drops a server's prefix cache, if it holds no block."""
        self.drain([server])
        with contextlib.suppress(*_BROKEN, AssertionError):
            server.forget()

    def drain(self, servers: Sequence[Server]) -> int:
        """Waits until no block is held, for a few leases. Returns how many are."""
        end, blocks = time.monotonic() + 6 * LEASE_S, 0
        for server in servers:
            while (blocks := self._held(server)) and time.monotonic() < end:
                with contextlib.suppress(*_BROKEN):  # an idle engine does not update its figure
                    ask(server.url, [1], max_tokens=1, timeout=30)
                time.sleep(0.5)
        return blocks

    def _held(self, server: Server) -> int:
        with contextlib.suppress(*_BROKEN, KeyError):
            return round(server.usage * ((server.settings.blocks or 16_384 // server.settings.block_size) - 1))
        return 0

    def restart(self, server: Server) -> None:
        """Kills a server, and starts it at the same address."""
        server.kill()
        server.start()
        server.wait()

    def revive(self) -> None:
        """Starts servers again that have ended by themselves, or whose engine has."""
        for server in self.servers:
            try:
                fine = ask(server.url, [1, 2, 3], max_tokens=1, timeout=60).status == OK
            except _BROKEN:
                fine = False
            if not fine:
                self.crashes += 1
                progress(f"{server.log.name} has ended")
                self.restart(server)


def burst(rig: Rig, case: str = "burst", count: int = BURST) -> None:
    """Hands prompts over, several at a time."""
    rig.serve_all(case, rig.draw(count))


def swapped(rig: Rig) -> None:
    """Gives each request the reference of another."""
    chosen = rig.draw(BATCH, SHORT)
    params = rig.all_prefilled(chosen)
    rig.ask_all("swapped", chosen, [*params[1:], params[0]])


def used_again(rig: Rig, case: str) -> None:
    """Uses references again after they were read: `stale`, `reused` or `evicted`."""
    chosen = rig.draw(2 * BATCH, SHORT)
    first, others = chosen[:BATCH], chosen[BATCH:]
    params = rig.all_prefilled(first)
    rig.ask_all("burst", first, params)
    rig.forget(rig.decode)
    if case == "evicted":
        rig.overwrite()
    rig.ask_all(case, others if case == "reused" else first, params)


def expired(rig: Rig) -> None:
    """Uses references that nobody has read in time."""
    chosen = rig.draw(BATCH, SHORT)
    rig.forget(rig.decode)
    params = rig.all_prefilled(chosen)
    time.sleep(2 * LEASE_S)
    rig.overwrite()
    rig.ask_all("expired", chosen, params)


def restarted(rig: Rig) -> None:
    """Uses references of a server that was killed and started again since."""
    chosen = rig.draw(BATCH, SHORT)
    rig.forget(rig.decode)
    params = rig.all_prefilled(chosen)
    rig.restart(rig.prefill)
    rig.overwrite()
    rig.ask_all("restarted", chosen, params)


def killed(rig: Rig) -> None:
    """Kills each server in turn during a burst, and starts it again."""
    for server in rig.servers:
        during(partial(burst, rig, "killed", BURST // 2), partial(rig.restart, server), rig.numbers.uniform(0.1, 1.5))


def stopped(rig: Rig) -> None:
    """Stops each server in turn for two leases during a burst."""

    def stop(server: Server) -> None:
        os.killpg(server.process.pid, signal.SIGSTOP)
        time.sleep(2 * LEASE_S)
        os.killpg(server.process.pid, signal.SIGCONT)

    for server in rig.servers:
        during(partial(burst, rig, "stopped"), partial(stop, server), rig.numbers.uniform(0.1, 1.5))


def during(run: Callable[[], object], happens: Callable[[], object], after_s: float) -> None:
    """Runs something, and something else at the same time, some seconds later. Returns when both are over."""
    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(after_s)
    happens()
    thread.join()


def resets(rig: Rig) -> None:
    """Resets both prefix caches all the time during a burst."""
    over = threading.Event()

    def reset() -> None:
        while not over.wait(0.2):
            for server in rig.servers:
                with contextlib.suppress(*_BROKEN, AssertionError):
                    server.post("/reset_prefix_cache")

    thread = threading.Thread(target=reset)
    thread.start()
    burst(rig, "resets")
    over.set()
    thread.join()


def cancelled(rig: Rig) -> None:
    """Lets every second client of a burst leave."""
    chosen = rig.draw(BURST)
    waits = {at: rig.numbers.uniform(0.0, 1.5) for at in chosen[::2]}

    def serve(at: int) -> None:
        params = rig.prefilled(at)
        if at in waits:
            with contextlib.suppress(*_BROKEN):
                hang_up(rig.decode.url, rig.prompts[at], waits[at], kv_transfer_params=params, max_tokens=200)
        else:
            rig.ask("cancelled", at, params)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(serve, chosen))


_QUICK: tuple[Callable[[Rig], None], ...] = (burst, resets, cancelled, burst)
_REFERENCES: tuple[Callable[[Rig], None], ...] = (
    swapped,
    partial(used_again, case="stale"),
    partial(used_again, case="reused"),
    partial(used_again, case="evicted"),
)
_SLOW: tuple[Callable[[Rig], None], ...] = (stopped, killed)
_SLOW_REFERENCES: tuple[Callable[[Rig], None], ...] = (expired, restarted)


def run_way(rig: Rig, requests: int, slow_every: int) -> None:
    """Runs rounds until there are enough answers. Every few rounds have the slow cases, too."""
    number = 0
    while rig.counts.total() < requests:
        cases = [*_QUICK, *(_REFERENCES if rig.hands_over else ())]
        if number % slow_every == slow_every - 1:
            cases += [*_SLOW, *(_SLOW_REFERENCES if rig.hands_over else ())]
        rig.numbers.shuffle(cases)
        for case in cases:
            case(rig)
            rig.revive()
        number += 1
        rig.held = max(rig.held, rig.drain(rig.servers))
        progress(f"round {number}: {rig.counts.total()} answers {by_result(rig.counts)} held {rig.held}")


def by_result(counts: Counter[tuple[str, str]]) -> dict[str, int]:
    """Returns the number of answers for each result."""
    return {
        result: sum(n for (_, one), n in counts.items() if one == result) for result in ("right", "wrong", "failed")
    }


def rows_of(way: str, model: str, rig: Rig) -> list[Row]:
    """Returns a row for each case, and one for all of them together."""
    cases = dict.fromkeys(case for case, _ in rig.counts)
    rows: list[Row] = []
    for case in [*cases, "all"]:
        some = Counter({key: n for key, n in rig.counts.items() if case in (key[0], "all")})
        rows.append({"connector": way, "model": model, "case": case, "n": some.total(), **by_result(some)})
    rows[-1] |= {"held": rig.held, "crashes": rig.crashes}
    return rows


def measure(way: str, model: str, folder: Path, chosen: argparse.Namespace) -> list[Row]:
    """Returns the rows of a way and a model."""
    settings = Settings(
        make_model(folder, model), block_size=BLOCK, blocks=BLOCKS, max_tokens=896, connector=WAYS[way],
        extra=json.dumps({"kv_lease_duration": LEASE_S}), policy=chosen.policy,
    )  # fmt: skip
    file, prompts = folder / f"{model}.json", prompts_of(chosen.prompts)
    if not file.exists():
        file.write_text(json.dumps(answers_of(folder, settings, prompts)))
    names = ("prefill", "decode") if settings.connector else ("alone",)
    servers = [Server(settings, folder, f"{way}-{model}-{name}") for name in names]
    rig = Rig(servers, prompts, json.loads(file.read_text()), random.Random(way == "none"))  # noqa: S311 - likewise
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        run_way(rig, chosen.requests, chosen.slow_every)
    except RuntimeError as error:  # a server did not start, at first or after it had ended: what was counted stays
        progress(str(error))
    finally:
        for server in servers:
            server.stop()
    return rows_of(way, model, rig)


def main() -> int:
    """Runs the ways, prints the counts, and writes them if an option says so. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_answers", description=__doc__)
    parser.add_argument("--ways", default=",".join(WAYS), help="ways to count, with commas between")
    parser.add_argument("--models", default="llama,gemma3", help="models of `tests.vllm_serve.models`")
    parser.add_argument("--requests", type=int, default=1000, help="the least number of answers for each way and model")
    parser.add_argument("--slow-every", type=int, default=3, help="the slow cases come every so many rounds")
    parser.add_argument("--prompts", type=int, default=150, help="number of different prompts")
    parser.add_argument("--policy", default="fail", choices=("fail", "recompute"), help="kv_load_failure_policy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows, with the command and the code")
    chosen = parser.parse_args()
    if not Path(sys.executable).with_name("vllm").exists():
        progress(f"vllm_answers: no vllm beside {sys.executable}: `make test-engines` makes .venvs/vllm-serve")
        return 2
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for way in chosen.ways.split(","):
            for model in chosen.models.split(","):
                rows += measure(way, model, Path(folder), chosen)
                if chosen.json:  # the results so far, because a way may take an hour
                    command = (
                        f"python -m benchmarks.vllm_answers --ways {chosen.ways} --models {chosen.models} --requests "
                        f"{chosen.requests} --slow-every {chosen.slow_every} --policy {chosen.policy}"
                    )
                    write(chosen.json, {**header(command, _STATISTICS), "rows": rows})
    print(f"\nvllm_answers\n{table(rows)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
