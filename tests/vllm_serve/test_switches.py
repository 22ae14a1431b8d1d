"""Real servers whose weights change under load. Each token is that of a fresh model of the version that it reports.

    python -m tests.vllm_serve.test_switches --switches 200 --requests 5000 [--pause keep] [--without version]

`--without version` keeps every change of the weights from the connector. The run must then fail.

Each server is paused, gets other weights, and goes on, as vLLM's pages for trainers say. The two do so one after the
other, with a pause between, so that prompts, leases, pulls and loans of one version meet a server of another one.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.vllm_serve.models import make_model
from tests.vllm_serve.server import OURS, Pair, Server, Settings
from tests.vllm_serve.test_weights import UPDATES

VERSIONS = 4
BLOCK = 32  # tokens; chunks of prompts are multiples of it
CLOSE = 1e-3  # the largest gap between the logits of a tie
PAUSES = ("abort", "wait", "keep", "uncleared")
CLEARED = PAUSES[:3]  # vLLM empties its cache in these pauses
TOLD = ("named", "counted", "files")
STEMS = [[(stem * 53 + at * at * 7) % 256 for at in range(300)] for stem in range(3)]
EXTRA = {"kv_lease_duration": 20, "lend": 0.5, "ask_timeout": 2.0, "model_id": "llama"}


def settings_of(model: Path, number: int, policy: str = "recompute", *, without: bool = False) -> Settings:
    """Returns the settings of a server whose weights can be changed. Its pool is small, so that blocks are evicted."""
    connector = OURS | ({"kv_connector_module_path": "tests.vllm_serve.unversioned"} if without else {})
    more = ("--enable-scale-out", *UPDATES)
    extra = json.dumps(EXTRA)
    return Settings(
        model, number, chunk=96, policy=policy, connector=json.dumps(connector), extra=extra, blocks=160, more=more
    )


class Fresh:
    """Models that never change, one of each version."""

    def __init__(self, folders: Sequence[Path]) -> None:
        from transformers import LlamaForCausalLM

        self.files = [folder / "model.safetensors" for folder in folders]
        self.folders = folders
        self._models: list[Any] = [LlamaForCausalLM.from_pretrained(folder).eval() for folder in folders]

    def says(self, version: int, prompt: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Whether a version's model, which has computed everything before, says each of the tokens of an answer."""
        return self._says([(version, [*prompt, *tokens])], prompt, tokens)

    def says_after(self, old: int, new: int, prompt: Sequence[int], tokens: Sequence[int]) -> int:
        """Returns how many tokens a request says that keeps its KV at a switch from `old` to `new`: the most.

        The switch may be at the end of a block or chunk of the prompt, or between two tokens of the answer.
        """
        every = [*prompt, *tokens]
        splits = {*range(BLOCK, len(prompt), BLOCK), *range(len(prompt) - 1, len(every))} - {0}
        runs = ([(old, every[:split]), (new, every[split:])] for split in splits)
        return max(first([not said for said in self._says(run, prompt, tokens)]) for run in runs)

    def says_beside(self, old: int, new: int, prompt: Sequence[int], tokens: Sequence[int]) -> int:
        """As `says_after`, if a request finds its first blocks in its server's old cache and loads the others."""
        from transformers import DynamicCache

        last, most = len(prompt) - 1, 0
        for split in range(BLOCK, last, BLOCK):
            caches = {of: DynamicCache() for of in (old, new)}
            with torch.inference_mode():
                for of, cache in caches.items():
                    self._models[of](torch.tensor([prompt[:last]]), past_key_values=cache)
                for found, loaded in zip(caches[old].layers, caches[new].layers, strict=True):
                    loaded.keys = torch.cat([found.keys[:, :, :split], loaded.keys[:, :, split:]], 2)
                    loaded.values = torch.cat([found.values[:, :, :split], loaded.values[:, :, split:]], 2)
                rest = torch.tensor([[*prompt[last:], *tokens]])
                logits = self._models[new](rest, past_key_values=caches[new]).logits[0, :-1]
            most = max(most, first([not said for said in self._are_said(logits, tokens)]))
        return most

    def _says(self, runs: Sequence[tuple[int, list[int]]], prompt: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        from transformers import DynamicCache

        cache = DynamicCache()
        with torch.inference_mode():
            rows = [self._models[of](torch.tensor([run]), past_key_values=cache).logits[0] for of, run in runs]
        logits = torch.cat(rows)[len(prompt) - 1 : -1]
        return self._are_said(logits, tokens)

    def _are_said(self, logits: Any, tokens: Sequence[int]) -> list[bool]:
        said = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return (logits.max(1).values - said < CLOSE).tolist()


def first(flags: Sequence[bool]) -> int:
    """Returns the index of the first true one; the length if there is none."""
    return next((at for at, flag in enumerate(flags) if flag), len(flags))


class Known(NamedTuple):
    """A version, and how the server has come to it: how it was told, and how it was paused."""

    version: int
    told: str
    pause: str


@dataclass
class Timeline:
    """The versions of a server. While it changes, it may have the one before and the one after."""

    spans: list[list[float]] = field(default_factory=lambda: [[0.0, float("inf")]])
    known: list[Known] = field(default_factory=lambda: [Known(0, "", "")])

    @contextmanager
    def switch(self, known: Known) -> Generator[None]:
        self.spans.append([time.monotonic(), float("inf")])
        self.known.append(known)
        yield
        self.spans[-2][1] = time.monotonic()

    def during(self, start: float, end: float) -> list[Known]:
        """Returns the versions that the server may have had, in order."""
        spans = [*zip(self.spans, self.known, strict=False)]
        return [known for (begin, over), known in spans if begin <= end and over >= start]


class Told(NamedTuple):
    """An answer, and when it was asked for and came."""

    status: int
    body: dict[str, Any]
    start: float
    end: float

    @property
    def choice(self) -> dict[str, Any]:
        return self.body["choices"][0]


def call(url: str, body: dict[str, Any] | None = None, timeout: float = 120) -> Told:
    """Posts to a server."""
    start = time.monotonic()
    headers = {"Content-Type": "application/json", "Connection": "close"}
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
            return Told(answer.status, json.loads(answer.read() or b"{}"), start, time.monotonic())
    except urllib.error.HTTPError as error:
        return Told(error.code, {"error": error.read().decode(errors="replace")}, start, time.monotonic())


class Switched:
    """A server whose weights change."""

    def __init__(self, server: Server, fresh: Fresh, counts: Counter[str]) -> None:
        self.server, self.fresh, self.counts = server, fresh, counts
        self.timeline = Timeline()
        self.source: Any = None

    def _call(self, path: str, **body: Any) -> None:
        told = call(f"{self.server.url}{path}", body)
        assert told.status == 200, f"{path}: {told.body}"

    def _pause(self, mode: str) -> None:
        how = {"mode": "keep", "clear_cache": "false"} if mode == "uncleared" else {"mode": mode}
        query = urllib.parse.urlencode(how)
        until = time.monotonic() + 120
        while (told := call(f"{self.server.url}/pause?{query}")).status != 200:
            assert time.monotonic() < until, f"it cannot be paused: {told.body}"
            self.counts["pauses that failed"] += 1
            assert "Failed to reset" in told.body["error"], told.body
            self._call("/resume")
            time.sleep(0.1)

    def _put(self, version: int, told: str) -> None:
        if told == "files":
            self._call(
                "/collective_rpc", method="reload_weights", kwargs={"weights_path": str(self.fresh.folders[version])}
            )
            return
        self._call("/start_weight_update")
        self._call("/update_weights", update_info={"path": str(self.fresh.files[version])})
        self._call("/finish_weight_update", **({"weight_version": f"v{version}"} if told == "named" else {}))

    def change(self, known: Known) -> None:
        """Gives the server other weights, and if `pause` says so, leaves its cache as it is."""
        self._pause(known.pause)
        self._put(known.version, known.told)
        self._call("/resume")

    def clear(self) -> None:
        """Resets its cache. Only in a pause, no lease is open."""
        self._pause("keep")
        self._call("/resume")


def switch(rng: random.Random, prefill: Switched, decode: Switched, known: Known) -> None:
    """Gives both servers other weights, one after the other or at the same time.

    A server whose cache was not reset mixes versions for a while, but hands nothing of before to the other one.
    """
    order = rng.sample((prefill, decode), 2)
    mixes_s = rng.choice((0.2, 1.0))

    def change(side: Switched) -> None:
        with side.timeline.switch(known):
            side.change(known)
            if known.pause == "uncleared":
                time.sleep(mixes_s)
                side.clear()

    if rng.random() < 0.3:
        with ThreadPoolExecutor(2) as both:
            list(both.map(change, order))
    else:
        for side in order:
            change(side)
            time.sleep(rng.choice((0.0, 0.05, 0.4)))


class Load:
    """Clients that ask two servers without pause until they are told to stop. Each answer is checked."""

    def __init__(self, prefill: Switched, decode: Switched, fresh: Fresh, clients: int, seed: int) -> None:
        self.prefill, self.decode, self.fresh = prefill, decode, fresh
        self.counts: Counter[str] = prefill.counts
        self.wrong: list[str] = []
        self.failed: Counter[str] = Counter()
        self.states: dict[int, str] = {}
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._pool = ThreadPoolExecutor(clients)
        self._clients = [
            self._pool.submit(self._ask, number, random.Random(f"{seed} {number}")) for number in range(clients)
        ]

    @property
    def asked(self) -> int:
        return self.counts["requests"]

    @property
    def is_running(self) -> bool:
        """Whether no client has failed. `stop` raises its error."""
        return not any(client.done() for client in self._clients)

    def _ask(self, number: int, rng: random.Random) -> None:
        while not self._stop.is_set():
            stem = rng.choice(STEMS)
            prompt = [*stem[: rng.randrange(0, 300, 3)], *(rng.randrange(256) for _ in range(rng.randrange(1, 40)))]
            (self._handed if rng.random() < 0.7 else self._alone)(number, rng, prompt)
            self.states[number] = "nothing"
            with self._lock:
                self.counts["requests"] += 1

    def _sources(self) -> list[Any]:
        return [one.source for one in (self.prefill, self.decode) if one.source]

    def _generate(self, server: Switched, prompt: Sequence[int], count: int, params: dict[str, Any], salt: str) -> Told:
        body = {
            "token_ids": list(prompt), "kv_transfer_params": params, "cache_salt": salt,
            "sampling_params": {"max_tokens": count, "temperature": 0.0, "ignore_eos": True, "detokenize": False},
        }  # fmt: skip
        told = call(f"{server.server.url}/inference/v1/generate", body)
        if told.status == 200 and (found := (told.body.get("kv_transfer_params") or {}).get("kv_sources")):
            server.source = found[0]
        return told

    def _handed(self, number: int, rng: random.Random, prompt: Sequence[int]) -> None:
        """Asks as a proxy does. Between prefill and decode there may be time for a switch."""
        salt = rng.choice("abc")
        self.states[number] = "prefill"
        params = {"do_remote_decode": True, "do_remote_prefill": False, "kv_sources": self._sources()}
        first = self._generate(self.prefill, prompt, 1, params, salt)
        if not self._judge(self.prefill, prompt, first, "prefill"):
            return
        self.states[number] = "lease"
        time.sleep(rng.choice((0, 0, 0, 0, 0.1, 0.3)))
        self.states[number] = "decode"
        if (found := first.body.get("kv_transfer_params")) is None:
            self.counts["without a lease"] += 1
            return
        self._judge(
            self.decode, prompt, self._generate(self.decode, prompt, rng.choice((1, 8, 24)), found, salt), "decode"
        )

    def _alone(self, number: int, rng: random.Random, prompt: Sequence[int]) -> None:
        """Asks one of the servers, which may find a prefix at the other one."""
        self.states[number] = "alone"
        server = rng.choice((self.prefill, self.decode))
        told = self._generate(
            server, prompt, rng.choice((1, 8, 24)), {"kv_sources": self._sources()}, rng.choice("abc")
        )
        self._judge(server, prompt, told, "alone")

    def _judge(self, server: Switched, prompt: Sequence[int], told: Told, what: str) -> bool:
        """Counts an answer. Returns whether it is complete."""
        if told.status != 200:
            with self._lock:
                self.counts["failed"] += 1
                self.failed[str(told.body)[:200]] += 1
            return False
        choice, known = told.choice, server.timeline.during(told.start, told.end)
        tokens, is_whole = choice["token_ids"] or [], choice["finish_reason"] == "length"
        kind = self._kind(prompt, tokens, known, choice["weight_versions"] or [])
        with self._lock:
            self.counts[kind] += 1
            self.counts["cut short"] += not is_whole
            if kind == "wrong":
                self.wrong.append(
                    f"{what}: {prompt} got {tokens} of {choice['weight_versions']}, in versions {known}, "
                    f"{told.start:.2f} to {told.end:.2f}"
                )
        return is_whole

    def _kind(
        self, prompt: Sequence[int], tokens: Sequence[int], known: Sequence[Known], spans: Sequence[dict[str, Any]]
    ) -> str:
        """Returns whether the tokens are those of the version that the answer reports, and if not, why that is right.

        With names, the server itself reports the version of each token. Without, it may be any that it had meanwhile.
        """
        if not tokens:
            return "empty"
        versions, size = [one.version for one in known], len(tokens)
        is_told = all(one.told == "named" for one in known)
        told = [int(span["version"][1:]) for span in spans if is_told for _ in range(span["start"], span["end"])]
        said = {version: self.fresh.says(version, prompt, tokens) for version in {*versions, *told}}
        if len(set(told)) == 1 or (len(set(versions)) == 1 and not is_told):
            if all(said[(told or versions)[0]]):
                return "right"
        elif not is_told and any(all(said[version]) for version in versions):
            return "right"
        elif is_told and all(said[version][at] for at, version in enumerate(told)):
            return "begun anew"
        reached = 0
        for version in versions:
            reached += first([not one for one in said[version][reached:]])
        if reached == size:
            return "begun anew"
        for old, new in pairwise(known):
            anew = size - first([not one for one in reversed(said[new.version])])  # from here on, `new` says all
            if how := self._how_mixed(old.version, new, prompt, tokens, anew):
                return how
        return "wrong"

    def _how_mixed(self, old: int, new: Known, prompt: Sequence[int], tokens: Sequence[int], anew: int) -> str:
        """Returns why the `tokens` before `anew` are of both versions; empty if nothing explains them."""
        if anew <= self.fresh.says_after(old, new.version, prompt, tokens):
            return f"mixed by {new.pause}"
        if new.pause == "uncleared" and anew <= self.fresh.says_beside(old, new.version, prompt, tokens):
            return "loaded beside an old cache"
        return ""

    def stop(self) -> None:
        self._stop.set()
        for client in self._clients:
            client.result()
        self._pool.shutdown()


def under_load(
    pair: Pair, fresh: Fresh, switches: int, requests: int, pauses: Sequence[str], told: Sequence[str], seed: int = 0,
    clients: int = 6, tell: Callable[[str], object] = lambda _: None, most_wrong: int = 1000,
    seconds: float = 3 * 3600,
) -> Load:  # fmt: skip
    """Changes the weights of both servers under load. Returns what the clients have seen."""
    rng, counts = random.Random(seed), Counter[str]()
    sides = [Switched(server, fresh, counts) for server in pair.both]
    load, version, begun = Load(*sides, fresh, clients, seed), 0, time.monotonic()
    try:
        for number in range(switches):
            until = (number + 1) * requests // switches
            while load.asked < until - rng.randrange(8) and load.is_running:
                time.sleep(0.02)
            version = (version + rng.randrange(1, VERSIONS)) % VERSIONS
            counts.update(f"switches, a client at {state}" for state in set(load.states.values()))
            switch(rng, *sides, Known(version, rng.choice(told), rng.choice(pauses)))
            counts["switches"] += 1
            took = time.monotonic() - begun
            tell(f"{took:.0f} s: {dict(counts)} {dict(load.failed)} {load.wrong[:1]}\n")
            if len(load.wrong) >= most_wrong or took > seconds:
                break
    finally:
        load.stop()
    return load


@pytest.fixture(scope="module")
def fresh(folder: Path) -> Fresh:
    return versions_of(folder)


def pair_of(servers: Any, fresh: Fresh, folder: Path, policy: str = "recompute", *, without: bool = False) -> Pair:
    models = [folder / f"own-{number}" for number in range(2)]
    for model in models:
        if not model.exists():  # each server reads its own files
            shutil.copytree(fresh.folders[0], model)
    return servers.pair(*(settings_of(model, at, policy, without=without) for at, model in enumerate(models)))


def test_each_answer_is_that_of_the_weights_that_it_reports(servers: Any, fresh: Fresh, folder: Path) -> None:
    load = under_load(pair_of(servers, fresh, folder), fresh, 8, 100, CLEARED, TOLD)
    assert not load.wrong, load.wrong[:3]
    assert not load.failed, load.failed
    assert load.counts["right"] > 50, load.counts


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_two_hundred_switches_under_load(servers: Any, fresh: Fresh, folder: Path, policy: str) -> None:
    load = under_load(pair_of(servers, fresh, folder, policy), fresh, 200, 5000, CLEARED, TOLD)
    assert not load.wrong, load.wrong[:3]
    assert policy == "fail" or not load.failed, load.failed
    assert all("pages" in reason or "lease" in reason or "load" in reason for reason in load.failed), load.failed


@pytest.mark.long
def test_without_the_version_answers_are_wrong(servers: Any, fresh: Fresh, folder: Path) -> None:
    load = under_load(pair_of(servers, fresh, folder, without=True), fresh, 30, 600, CLEARED, TOLD, most_wrong=1)
    assert load.wrong, load.counts


def versions_of(folder: Path) -> Fresh:
    return Fresh([make_model(folder, "llama", seed) for seed in range(VERSIONS)])


def main() -> int:
    from tests.vllm_serve.conftest import Servers

    parser = argparse.ArgumentParser(prog="python -m tests.vllm_serve.test_switches")
    for name, default in (("switches", 200), ("requests", 5000), ("clients", 6), ("seed", 0), ("seconds", 10_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pause", choices=PAUSES, action="append")
    parser.add_argument("--told", choices=TOLD, action="append")
    parser.add_argument("--policy", choices=["recompute", "fail"], default="recompute")
    parser.add_argument("--without", choices=["version"])
    parser.add_argument("--keep", type=Path, help="folder for the servers' logs")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        folder = given.keep or Path(made)
        folder.mkdir(exist_ok=True)
        fresh, servers = versions_of(folder), Servers(folder, most=2)
        try:
            pair = pair_of(servers, fresh, folder, given.policy, without=bool(given.without))
            load = under_load(
                pair, fresh, given.switches, given.requests, given.pause or PAUSES, given.told or TOLD, given.seed,
                given.clients, sys.stderr.write, seconds=given.seconds,
            )  # fmt: skip
            used = [
                {
                    name: value
                    for name, value in server.metrics().items()
                    if value and ("pagewire" in name or "source" in name) and "_created" not in name
                }
                for server in pair.both
            ]
        finally:
            servers.close()
    sys.stdout.write(f"{dict(load.counts)}\n{dict(load.failed)}\n{used}\n{load.wrong[:5]}\n")
    return int(bool(load.wrong))


if __name__ == "__main__":
    sys.exit(main())
