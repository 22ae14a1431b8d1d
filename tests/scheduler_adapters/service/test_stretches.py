"""A prompt is pulled in two stretches from two real processes, with NIXL and the small Llama. Faults happen between the
stretches.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import pytest

from scheduler_adapters.hf.runner import load_model
from scheduler_adapters.hf.tiny import ByteTokenizer
from scheduler_adapters.loop import Request, ServingLoop
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.peer_prefixes import PeerPrefixes
from scheduler_adapters.service.server import build_loop
from tests import forked
from tests.scheduler_adapters.hf.lending_source import CONFIG, serve
from tests.scheduler_adapters.serving import own_tokens
from transfer import PageExchange

pytestmark = pytest.mark.slow

ALL = ByteTokenizer().encode("Whoever has computed a prefix has it for all. " * 4)  # The 185 tokens have 23 full pages.
HEAD = ALL[:80]  # ten of them
PROMPT = [*ALL, *ByteTokenizer().encode("And what follows is mine.")[1:]]
NEW, SIZE = 8, CONFIG.page_size
QUICK = {"handshake_timeout_s": 5.0, "heartbeat_s": 0.2, "dead_after_s": 1.0}


class SourceProcess(NamedTuple):
    """A source process."""

    name: str
    process: BaseProcess
    pipe: Connection
    address: str

    def told(self, *command: Any) -> tuple[int, int]:
        """Sends a command to the source. Returns the source's numbers of held pages and open leases after the
        command.
        """
        self.pipe.send(command)
        held: tuple[int, int] = self.pipe.recv()
        return held


class StretchReader:
    """A serving loop that asks both sources for the pages of each prompt, as a prefill process does."""

    def __init__(self) -> None:
        self.loop: ServingLoop[Any]
        self.loop, compatibility = build_loop(CONFIG)
        self.manager = self.loop.manager
        self.exchange = PageExchange(self.manager, "d", compatibility=compatibility, replica_options=QUICK)
        self.peers = PeerPrefixes(self.manager, self.exchange)
        self.asked = list[str]()

    def generate(self, sources: list[SourceProcess], then: Callable[[str, str], None]) -> tuple[list[int], int]:
        """Generates tokens for the prompt. Returns the tokens, and the number of the prompt's tokens that were pulled.
        `then` is called with each source that is asked or read from.
        """
        ask, pull = self.exchange.ask, self.exchange.pull

        def asking(replica: int, key: str, address: str, *rest: Any) -> None:
            self.asked.append(address)
            then("asking", address)
            ask(replica, key, address, *rest)

        def pulling(key: str, sources: Any, *rest: Any) -> None:
            for source in sources:
                then("pulling", source.address)
            pull(key, sources, *rest)

        self.exchange.ask, self.exchange.pull = asking, pulling  # type: ignore[method-assign]
        request = Request("mine", PROMPT, NEW)
        context = self.loop.context_for(request)
        found: list[int] = []
        self.loop.on_admit = lambda _key, _replica, cached: found.append(cached)
        assert self.peers.begin(request, context, [msg.KVSource(one.address, (f"{one.name}/0",)) for one in sources])
        deadline, waiting = time.monotonic() + 60, None
        while waiting is None:
            assert time.monotonic() < deadline
            for happened in self.exchange.poll():
                waiting = waiting or self.peers.on_event(happened)
            waiting = next(iter(self.peers.poll()), waiting)
            time.sleep(1e-3)
        self.loop.add(*waiting)
        tokens = list[int]()
        while self.loop.has_work:
            tokens += [output.token for output in self.loop.step() if output.token is not None]
        return tokens, found[0]

    def settle(self) -> None:
        """Waits until no pull is in flight and no question is open."""
        deadline = time.monotonic() + 30
        while self.exchange.open_pulls or self.manager.num_held_blocks:
            assert time.monotonic() < deadline
            self.exchange.poll()
            time.sleep(1e-3)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return own_tokens(load_model(None, CONFIG.seed), PROMPT, NEW)


@pytest.fixture
def start() -> Iterator[Callable[..., SourceProcess]]:
    made = list[BaseProcess]()

    def run(name: str, *arguments: Any) -> SourceProcess:
        process, pipe = forked.start(serve, name, *arguments)
        made.append(process)
        return SourceProcess(name, process, pipe, pipe.recv())

    yield run
    for process in made:
        process.kill()
        process.join()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the sources more time for answers, because the test machine may be busy."""
    monkeypatch.setattr("scheduler_adapters.service.peer_prefixes._ASK_S", 10.0)


@pytest.fixture
def reader() -> Iterator[StretchReader]:
    made = StretchReader()
    yield made
    made.settle()
    assert not made.peers._open
    made.manager.check()
    made.exchange.close()
    made.manager.close()


def two(start: Callable[..., SourceProcess]) -> tuple[SourceProcess, SourceProcess]:
    """Starts two sources. The first source has the first pages of the prompt. The second source has all pages except
    the first five.
    """
    first, second = start("p"), start("q")
    first.told("run", HEAD)
    second.told("run", ALL)
    second.told("tail", ALL, 5)
    return first, second


def given_back(*sources: SourceProcess) -> None:
    deadline = time.monotonic() + 20  # If the reader does not know a lease, the lease has to expire.
    for source in sources:
        while source.told("held") != (0, 0):
            assert time.monotonic() < deadline
            time.sleep(1e-2)


@pytest.mark.parametrize("turned", [False, True])
def test_the_head_from_one_process_and_the_tail_from_another(
    start: Any, reader: StretchReader, expected: list[int], turned: bool
) -> None:
    first, second = two(start)
    order = [second, first] if turned else [first, second]
    assert reader.generate(order, lambda *_: None) == (expected, 23 * SIZE)
    assert reader.peers.counts == {"pulled": 1}
    assert reader.peers.pages_pulled == 23
    page = sum(layout.page_bytes for layout in reader.manager.layouts)
    assert reader.exchange.totals() == (23 * page, 0)
    given_back(first, second)


@pytest.mark.each_value
@pytest.mark.parametrize("when", ["asking", "pulling"])
@pytest.mark.parametrize("fault", ["killed", "stopped", "restarted", "reset"])
def test_a_fault_of_the_second_source_does_not_affect_the_first_stretch(
    start: Any, reader: StretchReader, expected: list[int], when: str, fault: str
) -> None:
    first, second = two(start)
    alive, reached = [first], list[str]()

    def happens(now: str, address: str) -> None:
        if (now, address) != (when, second.address) or reached:
            return
        reached.append(now)
        pid = second.process.pid
        assert pid is not None
        if fault == "reset":
            second.told("reset")
            # The other prompt takes all pages that it can get.
            second.told("run", [7 + token % 200 for token in range(300)])
        elif fault == "stopped":
            os.kill(pid, signal.SIGSTOP)
        else:
            second.process.kill()
            second.process.join()
        if fault == "restarted":
            alive.append(start("q", second.address))  # The new process has no page of the prompt.
            assert alive[-1].address == second.address

    tokens, found = reader.generate([first, second], happens)
    assert reached
    assert tokens == expected
    # Lent pages can still be read after a reset. A new source must answer the handshake first.
    assert found == (23 if (when, fault) == ("pulling", "reset") else 10) * SIZE
    if fault == "stopped":
        os.kill(second.process.pid or 0, signal.SIGCONT)
    if fault in ("stopped", "reset"):
        alive.append(second)
    reader.settle()
    given_back(*alive)


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_first_source_that_is_gone_leaves_the_second(
    start: Any, reader: StretchReader, expected: list[int], fault: str
) -> None:
    first, second = start("p"), start("q")
    first.told("run", HEAD)
    second.told("run", ALL)

    def happens(now: str, address: str) -> None:
        if now == "asking" and address == first.address and first.process.pid is not None:
            os.kill(first.process.pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)

    assert reader.generate([first, second], happens) == (expected, 23 * SIZE)
    assert reader.asked == [first.address, second.address]
    given_back(second)


@pytest.mark.parametrize("fault", ["", "killed", "stopped"])
def test_two_sources_of_the_whole_prompt_are_read_at_once_and_one_of_them_is_enough(
    start: Any, reader: StretchReader, expected: list[int], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.pull.shared_pull.ONE_SOURCE_BYTES", 0)
    monkeypatch.setattr("scheduler_adapters.service.peer_prefixes._MOST_WAIT_S", 10.0)
    monkeypatch.setattr("scheduler_adapters.service.peer_prefixes._LEAST_WAIT_S", 10.0)
    sources = start("p"), start("q")
    for source in sources:
        source.told("run", ALL)
    read = list[str]()

    def happens(now: str, address: str) -> None:
        if now == "pulling":
            read.append(address)
        if fault and (now, address) == ("pulling", sources[1].address) and sources[1].process.pid is not None:
            os.kill(sources[1].process.pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)

    assert reader.generate([*sources], happens) == (expected, 23 * SIZE)
    assert sorted(read) == sorted(source.address for source in sources)
    assert reader.peers.counts == {"pulled": 1}
    assert reader.peers.pages_pulled == 23
    reader.settle()
    if fault == "stopped":
        os.kill(sources[1].process.pid or 0, signal.SIGCONT)
    given_back(*(sources[:1] if fault == "killed" else sources))


def test_a_tail_that_the_second_source_has_only_in_host_memory(
    start: Any, reader: StretchReader, expected: list[int]
) -> None:
    first, second = start("p"), start("q", "tcp://127.0.0.1:0", 8 << 20)
    first.told("run", HEAD)
    second.told("run", ALL)
    for seed in (7, 11):  # The other prompts take all pages of the source.
        second.told("run", [seed + token % 200 for token in range(480)])
    assert reader.generate([first, second], lambda *_: None) == (expected, 23 * SIZE)
    given_back(first, second)
