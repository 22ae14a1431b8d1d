"""`pagewire serve` gets other weights while it serves. Every answer equals that of the model whose weights it names.

    python -m tests.pagewire.serve.test_rollout --switches 200 [--without version]

`--without version` leaves the version out of the first seed of the digests in every process. The run must then fail.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from scheduler_adapters.hf.runner import load_model
from scheduler_adapters.hf.tiny import tiny_llama
from scheduler_adapters.hf.weights import model_name
from tests.scheduler_adapters.front.served import COMMON, Served, complete, encoded, tokens_of
from tests.scheduler_adapters.serving import own_tokens

pytestmark = pytest.mark.slow
HEAD = "What a page holds, who may write to it, and when it may be used again. " * 2
SEEDS = (0, 1, 2)


class Checkpoints:
    """Directories of equal models with other weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: dict[str, Path] = {}
        self.models: dict[str, Any] = {}
        for seed in SEEDS:
            path = folder / f"step-{seed}"
            tiny_llama(seed).save_pretrained(path)
            model = load_model(path)
            self.paths[name := model_name(model)] = path
            self.models[name] = model

    @property
    def names(self) -> list[str]:
        return list(self.paths)

    def expected(self, weights: str, prompt: str, new: int) -> list[int]:
        return own_tokens(self.models[weights], encoded(prompt), new)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def start(folder: Path, checkpoints: Checkpoints, prefills: int, decodes: int, *more: str) -> Served:
    """One command with all processes, which have the weights of seed 0."""
    served = Served(folder)
    own = ("--model", str(checkpoints.paths[checkpoints.names[0]]), "--served-model-name", "pagewire")
    counts = ("--prefills", str(prefills), "--decodes", str(decodes), "--http-port", "0")
    gate = ("--checkpoints", str(checkpoints.folder), "--address-file", str(served.addresses))
    served.start("front", *own, *counts, *gate, *COMMON, *more)
    served.until_there(prefills, decodes)
    return served


def roll(served: Served, model: str | Path, status: int = 200) -> Any:
    """Asks the fleet to change its weights. Returns the answer, which has this status."""
    body = json.dumps({"model": str(model)}).encode()
    asked = urllib.request.Request(f"{served.url}/weights", body, method="POST")  # noqa: S310
    try:
        with urllib.request.urlopen(asked, timeout=120) as answer:  # noqa: S310
            found, told = answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        found, told = error.code, json.loads(error.read())
    assert found == status, told
    return told


@pytest.fixture(scope="module", params=[(1, 1), (2, 2)], ids=["1 and 1", "2 and 2"])
def served(
    request: pytest.FixtureRequest, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    made = start(tmp_path_factory.mktemp("served"), checkpoints, *request.param)
    yield made
    made.close()


def test_a_fleet_gets_other_weights_and_goes_back(served: Served, checkpoints: Checkpoints) -> None:
    client, prompt = served.client, HEAD + "Which weights?"
    roll(served, checkpoints.paths[checkpoints.names[0]].name)  # another test may have left other weights
    for weights in (checkpoints.names[1], checkpoints.names[0], checkpoints.names[1]):
        is_new = weights not in {one["weights"] for one in served.get("/fleet").values()}
        told = roll(served, checkpoints.paths[weights].name)
        assert told["weights"] == weights
        assert set(told["processes"].values()) == {weights}
        first, again = (complete(client, prompt) for _ in range(2))
        for answer in (first, again):
            assert answer.system_fingerprint == weights
            assert tokens_of(answer) == checkpoints.expected(weights, prompt, 24)
        assert is_new
    assert first.usage.prompt_tokens_details.cached_tokens > 0 or len(told["processes"]) > 2
    assert again.usage.prompt_tokens_details.cached_tokens > 100
    served.until_nothing_is_held()


class Load:
    """Clients that ask without pause, until they are told to stop, and check each answer."""

    def __init__(self, served: Served, checkpoints: Checkpoints, clients: int, seed: int = 0) -> None:
        self.served, self.checkpoints = served, checkpoints
        self.served_by: Counter[str] = Counter()
        self.cached = 0
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(clients)
        self._clients = [self._pool.submit(self._ask, random.Random(f"{seed} {number}")) for number in range(clients)]

    @property
    def count(self) -> int:
        return sum(self.served_by.values())

    def _ask(self, rng: random.Random) -> None:
        with self.served.client as client:
            while not self._stop.is_set():
                prompt = HEAD[: rng.randrange(40, len(HEAD), 12)] + rng.choice(("Why?", "When?", "Who may?"))
                new = rng.choice((1, 2, 8, 24))
                try:
                    weights, tokens, cached = (self._streamed if rng.random() < 0.5 else self._whole)(
                        client, prompt, new
                    )
                except openai.OpenAIError as error:
                    weights, tokens, cached = {f"{type(error).__name__}: {error}"}, [], 0
                self._check(weights, prompt, new, tokens, cached)

    def _whole(self, client: openai.OpenAI, prompt: str, new: int) -> tuple[set[str], list[int], int]:
        answer = complete(client, prompt, new)
        return {answer.system_fingerprint}, tokens_of(answer), answer.usage.prompt_tokens_details.cached_tokens

    def _streamed(self, client: openai.OpenAI, prompt: str, new: int) -> tuple[set[str], list[int], int]:
        weights, tokens = set[str](), list[int]()
        for part in complete(client, prompt, new, stream=True):
            weights.add(part.system_fingerprint)
            tokens += part.choices[0].token_ids
        return weights, tokens, 0

    def _check(self, weights: set[str], prompt: str, new: int, tokens: list[int], cached: int) -> None:
        with self._lock:
            self.served_by.update(weights)
            self.cached += cached
            if len(weights) != 1 or (name := next(iter(weights))) not in self.checkpoints.models:
                self.wrong.append(f"{prompt!r} was answered by {weights}")
            elif tokens != (right := self.checkpoints.expected(name, prompt, 24)[:new]):
                self.wrong.append(f"{prompt!r} got {tokens} of {name}, which says {right}")

    def stop(self) -> None:
        self._stop.set()
        for client in self._clients:
            client.result()
        self._pool.shutdown()


class Unversioned(Served):
    """A fleet whose processes leave the version out of the names of pages."""

    PROGRAM = """
import runpy, sys
import kvcache.replica.hashing as hashing
seeded = hashing._seeded
hashing._seeded = lambda algorithm, size, salt, weights=None: seeded(algorithm, size, salt)
sys.argv = ["pagewire", *sys.argv[1:]]
runpy.run_module("pagewire", run_name="__main__", alter_sys=True)
"""

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", self.PROGRAM, "serve", *arguments]


def start_each(served: Served, checkpoints: Checkpoints, prefills: int, decodes: int) -> None:
    """Starts the front and each process on its own, with the weights of the first seed."""
    own = ("--model", str(checkpoints.paths[checkpoints.names[0]]))
    front = ("--address-file", str(served.addresses), "--http-port", "0", "--served-model-name", "pagewire")
    served.start("front", "front", *front, *own, "--checkpoints", str(checkpoints.folder))
    for role, count in (("prefill", prefills), ("decode", decodes)):
        for number in range(count):
            served.join(role, f"{role[0]}{number + 1}", *own)
    served.until_there(prefills, decodes)


def under_load(served: Served, checkpoints: Checkpoints, switches: int, clients: int, seed: int) -> Load:
    """Changes the weights under load, each time to other ones. Returns what the clients have seen."""
    rng, load, at = random.Random(seed), Load(served, checkpoints, clients, seed), 0
    try:
        for _ in range(switches):
            before = load.count
            at = (at + rng.randrange(1, len(SEEDS))) % len(SEEDS)
            roll(served, checkpoints.paths[checkpoints.names[at]])
            served.until(lambda before=before: load.count >= before + rng.randrange(1, 30), "answers")
    finally:
        load.stop()
    return load


def test_without_the_version_in_the_chain_answers_are_wrong(tmp_path: Path, checkpoints: Checkpoints) -> None:
    made = Unversioned(tmp_path)
    try:
        start_each(made, checkpoints, 1, 1)
        load = under_load(made, checkpoints, 4, clients=4, seed=5)
    finally:
        made.close()
    assert any("got" in wrong for wrong in load.wrong), load.served_by


@pytest.mark.long
@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (2, 2), (2, 3)])
def test_two_hundred_switches_under_load(tmp_path: Path, checkpoints: Checkpoints, prefills: int, decodes: int) -> None:
    made = Served(tmp_path)
    try:
        start_each(made, checkpoints, prefills, decodes)
        load = under_load(made, checkpoints, 200, clients=8, seed=prefills + decodes)
        assert not load.wrong, load.wrong[:3]
        made.until_nothing_is_held()
    finally:
        made.close()


def test_under_load_no_answer_mixes_versions_and_nothing_fails(served: Served, checkpoints: Checkpoints) -> None:
    load = under_load(served, checkpoints, 6, clients=6, seed=5)
    assert not load.wrong, load.wrong[:3]
    assert len(load.served_by) > 1, load.served_by
    stats = served.until_nothing_is_held()
    assert not any(one["failed"] for name, one in stats.items() if name.startswith("decode")), stats
    assert load.cached


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("nothing-here", "(prefill|decode)-[12]: model directory '.*/nothing-here' does not exist"),
        ("broken", "(prefill|decode)-[12]: model directory '.*/broken' cannot be loaded"),
        (
            "larger",
            "(prefill|decode)-[12]: model directory '.*/larger' has another model: .*hidden_size is 256 there, and 128",
        ),
        ("../step-0", "model is '../step-0': a directory below .* is needed"),
        ("/etc", "model is '/etc': a directory below .* is needed"),
        (".", "model is '.': a directory below"),
    ],
)
def test_a_load_that_fails_says_why_and_changes_nothing(
    served: Served, checkpoints: Checkpoints, model: str, told: str
) -> None:
    broken, larger = checkpoints.folder / "broken", checkpoints.folder / "larger"
    if not broken.exists():
        tiny_llama(7).save_pretrained(broken)
        (broken / "model.safetensors").write_bytes(b"no tensors")
        kind: Any = type(tiny_llama())
        kind(type(tiny_llama().config)(vocab_size=259, hidden_size=256, num_hidden_layers=1)).save_pretrained(larger)
    before = {name: one["weights"] for name, one in served.get("/fleet").items()}
    answer = roll(served, model, 400)["error"]
    assert re.search(told, answer["message"]), answer
    assert answer["param"] == "model"
    assert {name: one["weights"] for name, one in served.get("/fleet").items()} == before
    (weights,) = set(before.values())
    prompt = HEAD + model
    assert tokens_of(complete(served.client, prompt)) == checkpoints.expected(weights, prompt, 24)


def test_a_process_that_is_restarted_gets_the_weights_of_the_others(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """It is started with the directory of before, as a supervisor would do."""
    made, names = Served(tmp_path), checkpoints.names
    own = ("--model", str(checkpoints.paths[names[0]]))
    front = ("--address-file", str(made.addresses), "--http-port", "0", "--served-model-name", "pagewire")
    try:
        made.start("front", "front", *front, *own, "--checkpoints", str(checkpoints.folder))
        for name in ("p1", "p2", "d1", "d2"):
            made.join("prefill" if name[0] == "p" else "decode", name, *own)
        made.until_there(2, 2)
        roll(made, checkpoints.paths[names[2]])
        for name in ("p1", "d1"):
            made.signal(name, signal.SIGKILL)
            made.ended(name)
            made.until(lambda name=name: name not in made.get("/fleet"), f"the loss of {name}")
            role, where = "prefill" if name[0] == "p" else "decode", ("--address-file", str(made.addresses))
            made.start(f"{name} again", role, "--name", name, *where, *COMMON, *own)

        def weights() -> list[str]:
            return [one["weights"] for one in made.get("/fleet").values()]

        made.until(lambda: weights() == 4 * [names[2]], "the weights of the others")
        for number in range(8):
            prompt = f"{number}: {HEAD}"
            answer = complete(made.client, prompt)
            assert answer.system_fingerprint == names[2]
            assert tokens_of(answer) == checkpoints.expected(names[2], prompt, 24)
    finally:
        made.close()


def test_without_checkpoints_no_client_changes_the_weights(tmp_path: Path, checkpoints: Checkpoints) -> None:
    made = Served(tmp_path)
    try:
        made.start("front", "front", "--address-file", str(made.addresses), "--http-port", "0")
        made.until(made.addresses.exists, "the front")
        told = roll(made, checkpoints.paths[checkpoints.names[0]], 404)
        assert "Not Found" in told["error"]["message"]
    finally:
        made.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pagewire.serve.test_rollout")
    for name, default in (("switches", 200), ("prefills", 2), ("decodes", 2), ("clients", 8), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--without", choices=["version"])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder) / "checkpoints")
        made = (Unversioned if given.without else Served)(Path(folder))
        try:
            start_each(made, checkpoints, given.prefills, given.decodes)
            begun = time.monotonic()
            load = under_load(made, checkpoints, given.switches, given.clients, given.seed)
            took = time.monotonic() - begun
        finally:
            made.close()
    told = f"{load.count} requests, {given.switches} switches, {len(load.wrong)} wrong, {took:.0f} s: {load.wrong[:1]}"
    sys.stdout.write(f"{told}\n")
    return int(bool(load.wrong))


if __name__ == "__main__":
    sys.exit(main())
