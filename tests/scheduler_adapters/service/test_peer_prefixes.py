"""A prefill process pulls a prefix that another process has computed. The tests check tokens, counters and failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kvcache import KVCacheParams, PagedKVCacheManager, TextContext, page_rows
from kvcache.replica.block_table import BlockTable
from scheduler_adapters.hf.tiny import ByteTokenizer
from scheduler_adapters.loop import Request
from scheduler_adapters.pull_or_compute import PullOrCompute
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.fleet import Fleet
from scheduler_adapters.service.peer_prefixes import PeerPrefixes
from scheduler_adapters.service.stretches import FromTheFront
from tests import forked
from tests.kvcache.build import evict_idle
from tests.scheduler_adapters.server_config import server_config
from tests.scheduler_adapters.service.processes import DEFAULT, NEW, Service, Side
from tests.scheduler_adapters.serving import own_tokens
from transfer.pull.asking import Lent
from transfer.pull.exchange import ExchangeEvent
from transfer.pull.lease import LeaseRef
from transfer.pull.lending import LENT_S
from transfer.pull.pull_state import PullEvent, PullShare
from transfer.pull.source import Source

# The 221 tokens have 13 full pages.
HEAD = ByteTokenizer().encode("Whoever has computed a prefix has it for all that ask. " * 4)
FIRST, SECOND = ([*HEAD, *ByteTokenizer().encode(text)[1:]] for text in ("First?", "Second? " * 5))
PAGES = len(HEAD) // 16


@pytest.fixture(scope="module")
def expected(model: Any) -> list[int]:
    return own_tokens(model, SECOND, NEW)


@pytest.fixture(autouse=True)
def _patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the sources more time for answers, because the test machine may be busy, unless the test has a clock."""
    if "answers" not in request.fixturenames:
        monkeypatch.setattr("scheduler_adapters.service.peer_prefixes._ASK_S", 15.0)


@pytest.fixture
def start(model: Any, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    services = []

    def make(decode: Side = DEFAULT, **prefill: Any) -> Service:
        service = Service(model, tmp_path, Side(**{"count": 2, **prefill}), decode)
        services.append(service)
        links = [one for decode in service.decodes.values() for one in decode.connections]
        service.until(lambda: all(one.welcome for one in links), "the connections")
        return service

    yield make
    for service in services:
        service.close()


def submit(
    service: Service, name: str, prompt: list[int], prefill: str, *, new: int = NEW, decode: str = "d0", **options: Any
) -> None:
    service.tokens[name] = []
    submitted = msg.Submit(request_id=name, prompt=tuple(prompt), max_new_tokens=new, prefill=prefill, **options)
    service.decodes[decode].submit(submitted)


def served(service: Service, name: str, prompt: list[int], prefill: str, **options: Any) -> list[int]:
    submit(service, name, prompt, prefill, **options)
    service.until(lambda: name in service.ended, "the end")
    assert service.ended[name].error == ""
    return service.tokens[name]


def outcome(service: Service, name: str = "p1") -> dict[str, int]:
    return service.prefills[name].stats().prefixes


def test_one_process_pulls_what_another_has_computed_and_computes_the_rest(
    start: Callable[..., Service], expected: list[int]
) -> None:
    service = start()
    served(service, "first", FIRST, "p0")
    assert served(service, "second", SECOND, "p1") == expected
    assert outcome(service) == {"pulled": 1}
    assert service.ended["second"].cached_tokens == 16 * PAGES
    stats = service.prefills["p1"].stats()
    page_bytes = sum(layout.page_bytes for layout in service.loops["p1"].manager.layouts)
    assert (stats.pages_pulled, stats.bytes_pulled) == (PAGES, PAGES * page_bytes)
    assert (stats.prompt_tokens, stats.cached_tokens) == (len(SECOND), 16 * PAGES)
    assert service.exchanges["p0"].lending.pages_lent == PAGES
    service.assert_nothing_held()
    # The prefix is cached at this process now, so it asks no source.
    assert served(service, "again", SECOND, "p1") == expected
    assert outcome(service) == {"pulled": 1}


def test_the_times_of_pulls_and_prompts_are_measured_from_the_second_contact_on(start: Callable[..., Service]) -> None:
    service = start()
    for number in range(3):
        served(service, f"a{number}", [number, *FIRST], "p0")
        assert (service.prefills["p1"].stats().taken_s["pull"] > 0) == (number > 1)
        served(service, f"b{number}", [number, *SECOND], "p1")
    stats = service.prefills["p1"].stats()
    assert outcome(service) == {"pulled": 3}
    assert 0 < stats.taken_s["pull"] < 5
    assert 0 < stats.taken_s["compute"] < 5
    assert set(stats.misjudged_s) == {"pull", "compute"}


@pytest.mark.parametrize("prefill", [{"dp": 2}, {"tp": 2}])
def test_each_replica_of_a_source_is_asked_and_shards_are_read(
    start: Callable[..., Service], expected: list[int], prefill: dict[str, int]
) -> None:
    service = start(**prefill)
    # The first replica has a request, so the prompt goes to the last replica.
    service.loops["p0"].manager.external_claim("busy", 0)
    served(service, "first", FIRST, "p0")
    service.loops["p0"].manager.release("busy")
    assert served(service, "second", SECOND, "p1") == expected
    assert outcome(service) == {"pulled": 1}
    service.assert_nothing_held()


def test_a_source_that_has_forgotten_costs_a_question(start: Callable[..., Service], expected: list[int]) -> None:
    service = start()
    served(service, "first", FIRST, "p0")
    for name in ("p0", "d0"):  # If d0 kept its pages, the decode process would name itself as a source.
        service.loops[name].manager.reset_prefix_cache()
    assert served(service, "second", SECOND, "p1") == expected
    assert outcome(service) == {"stale": 1}
    service.assert_nothing_held()


def test_sources_that_a_client_names_are_asked_in_turn(start: Callable[..., Service], expected: list[int]) -> None:
    service = start()
    served(service, "first", FIRST, "p0")
    known = msg.KVSource(service.exchanges["p0"].address, ("p0/0",))
    wrong = msg.KVSource(known.address, ("p7/0",))
    assert served(service, "second", SECOND, "p1", kv_sources=(wrong, known)) == expected
    assert outcome(service) == {"pulled": 1}
    # The address is not allowed as a source, and no process uses it.
    far = msg.KVSource("tcp://192.0.2.1:9", ("p7/0",))
    other = [*range(100, 190)]
    # With this estimate a pull of such a short prompt does not pay.
    service.prefills["p1"].peers.estimate = PullOrCompute()
    served(service, "third", other, "p1", kv_sources=(far,))
    assert outcome(service) == {"pulled": 1, "unanswered": 1}
    service.assert_nothing_held()


def turns(service: Service, model: Any) -> tuple[list[int], list[int], int]:
    """Serves the first turn of a conversation. Returns the prompt of the next turn, the model's answer to this prompt,
    and the number of full pages of the first turn.
    """
    answer = served(service, "turn 1", FIRST, "p0", new=100, ignore_eos=True)
    prompt = [*FIRST, *answer, *ByteTokenizer().encode("And then?")[1:]]
    return prompt, own_tokens(model, prompt, NEW), (len(FIRST) + len(answer) - 1) // 16


@pytest.mark.few(1)
@pytest.mark.parametrize("decode", [{}, {"tp": 2}, {"dp": 2}])
def test_a_next_turn_comes_from_the_decode_process_that_has_answered(
    start: Callable[..., Service], model: Any, decode: dict[str, int]
) -> None:
    """Only the decode process has the tokens of the answer. With the pages of the decode process, prefill computes only
    the new turn.
    """
    service = start(Side(**decode), count=1)
    prompt, expected, pages = turns(service, model)
    assert served(service, "turn 2", prompt, "p0") == expected
    assert outcome(service, "p0") == {"pulled": 1}
    assert service.ended["turn 2"].cached_tokens == 16 * pages
    assert service.prefills["p0"].stats().pages_pulled == pages - len(FIRST) // 16
    service.assert_nothing_held()


def test_a_next_turn_elsewhere_comes_from_the_decode_process_that_its_client_names(
    start: Callable[..., Service], model: Any
) -> None:
    service = start(Side(count=2))
    prompt, expected, pages = turns(service, model)
    named = (msg.KVSource(service.exchanges["d0"].address, ("d0/0",)),)
    assert served(service, "turn 2", prompt, "p1", decode="d1", kv_sources=named) == expected
    assert outcome(service) == {"pulled": 1}
    assert service.ended["turn 2"].cached_tokens == 16 * pages
    service.assert_nothing_held()


def test_pages_of_another_size_are_not_offered(start: Callable[..., Service], model: Any) -> None:
    service = start(Side(page_size=32), count=1)
    prompt, expected, _ = turns(service, model)
    assert served(service, "turn 2", prompt, "p0") == expected
    assert outcome(service, "p0") == {}


def test_if_computing_is_quicker_no_source_is_asked(start: Callable[..., Service], expected: list[int]) -> None:
    service = start()
    estimate = service.prefills["p1"].peers.estimate
    for tokens in (10, 1000):
        estimate.pull.add(tokens, 60.0)
        estimate.compute.add(tokens, 1e-6 * tokens)
    served(service, "first", FIRST, "p0")
    assert served(service, "second", SECOND, "p1") == expected
    assert outcome(service) == {"computed": 1}
    assert service.exchanges["p0"].lending.pages_lent == 0


def test_whether_a_pull_pays_depends_on_the_pages_that_the_source_has(start: Callable[..., Service]) -> None:
    """A source with a single page of a prompt is not asked, however much of the prompt is missing."""
    service = start()
    estimate = service.prefills["p1"].peers.estimate
    for tokens in (16, 1000):
        estimate.pull.add(tokens, 0.003)
        estimate.compute.add(tokens, 1e-4 * tokens)
    served(service, "first", FIRST, "p0")
    known = service.exchanges["p0"].address, ("p0/0",)
    for number, tokens in enumerate((16, 160, 0)):
        served(service, f"{number}", [number, *FIRST], "p1", kv_sources=(msg.KVSource(*known, tokens),))
    assert outcome(service) == {"computed": 1, "stale": 2}


def test_without_room_for_lent_pages_they_are_given_back_and_nothing_fails(
    start: Callable[..., Service], expected: list[int]
) -> None:
    service = start(rows=1)
    served(service, "first", FIRST, "p0")
    manager = service.loops["p1"].manager
    manager.external_claim("hog")
    submit(service, "second", SECOND, "p1")
    service.until(lambda: outcome(service), "the outcome")
    assert outcome(service) == {"no_room": 1}
    manager.release("hog")
    service.until(lambda: "second" in service.ended, "the end")
    assert service.tokens["second"] == expected
    service.until(lambda: not service.exchanges["p0"].lending.num_leases, "the end of the lease", LENT_S / 2)
    service.assert_nothing_held()


def test_pages_that_were_pulled_and_evicted_before_their_use_are_computed(
    start: Callable[..., Service], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start()
    served(service, "first", FIRST, "p0")
    peers, manager = service.prefills["p1"].peers, service.loops["p1"].manager
    on_event = peers.on_event

    def lost(happened: Any) -> Any:
        waiting = on_event(happened)
        manager.reset_prefix_cache()
        return waiting

    monkeypatch.setattr(peers, "on_event", lost)
    assert served(service, "second", SECOND, "p1", kv_sources=known(service, "p0")) == expected
    assert outcome(service) == {"pulled": 1}
    assert service.ended["second"].cached_tokens == 0


def known(service: Service, *names: str) -> tuple[msg.KVSource, ...]:
    return tuple(msg.KVSource(service.exchanges[name].address, (f"{name}/0",)) for name in names)


def forget_head(service: Service, name: str, tokens: list[int], pages: int) -> None:
    """Removes the first pages of a prompt from a process."""
    service.assert_nothing_held()
    manager = service.loops[name].manager
    wanted = manager.contents.digests(TextContext([*tokens, 0], 4096, "tail"), pages)
    held, _ = manager.contents.lease("tail", 0, wanted, 100)
    evict_idle(manager)
    manager.end_lease(held)


def head_and_tail(start: Callable[..., Service]) -> Service:
    """The prompt has thirteen pages. p0 has the first six of these pages, and p2 has all but the first four."""
    service = start(count=3)
    served(service, "head", FIRST[:100], "p0")
    served(service, "all", FIRST, "p2")
    forget_head(service, "p2", FIRST, 4)
    return service


@pytest.mark.parametrize("order", [("p0", "p2"), ("p2", "p0")])
def test_the_head_and_the_tail_are_pulled_from_two_sources_in_whatever_order_they_are_named(
    start: Callable[..., Service], expected: list[int], order: tuple[str, str]
) -> None:
    service = head_and_tail(start)
    lent_before = [service.exchanges[name].lending.pages_lent for name in ("p0", "p2")]
    assert served(service, "second", SECOND, "p1", kv_sources=known(service, *order)) == expected
    stats = service.prefills["p1"].stats()
    assert stats.prefixes == {"pulled": 1}
    assert stats.pages_pulled == PAGES
    assert service.ended["second"].cached_tokens == 16 * PAGES
    lent = [service.exchanges[name].lending.pages_lent for name in ("p0", "p2")]
    assert [now - before for now, before in zip(lent, lent_before, strict=True)] == [6, PAGES - 6]  # no page twice
    service.assert_nothing_held()


def test_a_tail_that_fails_leaves_the_head_and_who_failed_is_not_asked_again(
    start: Callable[..., Service], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = head_and_tail(start)
    pull = service.exchanges["p1"].pull

    def stopped(key: str, sources: Any, *rest: Any) -> None:
        if sources[0].engine_id == "p2/0":
            service.exchanges["p2"].revoke(sources[0], "stopped")
            service.until(lambda: not service.exchanges["p2"].lending.num_leases, "the end of the lease")
        pull(key, sources, *rest)

    monkeypatch.setattr(service.exchanges["p1"], "pull", stopped)
    assert served(service, "second", SECOND, "p1", kv_sources=known(service, "p2", "p0")) == expected
    assert outcome(service) == {"pulled": 1}
    assert service.prefills["p1"].stats().pages_pulled == 6
    assert service.ended["second"].cached_tokens == 6 * 16
    assert service.exchanges["p1"].totals()[1] == 1
    service.assert_nothing_held()


def test_a_tail_whose_head_is_gone_meanwhile_is_given_back(
    start: Callable[..., Service], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = head_and_tail(start)
    ask = service.exchanges["p1"].ask

    def forgets(replica: int, key: str, address: str, engine: str, wanted: Any, timeout_s: float) -> None:
        ask(replica, key, address, engine, wanted, timeout_s)
        if wanted.first_page:
            service.loops["p1"].manager.reset_prefix_cache()

    monkeypatch.setattr(service.exchanges["p1"], "ask", forgets)
    began = time.monotonic()
    assert served(service, "second", SECOND, "p1", kv_sources=known(service, "p0", "p2")) == expected
    assert service.ended["second"].cached_tokens == 0
    service.assert_nothing_held()
    assert time.monotonic() - began < LENT_S / 2
    assert service.exchanges["p2"].lending.pages_lent == PAGES - 6


def test_two_sources_that_have_alternate_pages_are_not_asked_endlessly(
    start: Callable[..., Service], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FromTheFront, "most", 3)
    service = start(count=3)
    for name in ("p0", "p2"):
        served(service, f"all {name}", FIRST, name)
    manager = service.loops["p1"].manager
    ask = service.exchanges["p1"].ask

    def ask_for_one(replica: int, key: str, address: str, engine: str, wanted: Any, timeout_s: float) -> None:
        ask(replica, key, address, engine, wanted._replace(digests=wanted.digests[:32]), timeout_s)

    monkeypatch.setattr(service.exchanges["p1"], "ask", ask_for_one)
    assert served(service, "second", SECOND, "p1", kv_sources=known(service, "p0", "p2")) == expected
    assert service.prefills["p1"].stats().pages_pulled == 3
    assert outcome(service) == {"pulled": 1}
    assert manager.num_held_blocks == 0


def test_a_silent_source_leaves_time_for_the_next_one(
    start: Callable[..., Service], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.pull.exchange.LENT_S", 4.0)
    service = start(count=3)
    served(service, "all", FIRST, "p2")
    ask, engines = service.exchanges["p1"].ask, list[str]()

    def told(replica: int, key: str, address: str, engine: str, *rest: Any) -> None:
        engines.append(engine)
        ask(replica, key, address, engine, *rest)

    monkeypatch.setattr(service.exchanges["p1"], "ask", told)
    with monkeypatch.context() as patch:
        patch.setattr(service.prefills["p0"], "poll", lambda: False)  # stops its loop
        assert served(service, "second", SECOND, "p1", kv_sources=known(service, "p0", "p2")) == expected
    assert engines == ["p0/0", "p2/0"]  # A source that does not answer is not asked for the next stretch of the prompt.
    assert outcome(service) == {"pulled": 1}
    assert service.ended["second"].cached_tokens == 16 * PAGES
    service.assert_nothing_held()


def fetching(service: Service, phase: str) -> Callable[[], bool]:
    """Returns whether a prompt is in this phase. It is "fetching" while its pages are asked for, and "pulling" while
    they are read.
    """

    def reached() -> bool:
        fetches = list(service.prefills["p1"].peers._open.values())
        return bool(fetches) and (phase == "asked" or fetches[0].pending is not None)

    return reached


@pytest.mark.parametrize("phase", ["asked", "pulling"])
def test_a_source_that_dies_meanwhile_costs_time_and_no_token(
    start: Callable[..., Service], expected: list[int], phase: str
) -> None:
    service = start()
    served(service, "first", FIRST, "p0")
    submit(service, "second", SECOND, "p1")
    service.until(fetching(service, phase), phase)
    service.stop_prefill("p0")
    service.until(lambda: "second" in service.ended, "the end")
    assert service.tokens["second"] == expected
    assert sum(outcome(service).values()) == 1
    service.assert_nothing_held()


@pytest.mark.parametrize("phase", ["asked", "pulling"])
def test_a_request_that_is_cancelled_meanwhile_leaves_nothing_held(start: Callable[..., Service], phase: str) -> None:
    service = start()
    served(service, "first", FIRST, "p0")
    submit(service, "second", SECOND, "p1")
    service.until(fetching(service, phase), phase)
    service.decode.abort("second")
    service.until(lambda: "second" in service.ended, "the end")
    began, asks, lending = time.monotonic(), service.exchanges["p1"]._asks, service.exchanges["p0"].lending
    service.until(lambda: not (asks._open or lending.num_leases), "the answer, and what comes of it")
    assert time.monotonic() - began < LENT_S / 2  # Unwanted pages are given back before their lease expires.
    service.assert_nothing_held()
    assert not service.prefills["p1"].peers._open
    assert served(service, "third", FIRST, "p1")
    service.assert_nothing_held()


def test_a_process_that_drains_lends_nothing_more_and_waits_for_what_is_lent(
    start: Callable[..., Service], expected: list[int]
) -> None:
    service = start()
    served(service, "first", FIRST, "p0")
    submit(service, "second", SECOND, "p1")
    service.until(fetching(service, "pulling"), "the pull")
    p0 = service.prefills["p0"]
    p0.drain()
    assert p0.open_requests
    service.until(lambda: not p0.open_requests, "the end of the lease")
    assert p0.stats().pages_held == 0
    service.until(lambda: "second" in service.ended, "the end")
    assert service.tokens["second"] == expected
    assert served(service, "third", [*HEAD, 1, 2, 3], "p1")


# ---- several sources at once


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes even small pulls use several sources, and gives the sources more time to answer."""

    def begins(wait_s: float = 10.0) -> None:
        for name, value in (("ONE_SOURCE_BYTES", 0), ("_PROBE_BYTES", 1), ("_LEAST_BYTES", 1)):
            monkeypatch.setattr(f"transfer.pull.shared_pull.{name}", value)
        for name in ("_LEAST_WAIT_S", "_MOST_WAIT_S"):  # A busy test machine may need more time.
            monkeypatch.setattr(f"scheduler_adapters.service.peer_prefixes.{name}", wait_s)

    return begins


class Spy:
    """Records the questions, refusals and pulls of a process. It can also produce events of the process's pulls."""

    def __init__(self, service: Service, monkeypatch: pytest.MonkeyPatch, name: str = "p1") -> None:
        exchange, peers = service.exchanges[name], service.prefills[name].peers
        self.asked, self.refused, self.pulls = list[str](), list[str](), list[PullEvent]()
        self.named: list[list[str]] = []
        ask, refuse, pull, on_event = exchange.ask, exchange.refuse, exchange.pull, peers.on_event

        def asks(replica: int, key: str, address: str, engine: str, *rest: Any) -> None:
            self.asked.append(engine)
            ask(replica, key, address, engine, *rest)

        def refuses(replica: int, source: Any, reason: str) -> None:
            self.refused.append(source.engine_id)
            refuse(replica, source, reason)

        def pulls(key: str, sources: Any, *rest: Any) -> None:
            self.named.append([source.engine_id for source in sources])
            pull(key, sources, *rest)

        def hears(happened: Any) -> Any:
            if isinstance(happened.event, PullEvent):
                self.pulls.append(happened.event)
            return on_event(happened)

        for target, method, spied in (
            (exchange, "ask", asks), (exchange, "refuse", refuses), (exchange, "pull", pulls),
            (peers, "on_event", hears),
        ):  # fmt: skip
            monkeypatch.setattr(target, method, spied)

    @property
    def shares(self) -> dict[str, int]:
        """Returns the bytes that came from each source in the latest pull."""
        return {share.contact[1]: share.num_bytes for share in self.pulls[-1].shares}


def two_that_know(start: Callable[..., Service], first: list[int] = FIRST) -> Service:
    """Makes three prefill processes. p0 and p2 have the prompt cached, and p1 knows both."""
    service = start(count=3)
    for number, name in enumerate(("p0", "p2")):
        served(service, f"meets {name}", [number, *FIRST], name)
        served(service, f"met {name}", [number, *FIRST], "p1", kv_sources=known(service, name))
    served(service, "p0 has", first, "p0")
    served(service, "p2 has", FIRST, "p2")
    service.prefills["p1"].peers.estimate = PullOrCompute()
    return service


def bytes_of(service: Service, name: str, tokens: list[int]) -> torch.Tensor:
    """Returns the contents of a prompt's pages in a process."""
    manager = service.loops[name].manager
    contents = manager.contents
    held, table = contents.lease("look", 0, contents.digests(TextContext([*tokens, 0], 4096, "look")), 100)
    found = page_rows(manager.device_tensors[0][0])[list(table.groups[0])].clone()
    manager.end_lease(held)
    return found


def test_a_long_prompt_is_read_from_two_at_once_and_every_byte_is_right(
    start: Callable[..., Service], expected: list[int], large: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = two_that_know(start)
    large()
    spy = Spy(service, monkeypatch)
    assert served(service, "second", SECOND, "p1", kv_sources=known(service, "p0", "p2")) == expected
    page_bytes = sum(layout.page_bytes for layout in service.loops["p1"].manager.layouts)
    assert len(spy.pulls) == 1
    assert set(spy.shares) == {"p0/0", "p2/0"}
    assert all(spy.shares.values())
    assert sum(spy.shares.values()) == PAGES * page_bytes
    assert spy.asked == ["p0/0", "p2/0"]
    assert not spy.refused
    assert service.ended["second"].cached_tokens == 16 * PAGES
    assert set(service.prefills["p1"].peers.counts) == {"pulled"}
    assert service.prefills["p1"].stats().taken_s["pull"] > 0
    assert torch.equal(bytes_of(service, "p1", HEAD), bytes_of(service, "p2", HEAD))
    service.assert_nothing_held()


def test_a_short_prompt_holds_no_page_of_a_second_source(
    start: Callable[..., Service], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = two_that_know(start)
    spy = Spy(service, monkeypatch)
    assert served(service, "second", SECOND, "p1", kv_sources=known(service, "p0", "p2")) == expected
    assert spy.named == [["p0/0"]]
    assert "p2/0" not in spy.refused


def test_a_source_with_fewer_pages_is_read_for_these_and_the_other_source_for_the_rest(
    start: Callable[..., Service], expected: list[int], large: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = two_that_know(start, FIRST[:100])
    large()
    spy = Spy(service, monkeypatch)
    assert served(service, "second", SECOND, "p1", kv_sources=known(service, "p0", "p2")) == expected
    assert spy.named == [["p2/0", "p0/0"]]  # The first table in the list determines the pages that the import covers.
    page_bytes = sum(layout.page_bytes for layout in service.loops["p1"].manager.layouts)
    assert 0 < spy.shares["p0/0"] <= 6 * page_bytes
    assert sum(spy.shares.values()) == PAGES * page_bytes
    assert service.ended["second"].cached_tokens == 16 * PAGES
    service.assert_nothing_held()


def test_a_source_that_fails_in_a_pull_from_two_leaves_its_pages_to_the_other(
    start: Callable[..., Service], expected: list[int], large: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = two_that_know(start)
    large()
    spy, lending = Spy(service, monkeypatch), service.exchanges["p2"].lending
    pull = service.exchanges["p1"].pull

    def stopped(key: str, sources: Any, *rest: Any) -> None:
        service.exchanges["p2"].revoke(next(one for one in sources if one.engine_id == "p2/0"), "stopped")
        service.until(lambda: not lending.num_leases, "the end of the lease", poll=service.prefills["p2"].poll)
        pull(key, sources, *rest)

    monkeypatch.setattr(service.exchanges["p1"], "pull", stopped)
    assert served(service, "second", SECOND, "p1", kv_sources=known(service, "p0", "p2")) == expected
    assert [share.contact[1] for share in spy.pulls[-1].shares if share.error] == ["p2/0"]
    assert service.ended["second"].cached_tokens == 16 * PAGES
    assert service.prefills["p1"].stats().taken_s["pull"] == 0  # A pull with a failed source is not measured.
    service.assert_nothing_held()


def test_a_silent_second_source_is_not_awaited_for_long_and_its_late_pages_are_given_back(
    start: Callable[..., Service], expected: list[int], large: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = two_that_know(start)
    large(0.05)
    spy, lending = Spy(service, monkeypatch), service.exchanges["p0"].lending
    began, p0 = time.monotonic(), service.prefills["p0"].poll
    monkeypatch.setattr(service.prefills["p0"], "poll", lambda: p0() if spy.named else False)
    submit(service, "second", SECOND, "p1", kv_sources=known(service, "p0", "p2"))
    service.until(lambda: spy.named, "the pull")
    assert time.monotonic() - began < 7  # If p0 had been the only source, p1 would have waited for it for 7.5 s.
    assert spy.named == [["p2/0"]]
    service.until(lambda: spy.refused and not lending.num_leases, "what it lends late", LENT_S / 2)
    service.until(lambda: "second" in service.ended, "the end")
    assert service.tokens["second"] == expected
    assert spy.refused == ["p0/0"]
    assert service.ended["second"].cached_tokens == 16 * PAGES
    service.assert_nothing_held()


@pytest.mark.few(1)
@pytest.mark.parametrize("phase", ["asked", "one has lent", "pulling"])
def test_cancelling_a_request_that_asks_two_sources_leaves_nothing_held(
    start: Callable[..., Service], large: Callable[..., None], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    service = two_that_know(start)
    large()
    peers = service.prefills["p1"].peers
    if phase == "one has lent":
        p0 = service.prefills["p0"].poll
        monkeypatch.setattr(service.prefills["p0"], "poll", lambda: False if peers._open else p0())
    submit(service, "second", SECOND, "p1", kv_sources=known(service, "p0", "p2"))
    one_has_lent = lambda: any(fetch.lent for fetch in peers._open.values())  # noqa: E731
    service.until(one_has_lent if phase == "one has lent" else fetching(service, phase), phase)
    service.decode.abort("second")
    service.until(lambda: "second" in service.ended, "the end")
    asks, lendings = service.exchanges["p1"]._asks, [service.exchanges[name].lending for name in ("p0", "p2")]
    begun = time.monotonic()
    service.until(lambda: not (asks._open or any(one.num_leases for one in lendings)), "the end of what is lent")
    assert time.monotonic() - begun < LENT_S / 2
    assert not peers._open
    assert not peers._questions
    service.assert_nothing_held()


class Answers:
    """An exchange whose answers and clock the test controls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.several = True
        self.pull_seconds = 0.0
        params = KVCacheParams(torch.float32, 1, 4, page_size=4, enable_prefix_caching=True)
        memory = params.bytes_per_token(1) * 4 * 64
        self.manager = PagedKVCacheManager(params, 4, 200, 1, ["cpu"], available_cache_memory=memory)
        self.context = TextContext([*range(81)], 200, "r")
        self.peers = PeerPrefixes(self.manager, self, lambda: self.now)  # type: ignore[arg-type]
        self.asked: list[tuple[str, str, int, float]] = []
        self.pulled: list[list[str]] = []
        self.refused: list[str] = []
        self.pending: Any = None
        self._told = 0

    def reads_several(self, num_tokens: int) -> bool:
        assert num_tokens
        return self.several

    def ask(self, _: int, key: str, __: str, engine: str, wanted: Any, timeout_s: float) -> None:
        self.asked.append((engine, key, wanted.first_page, timeout_s))

    def refuse(self, _: int, source: Source, __: str) -> None:
        self.refused.append(source.engine_id)

    def pull(self, _: str, sources: Sequence[Source], pending: Any, __: float) -> None:
        self.pulled.append([source.engine_id for source in sources])
        self.pending = pending

    def cancel_pull(self, *_: Any) -> None:
        self.peers.on_event(ExchangeEvent(0, PullEvent("r", "cancelled", safe=True)))

    def begin(self, *engines: str) -> None:
        sources = [msg.KVSource("tcp://host", (engine,)) for engine in engines]
        assert self.peers.begin(Request("r", [*range(81)], 1), self.context, sources)

    def engines(self) -> list[str]:
        """Returns the engines that were asked since the previous call."""
        found, self._told = [one[0] for one in self.asked[self._told :]], len(self.asked)
        return found

    def answer(self, engine: str, pages: int, at: float, error: str = "") -> Any:
        """Makes the engine lend this many pages, beginning with the first page of its latest question."""
        self.now = at
        key, first = next((key, first) for name, key, first, _ in reversed(self.asked) if name == engine)
        lent = Lent(key, None, None, error)
        if pages:
            table = BlockTable(
                request_id=key, replica_idx=0, num_tokens=4 * (first + pages), page_size=4,
                groups=(tuple(range(1, pages + 1)),), fingerprint="", hash_algorithm="",
                digests=b"", first_page=first,
            )  # fmt: skip
            lent = Lent(key, Source("tcp://host", engine, LeaseRef(7, 0, 1.0), engine), table, "")
        return self.peers.on_event(ExchangeEvent(0, lent)) or next(iter(self.peers.poll()), None)

    def at(self, now: float) -> Any:
        self.now = now
        return next(iter(self.peers.poll()), None)

    def read(self, at: float, stop: int = 0, **errors: str) -> Any:
        """Ends the pull. If `stop` is 0, the whole pull has succeeded. If not, the pull has succeeded up to page
        `stop`.
        """
        self.now = at
        copier = self.manager.copier(self.pending)
        copier.take(last=True)
        proof = copier.prove(4 * stop)
        shares = tuple(PullShare(("tcp://host", name), 1, errors.get(name, "")) for name in self.pulled[-1])
        happened = ExchangeEvent(0, PullEvent("r", "", safe=True, shares=shares), proof)
        return self.peers.on_event(happened) or next(iter(self.peers.poll()), None)

    def fail(self, at: float) -> Any:
        self.now = at
        self.manager.copier(self.pending).give_up()
        return self.peers.on_event(ExchangeEvent(0, PullEvent("r", "it is gone", safe=True)))


@pytest.fixture
def answers() -> Iterator[Answers]:
    made = Answers()
    yield made
    assert made.manager.num_held_blocks == 0
    made.manager.check()
    made.manager.close()


@pytest.mark.parametrize(("took", "wait"), [(0.02, 0.02), (0.001, 0.005), (0.4, 0.05)])
def test_after_the_first_source_has_lent_the_others_get_about_as_much_time_again(
    answers: Answers, took: float, wait: float
) -> None:
    answers.begin("a", "b")
    answers.answer("b", 10, took)
    answers.at(took + 0.9 * wait)
    assert not answers.pulled
    answers.at(took + 1.1 * wait)
    assert answers.pulled == [["b"]]
    answers.answer("a", 20, 0.7)
    assert answers.refused == ["a"]
    assert answers.read(0.8) is None
    assert answers.engines()[2:] == ["a"]  # which has more
    answers.answer("a", 10, 0.81)
    assert answers.read(0.82)
    assert answers.peers.counts == {"pulled": 1}
    assert answers.peers.pages_pulled == 20


def test_when_all_have_answered_the_longest_run_is_pulled_at_once(answers: Answers) -> None:
    answers.begin("a", "b", "c")
    answers.answer("a", 5, 0.001)
    answers.answer("b", 0, 0.001)
    answers.answer("c", 20, 0.001)
    assert answers.pulled == [["c", "a"]]
    assert answers.read(0.1)


def test_four_sources_are_asked_at_once_and_others_only_if_these_have_nothing(answers: Answers) -> None:
    answers.begin(*"abcdef")
    assert answers.engines() == [*"abcd"]
    assert answers.asked[0][3] == pytest.approx(4 / 6)
    for name in "abcd":
        answers.answer(name, 0, 0.1)
    assert answers.engines() == [*"ef"]
    answers.answer("e", 20, 0.2)
    answers.answer("f", 20, 0.2)
    assert answers.read(0.3)


def test_for_few_pages_the_sources_are_asked_one_after_another(answers: Answers) -> None:
    answers.several = False
    answers.begin("a", "b")
    assert answers.engines() == ["a"]
    assert answers.asked[0][3] == pytest.approx(0.5)
    answers.answer("a", 7, 0.001)
    assert answers.pulled == [["a"]]
    answers.read(0.1)
    assert answers.engines() == ["b"]
    assert answers.answer("b", 0, 0.2)
    assert answers.peers.counts == {"pulled": 1}


def test_a_silent_source_costs_no_more_time_if_others_without_pages_are_asked_with_it(answers: Answers) -> None:
    answers.begin("a", "b")
    assert answers.answer("a", 0, 0.001) is None
    assert answers.at(0.49) is None
    assert answers.at(0.51)
    assert answers.peers.counts == {"unanswered": 1}
    answers.answer("b", 20, 0.9)
    assert answers.refused == ["b"]


def test_if_all_sources_are_silent_each_has_the_whole_time(answers: Answers) -> None:
    answers.begin("a", "b")
    assert answers.at(0.99) is None
    assert answers.at(1.0)
    assert answers.peers.counts == {"unanswered": 1}


def test_a_source_that_owes_an_answer_is_not_asked_for_the_next_stretch_but_one_with_a_gap_is(answers: Answers) -> None:
    answers.begin("silent", "a", "gap")
    answers.answer("a", 9, 0.001)
    answers.answer("gap", 4, 0.001)
    answers.at(0.1)
    assert answers.pulled == [["a", "gap"]]
    answers.read(0.2)
    assert answers.engines()[3:] == ["gap"]
    answers.answer("gap", 11, 0.3)
    assert answers.read(0.4)
    assert answers.peers.pages_pulled == 20


def test_pages_behind_a_pull_that_ended_early_are_requested_from_sources_that_have_not_failed(answers: Answers) -> None:
    answers.begin("dies", "a", "b")
    answers.answer("dies", 20, 0.001)
    answers.answer("a", 8, 0.001)
    answers.answer("b", 0, 0.001)
    answers.read(0.2, stop=8, dies="it is gone")
    assert answers.engines()[3:] == ["b"]
    answers.answer("b", 12, 0.3)
    assert answers.read(0.4)
    assert answers.peers.pages_pulled == 20
    assert answers.peers.estimate.taken_s["pull"] == 0


def test_a_source_that_fails_in_a_pull_is_not_asked_again_and_the_others_are_not_blamed(answers: Answers) -> None:
    for name in "ab":
        answers.peers._met.add(name)
    answers.begin("a", "b")
    answers.answer("a", 9, 0.001)
    answers.answer("b", 4, 0.001)
    assert answers.read(0.2, b="it is gone")
    assert answers.engines() == ["a", "b"]
    assert answers.peers.estimate.taken_s["pull"] == 0


def test_pulls_from_sources_that_were_met_before_are_measured_with_the_question_and_the_wait(answers: Answers) -> None:
    for name in "ab":
        answers.peers._met.add(name)
    answers.begin("a", "b")
    answers.answer("a", 20, 0.01)
    answers.answer("b", 20, 0.015)
    assert answers.read(0.2)
    assert answers.peers.estimate.taken_s["pull"] == pytest.approx(0.2)


def test_if_a_pull_fails_a_source_that_answered_late_is_asked_again(answers: Answers) -> None:
    answers.begin("a", "b")
    answers.answer("a", 20, 0.001)
    answers.at(0.05)
    answers.answer("b", 20, 0.06)
    assert answers.refused == ["b"]
    answers.fail(0.2)
    assert answers.engines()[2:] == ["b"]
    answers.answer("b", 20, 0.21)
    assert answers.read(0.3)
    assert answers.peers.counts == {"pulled": 1}


def test_pages_that_were_lent_to_a_dropped_request_are_given_back_also_if_they_come_later(
    answers: Answers,
) -> None:
    answers.begin("a", "b")
    answers.answer("a", 20, 0.1)
    answers.peers.drop("r")
    assert answers.refused == ["a"]
    answers.answer("b", 20, 0.15)
    assert answers.refused == ["a", "b"]
    assert not answers.pulled
    assert not answers.peers.counts


def test_answers_that_do_not_fit_are_all_given_back(answers: Answers) -> None:
    answers.begin("a", "b")
    answers.answer("a", 20, 0.001)
    assert answers.answer("b", 21, 0.001)  # The answer names more pages than the prompt has.
    assert sorted(answers.refused) == ["a", "b"]
    assert answers.peers.counts == {"failed": 1}


# ---- real processes

CONFIG = server_config(max_seq_len=4096)
CONFIGS = [
    msgspec.structs.replace(CONFIG, name="p0"),
    msgspec.structs.replace(CONFIG, name="p1"),
    msgspec.structs.replace(CONFIG, name="d", role="decode"),
]


def heard(fleet: Fleet, name: str, prompt: list[int], prefill: str) -> list[int]:
    fleet.send("d", msg.Submit(request_id=name, prompt=tuple(prompt), max_new_tokens=NEW, prefill=prefill))
    return ended(fleet, name)


def ended(fleet: Fleet, name: str) -> list[int]:
    tokens, deadline = list[int](), time.monotonic() + 60
    while time.monotonic() < deadline:
        for message in fleet.receive(0.1):
            if isinstance(message, msg.Tokens) and message.request_id == name:
                assert message.error == ""
                tokens += message.tokens
                if message.finished:
                    return tokens
    raise TimeoutError(name)


def introduced(fleet: Fleet) -> None:
    """Makes both prefill processes known to the decode process."""
    deadline = time.monotonic() + 30
    while not all(fleet.stats()[name].prompt_tokens for name in ("p0", "p1")):
        assert time.monotonic() < deadline
        for name in ("p0", "p1"):
            heard(fleet, f"hello {name}", [1, 2, 3], name)


def nothing_held(fleet: Fleet) -> dict[str, msg.Stats]:
    deadline = time.monotonic() + 30
    while True:
        stats = fleet.stats()
        if not any(one.pages_held or one.open_requests for one in stats.values()):
            return stats
        assert time.monotonic() < deadline, stats


@pytest.mark.slow
def test_three_processes_pull_from_each_other_and_an_idle_source_wakes(tiny_model: Any) -> None:
    # The prompt has fewer than 64 pages, because a process with 256 pages lends at most 64 pages.
    long = (HEAD * 8)[:900]
    with forked.fleets(), Fleet(CONFIGS) as fleet:
        introduced(fleet)
        heard(fleet, "first", FIRST, "p0")
        heard(fleet, "long", long, "p0")
        assert heard(fleet, "second", SECOND, "p1") == own_tokens(tiny_model, SECOND, NEW)
        prompt = [*long, 9, 9, 9]
        assert heard(fleet, "longer", prompt, "p1") == own_tokens(tiny_model, prompt, NEW)
        stats = nothing_held(fleet)
    assert stats["p1"].prefixes == {"pulled": 2}
    assert stats["p1"].pages_pulled == PAGES + (900 // 16 - PAGES)


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.005, *[pytest.param(after_s, marks=pytest.mark.ci) for after_s in (0.0, 0.02)]])
def test_a_source_that_is_killed_at_any_moment_costs_no_token(tiny_model: Any, delay_s: float) -> None:
    long = (HEAD * 16)[:3000]
    with forked.fleets(), Fleet(CONFIGS) as fleet:
        introduced(fleet)
        heard(fleet, "long", long, "p0")
        prompt = [*long, 9, 9, 9]
        fleet.send("d", msg.Submit(request_id="r", prompt=tuple(prompt), max_new_tokens=NEW, prefill="p1"))
        time.sleep(delay_s)
        fleet.kill("p0")
        assert ended(fleet, "r") == own_tokens(tiny_model, prompt, NEW)
        stats = nothing_held(fleet)
    assert sum(stats["p1"].prefixes.values()) == 1
