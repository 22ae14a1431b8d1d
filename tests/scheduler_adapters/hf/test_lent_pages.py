"""Pulls a prefix from another process that has computed it, with real processes and NIXL, for the small Llama and for
Bamba. Bamba has recurrent layers, so the source sends a state with the pages. States and pages share one memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
import pytest

from scheduler_adapters.hf.runner import load_model
from scheduler_adapters.hf.tiny import ByteTokenizer
from scheduler_adapters.loop import Request, ServingLoop
from scheduler_adapters.service.server import build_loop
from tests import forked
from tests.scheduler_adapters.hf.lending_source import CONFIG, serve
from tests.scheduler_adapters.serving import own_tokens
from transfer import Lent, PageExchange, PullEvent

pytestmark = pytest.mark.slow

# The 185 tokens have 23 full pages.
HEAD = ByteTokenizer().encode("Whoever has computed a prefix has it for all. " * 4)
PROMPT = [*HEAD, *ByteTokenizer().encode("And what follows is mine.")[1:]]
NEW = 8
QUICK = {"handshake_timeout_s": 5.0, "heartbeat_s": 0.2, "dead_after_s": 1.0}


class LentReader:
    """A serving loop that asks the source for the pages of each prompt before it computes the missing pages."""

    def __init__(self, model: str | None, tp: int = 1) -> None:
        self.loop: ServingLoop[Any]
        self.loop, compatibility = build_loop(msgspec.structs.replace(CONFIG, model=model, tp=tp))
        self.manager = self.loop.manager
        self.exchange = PageExchange(self.manager, "d", compatibility=compatibility, replica_options=QUICK)

    def event(self, kind: type) -> Any:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for happened in self.exchange.poll():
                if isinstance(happened.event, kind) and getattr(happened.event, "safe", True):
                    return happened
            time.sleep(1e-3)
        raise TimeoutError(kind)

    def generate(self, address: str, then: Callable[[str], None] = lambda _: None) -> tuple[list[int], int]:
        """Generates tokens for the prompt. Returns the tokens, and the number of the prompt's tokens that were not
        computed here. `then` is called at each stage.
        """
        request = Request("mine", PROMPT, NEW)
        context = self.loop.context_for(request)
        self.manager.external_claim("mine")
        self.exchange.ask(0, "k", address, "p/0", self.manager.contents.digests(context), timeout_s=10.0)
        then("asked")
        lent = self.event(Lent).event
        then("lent")
        if lent.source is not None:
            pending = self.manager.import_block_table(context, lent.table)
            self.exchange.pull("k", lent.source, pending, 20.0)
            then("pulling")
            happened = self.event(PullEvent)
            if happened.event.error:
                self.manager.cancel_import(pending)
            else:
                self.manager.commit_import(context, pending, happened.proof)
        found = context.start_idx
        assert self.manager.maybe_reserve(context)
        self.loop.adopt(request, context)
        tokens = [output.token for output in iter(self.step, None) if output.token is not None]
        return tokens, found

    def step(self) -> Any:
        while self.loop.has_work:
            for output in self.loop.step():
                return output
        return None


@pytest.fixture(scope="module", params=["llama", "bamba"])
def folder(request: pytest.FixtureRequest, shared_model: Any, tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """Returns the directory of the model. The small Llama has None."""
    if request.param == "llama":
        return None
    path = tmp_path_factory.mktemp("bamba")
    shared_model("bamba").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def expected(folder: str | None) -> list[int]:
    return own_tokens(load_model(folder, CONFIG.seed), PROMPT, NEW)


@pytest.fixture
def source(folder: str | None) -> Iterator[tuple[BaseProcess, Connection, str]]:
    process, pipe = forked.start(serve, "p", "tcp://127.0.0.1:0", 0, folder)
    yield process, pipe, pipe.recv()
    process.kill()
    process.join()


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def reader(request: pytest.FixtureRequest, folder: str | None) -> Iterator[LentReader]:
    made = LentReader(folder, request.param)
    yield made
    assert made.manager.num_held_blocks == 0
    made.manager.check()
    made.exchange.close()
    made.manager.close()


def told(pipe: Connection, *command: Any) -> tuple[int, int]:
    """Sends a command to the source. Returns the source's numbers of held pages and open leases after the command."""
    pipe.send(command)
    found: tuple[int, int] = pipe.recv()
    return found


@pytest.mark.each_value
def test_tokens_are_those_of_one_process_and_nothing_stays_held(
    source: tuple[BaseProcess, Connection, str], reader: LentReader, expected: list[int]
) -> None:
    _, pipe, address = source
    assert told(pipe, "run", HEAD) == (0, 0)
    assert reader.generate(address) == (expected, 184)
    deadline = time.monotonic() + 30
    while told(pipe, "held") != (0, 0):
        assert time.monotonic() < deadline
    assert reader.exchange.totals()[1] == 0


@pytest.mark.each_value
@pytest.mark.parametrize("when", ["asked", "lent", "pulling"])
def test_a_source_that_is_killed_costs_time_and_no_token(
    source: tuple[BaseProcess, Connection, str], reader: LentReader, expected: list[int], when: str
) -> None:
    process, pipe, address = source
    told(pipe, "run", HEAD)

    def kill(now: str) -> None:
        if now == when:
            process.kill()
            process.join()

    tokens, found = reader.generate(address, kill)
    assert tokens == expected
    assert found in (0, 184)


@pytest.mark.each_value
@pytest.mark.parametrize("when", ["asked", "lent"])
def test_a_source_that_forgets_gives_fewer_pages_or_what_it_has_lent(
    source: tuple[BaseProcess, Connection, str], reader: LentReader, expected: list[int], when: str
) -> None:
    _, pipe, address = source
    told(pipe, "run", HEAD)

    def forget(now: str) -> None:
        if now == when:
            told(pipe, "reset")
            # While the pages are lent, another prompt takes 38 of the 41 pages that are left.
            told(pipe, "run", [7 + token % 200 for token in range(300)])

    tokens, found = reader.generate(address, forget)
    assert tokens == expected
    assert found == 184 if when == "lent" else found in (0, 184)
    while told(pipe, "held")[0]:
        time.sleep(1e-2)
