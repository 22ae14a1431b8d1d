"""A prefix that one prefill process has computed is pulled by another: what is served, what is counted, what fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcache import TextContext
from scheduler_adapters.hf.tiny import ByteTokenizer
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.fleet import Fleet
from scheduler_adapters.service.pull_or_compute import PullOrCompute
from tests import forked
from tests.scheduler_adapters.server_config import server_config
from tests.scheduler_adapters.service.processes import DEFAULT, NEW, Service, Side
from tests.scheduler_adapters.serving import own_tokens
from transfer.pull.lending import LENT_S

HEAD = ByteTokenizer().encode("Whoever has computed a prefix has it for all that ask. " * 4)  # 221 tokens: 13 pages
FIRST, SECOND = ([*HEAD, *ByteTokenizer().encode(text)[1:]] for text in ("First?", "Second? " * 5))
PAGES = len(HEAD) // 16


@pytest.fixture(scope="module")
def expected(model: Any) -> list[int]:
    return own_tokens(model, SECOND, NEW)


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


def test_what_one_has_computed_another_pulls_and_computes_the_rest(
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
    assert served(service, "again", SECOND, "p1") == expected  # now it is cached there: nobody is asked
    assert outcome(service) == {"pulled": 1}


def test_what_pulls_and_prompts_take_is_measured_from_the_second_contact_on(start: Callable[..., Service]) -> None:
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
    service.loops["p0"].manager.external_claim("busy", 0)  # the prompt goes to the last replica
    served(service, "first", FIRST, "p0")
    service.loops["p0"].manager.release("busy")
    assert served(service, "second", SECOND, "p1") == expected
    assert outcome(service) == {"pulled": 1}
    service.assert_nothing_held()


def test_a_source_that_has_forgotten_costs_a_question(start: Callable[..., Service], expected: list[int]) -> None:
    service = start()
    served(service, "first", FIRST, "p0")
    for name in ("p0", "d0"):  # decode would name itself
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
    far = msg.KVSource("tcp://192.0.2.1:9", ("p7/0",))  # not allowed, and not there
    other = [*range(100, 190)]
    service.prefills["p1"].peers.estimate = PullOrCompute()  # so short a prompt is not worth it by now
    served(service, "third", other, "p1", kv_sources=(far,))
    assert outcome(service) == {"pulled": 1, "unanswered": 1}
    service.assert_nothing_held()


def turns(service: Service, model: Any) -> tuple[list[int], list[int], int]:
    """Serves the first turn of a conversation. The next one, what the model answers it, and full pages of the first."""
    answer = served(service, "turn 1", FIRST, "p0", new=100, ignore_eos=True)
    prompt = [*FIRST, *answer, *ByteTokenizer().encode("And then?")[1:]]
    return prompt, own_tokens(model, prompt, NEW), (len(FIRST) + len(answer) - 1) // 16


@pytest.mark.parametrize("decode", [{}, {"tp": 2}, {"dp": 2}])
def test_a_next_turn_comes_from_the_decode_process_that_has_answered(
    start: Callable[..., Service], model: Any, decode: dict[str, int]
) -> None:
    """No other process has the answer's tokens: prefill computes the new turn alone."""
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


def test_where_computing_is_quicker_nobody_is_asked(start: Callable[..., Service], expected: list[int]) -> None:
    service = start()
    estimate = service.prefills["p1"].peers.estimate
    for tokens in (10, 1000):
        estimate.pull.add(tokens, 60.0)
        estimate.compute.add(tokens, 1e-6 * tokens)
    served(service, "first", FIRST, "p0")
    assert served(service, "second", SECOND, "p1") == expected
    assert outcome(service) == {"computed": 1}
    assert service.exchanges["p0"].lending.pages_lent == 0


def test_what_pays_is_judged_by_what_a_source_has(start: Callable[..., Service]) -> None:
    """A page of a long prompt is not worth a question, however much of the prompt is missing."""
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


def test_no_room_for_what_is_lent_is_no_error_and_it_is_given_back(
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


def test_what_was_pulled_and_lost_before_its_turn_is_computed(
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
    """The process has the prompt's pages from here on."""
    service.assert_nothing_held()
    manager = service.loops[name].manager
    wanted = manager.contents.digests(TextContext([*tokens, 0], 4096, "tail"), pages)
    held, _ = manager.contents.lease("tail", 0, wanted, 100)
    manager.reset_prefix_cache()
    manager.end_lease(held)


def head_and_tail(start: Callable[..., Service]) -> Service:
    """The first six of a prompt's thirteen pages at p0, the pages behind its first four at p2."""
    service = start(count=3)
    served(service, "head", FIRST[:100], "p0")
    served(service, "all", FIRST, "p2")
    forget_head(service, "p2", FIRST, 4)
    return service


@pytest.mark.parametrize("order", [("p0", "p2"), ("p2", "p0")])
def test_the_head_is_pulled_from_one_and_the_tail_from_another_whoever_is_named_first(
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

    def stopped(key: str, source: Any, *rest: Any) -> None:
        if source.engine_id == "p2/0":
            service.exchanges["p2"].revoke(source, "stopped")
            service.until(lambda: not service.exchanges["p2"].lending.num_leases, "the end of the lease")
        pull(key, source, *rest)

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


def test_two_that_have_every_other_page_are_not_asked_for_ever(
    start: Callable[..., Service], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_adapters.service.peer_prefixes._MOST_STRETCHES", 3)
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


def test_one_that_does_not_answer_leaves_time_for_the_next(
    start: Callable[..., Service], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.pull.exchange.LENT_S", 1.0)
    service = start(count=3)
    served(service, "all", FIRST, "p2")
    ask, engines = service.exchanges["p1"].ask, list[str]()

    def told(replica: int, key: str, address: str, engine: str, *rest: Any) -> None:
        engines.append(engine)
        ask(replica, key, address, engine, *rest)

    monkeypatch.setattr(service.exchanges["p1"], "ask", told)
    with monkeypatch.context() as patch:
        patch.setattr(service.prefills["p0"], "poll", lambda: False)  # its loop stands still
        assert served(service, "second", SECOND, "p1", kv_sources=known(service, "p0", "p2")) == expected
    assert engines == ["p0/0", "p2/0"]  # and who does not answer is not asked for what comes behind
    assert outcome(service) == {"pulled": 1}
    assert service.ended["second"].cached_tokens == 16 * PAGES
    service.assert_nothing_held()


def fetching(service: Service, phase: str) -> Callable[[], bool]:
    """Whether a prompt is asked for, or pulled."""

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
    assert time.monotonic() - began < LENT_S / 2  # what nobody wants is given back, and does not run out
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
    """Both prefill processes have answered the decode process."""
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
    long = (HEAD * 8)[:900]  # fewer than the 64 of 256 pages that a process lends
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
