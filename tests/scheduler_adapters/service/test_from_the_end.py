"""A prefill process computes a prompt from its first token on. Meanwhile it pulls the last pages of the prompt from
another process.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache import TextContext
from kvcache.replica.contents import PageContents
from scheduler_adapters.loop import Output, Request
from scheduler_adapters.overlapped import ThreadedRunner
from scheduler_adapters.pull_or_compute import PullOrCompute
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.requests import Recent
from scheduler_adapters.service.stretches import FromTheEnd
from tests.kvcache.build import evict_idle
from tests.scheduler_adapters.service import processes
from tests.scheduler_adapters.service.processes import NEW, Service, Side
from tests.scheduler_adapters.serving import own_tokens
from transfer.pull.lending import LENT_S
from transfer.pull.pull_state import PullEvent

SIZE, PAGES = 16, 40
PROMPT = [(7 * at + at * at // 5) % 250 for at in range(SIZE * PAGES + 5)]


class Fixed(PullOrCompute):
    """An estimate that divides every prompt. It assumes that a pull can always bring this fraction of the missing
    tokens, counted from the end.
    """

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self._share = share

    def splits(self, cached: int, tokens: int, rest: int, page_size: int) -> bool:  # noqa: ARG002
        return True

    def meets(self, at: int, stop: int, page_size: int) -> int:
        return int(max(0, stop - at) * self._share) // page_size * page_size


class Paced:
    """Slows the loop of a process: the loop runs only as many steps as the test has allowed."""

    def __init__(self, service: Service, name: str = "p1") -> None:
        self.left = 0.0
        loop = service.loops[name]
        step = loop.step

        def paced() -> list[Output]:
            if self.left <= 0:
                return []
            self.left -= loop.has_work
            return step()

        loop.step = paced  # type: ignore[method-assign]

    def go(self, steps: float = float("inf")) -> None:
        self.left += steps


@pytest.fixture(scope="module")
def expected(model: Any) -> list[int]:
    return own_tokens(model, PROMPT, NEW)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the sources more time for answers and for signs of life, because the test machine may be busy."""
    patient = {**processes.QUICK, "dead_after_s": 5.0, "handshake_timeout_s": 5.0}
    monkeypatch.setattr(processes, "QUICK", patient)
    monkeypatch.setattr("scheduler_adapters.service.peer_prefixes._ASK_S", 15.0)


@pytest.fixture
def start(model: Any, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    services = []

    def make(**prefill: Any) -> Service:
        """Makes two prefill processes. The first process has the prompt cached. The second process knows the first
        process.
        """
        side = Side(**{"count": 2, "pages": 160, "budget": 32, **prefill})
        service = Service(model, tmp_path, side, Side(pages=160))
        services.append(service)
        links = [one for decode in service.decodes.values() for one in decode.connections]
        service.until(lambda: all(one.welcome for one in links), "the connections")
        for name in ("p0", "p1"):
            run(service, f"meets {name}", [1, *PROMPT[:40]], name)
        run(service, "first", PROMPT, "p0")
        peers = service.prefills["p1"].peers
        peers.estimate, peers.pages_pulled = Fixed(), 0
        return service

    yield make
    for service in services:
        service.close()


def submit(service: Service, name: str, prompt: list[int], prefill: str) -> None:
    engines = tuple(f"p0/{replica}" for replica in range(service.loops["p1"].manager.num_replicas))
    sources = (msg.KVSource(service.exchanges["p0"].address, engines),) if prefill == "p1" else ()
    service.tokens[name] = []
    service.decode.submit(
        msg.Submit(
            request_id=name, prompt=tuple(prompt), max_new_tokens=NEW, prefill=prefill, kv_sources=sources
        )
    )  # fmt: skip


def run(service: Service, name: str, prompt: list[int], prefill: str) -> list[int]:
    submit(service, name, prompt, prefill)
    service.until(lambda: name in service.ended, "the end")
    assert service.ended[name].error == ""
    return service.tokens[name]


def finish(service: Service, expected: list[int]) -> msg.Stats:
    service.until(lambda: "second" in service.ended, "the end")
    assert service.ended["second"].error == ""
    assert service.tokens["second"] == expected
    asks, lending = service.exchanges["p1"]._asks, service.exchanges.get("p0")
    service.until(lambda: not asks._open and not (lending and lending.lending.num_leases), "the last lease")
    service.assert_nothing_held()
    assert not service.prefills["p1"].peers._open
    assert not service.prefills["p1"].peers._split
    return service.prefills["p1"].stats()


def split(service: Service) -> Paced:
    """Submits the prompt, and computes its first 64 tokens."""
    paced = Paced(service)
    submit(service, "second", PROMPT, "p1")
    paced.go(2)
    service.until(lambda: service.prefills["p1"].peers.counts["split"], "the first stretch")
    return paced


def done(service: Service) -> bool:
    return not service.prefills["p1"].peers._open


SIDES: list[dict[str, Any]] = [{}, {"tp": 2}, {"overlap": ThreadedRunner}]


@pytest.mark.each_value
@pytest.mark.parametrize("side", SIDES)
def test_a_computed_front_and_a_pulled_end_give_the_tokens_of_the_model(
    start: Callable[..., Service], expected: list[int], side: dict[str, Any]
) -> None:
    service = start(**side)
    before = service.prefills["p1"].stats()
    paced = split(service)
    service.until(lambda: done(service), "the last stretch")
    paced.go()
    stats = finish(service, expected)
    assert stats.prefixes["split"] == 1
    assert stats.pages_pulled > 30, "each stretch is a share of what was estimated to come, down to single pages"
    assert stats.cached_tokens - before.cached_tokens >= SIZE * (stats.pages_pulled - 6), "steps reach beyond"
    assert stats.cached_tokens - before.cached_tokens <= SIZE * stats.pages_pulled
    assert stats.prompt_tokens - before.prompt_tokens == len(PROMPT)
    served = service.loops["p1"].manager
    assert served.contents.cached(0, served.contents.digests(service.loops["p1"].context_for(asked()))) == SIZE * PAGES


def asked() -> Request:
    return Request("again", PROMPT, 1)


def test_stretches_come_from_the_end_and_get_shorter(
    start: Callable[..., Service], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start()
    exchange, pulled = service.exchanges["p1"], list[tuple[int, int]]()
    pull = exchange.pull

    def spied(key: str, sources: Any, pending: Any, timeout_s: float) -> None:
        pulled.append(pending.tokens)
        pull(key, sources, pending, timeout_s)

    monkeypatch.setattr(exchange, "pull", spied)
    paced = split(service)
    service.until(lambda: done(service), "the last stretch")
    (running,) = service.loops["p1"]._running.values()
    assert running.meets == pulled[-1][0], "no chunk may run into pages that have arrived"
    paced.go()
    finish(service, expected)
    assert pulled[0] == (SIZE * 20, SIZE * 40), "the later half"
    assert all(earlier[0] == later[1] for earlier, later in itertools.pairwise(pulled))
    lengths = [stop - first for first, stop in pulled]
    assert lengths == sorted(lengths, reverse=True)
    assert pulled[-1][0] >= 64, "pages that are computed by then must not be pulled"


def test_the_first_pull_begins_before_the_first_step(
    start: Callable[..., Service], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_adapters.service.peer_prefixes._ANSWER_S", 30.0)
    service = start()
    exchange, loop = service.exchanges["p1"], service.loops["p1"]
    pull, run, happened = exchange.pull, loop._run, list[str]()

    def spied_pull(*arguments: Any) -> None:
        happened.append("pull")
        pull(*arguments)

    def spied_run(entries: list[Any]) -> list[Output]:
        happened.append("run")
        return run(entries)

    monkeypatch.setattr(exchange, "pull", spied_pull)
    monkeypatch.setattr(loop, "_run", spied_run)
    submit(service, "second", PROMPT, "p1")
    finish(service, expected)
    assert happened[0] == "pull"


@pytest.mark.parametrize("waits", [True, False])
def test_a_prompt_that_meets_the_pages_of_a_pull_waits_for_them_for_a_while(
    start: Callable[..., Service], expected: list[int], monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    monkeypatch.setattr("scheduler_adapters.service.stretches._MOST_S", 60.0)
    service = start()
    peers, exchange = service.prefills["p1"].peers, service.exchanges["p1"]
    for tokens in (SIZE * PAGES // 2, SIZE * PAGES):
        peers.estimate.pull.add(tokens, 20.0 if waits else 1e-3)
    pull, begun = exchange.pull, list[tuple[Any, ...]]()
    monkeypatch.setattr(exchange, "pull", lambda *arguments: begun.append(arguments))
    submit(service, "second", PROMPT, "p1")
    service.until(lambda: begun, "the first stretch")
    ((_, _, pending, _),) = begun
    (context,) = (fetch.context for fetch in peers._open.values())
    service.until(lambda: context.start_idx >= pending.tokens[0], "the end of the front")
    if waits:
        for _ in range(100):
            service.poll()
        assert context.start_idx == pending.tokens[0] == SIZE * PAGES // 2
        monkeypatch.setattr(exchange, "pull", pull)
        pull(*begun[0])
        assert finish(service, expected).pages_pulled == PAGES // 2
    else:
        service.until(lambda: context.start_idx > pending.tokens[0], "a step that does not wait")
        pull(*begun[0])
        finish(service, expected)


def test_the_computation_does_not_wait_for_the_pull(
    start: Callable[..., Service], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start()
    monkeypatch.setattr("scheduler_adapters.service.peer_prefixes._ASK_S", 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(service.prefills["p0"], "poll", lambda: False)  # it answers nothing
        submit(service, "second", PROMPT, "p1")
        service.until(lambda: service.tokens["second"], "the first token")
        assert not service.prefills["p1"].peers._open, "no question may be left open"
    assert finish(service, expected).pages_pulled == 0


def test_a_source_that_has_only_the_head_is_asked_for_earlier_pages(
    start: Callable[..., Service], expected: list[int]
) -> None:
    service = start()
    service.loops["p0"].manager.reset_prefix_cache()
    service.loops["d0"].manager.reset_prefix_cache()
    run(service, "head", [*PROMPT[: SIZE * 24], 3], "p0")
    paced = split(service)
    service.until(lambda: done(service), "the last stretch")
    paced.go()
    stats = finish(service, expected)
    assert 10 < stats.pages_pulled <= 24


def test_a_source_without_the_head_is_read_from_the_end(start: Callable[..., Service], expected: list[int]) -> None:
    service = start()
    manager = service.loops["p0"].manager
    service.assert_nothing_held()
    context = service.loops["p0"].context_for(asked())
    held, _ = manager.contents.lease("tail", 0, manager.contents.digests(context, 20), 100)
    evict_idle(manager)
    manager.end_lease(held)
    paced = split(service)
    service.until(lambda: done(service), "the last stretch")
    paced.go()
    stats = finish(service, expected)
    assert 10 < stats.pages_pulled <= 20


def pulling(service: Service) -> bool:
    return any(fetch.pending is not None for fetch in service.prefills["p1"].peers._open.values())


@pytest.mark.parametrize("phase", ["asked", "pulling"])
@pytest.mark.parametrize("fault", ["killed", "revoked"])
def test_a_source_that_fails_costs_no_token_and_no_page(
    start: Callable[..., Service], expected: list[int], phase: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start()
    p0, p1 = service.exchanges["p0"], service.exchanges["p1"]
    pull, faults = p1.pull, list[str]()

    def revoked(key: str, sources: Any, *rest: Any) -> None:
        faults.append(key)
        if len(faults) > 1:
            p0.revoke(sources[0], "stopped")
            service.until(lambda: not p0.lending.num_leases, "the end of the lease", poll=service.prefills["p0"].poll)
        pull(key, sources, *rest)

    if fault == "revoked":
        monkeypatch.setattr(p1, "pull", revoked)
        paced = split(service)
    else:
        monkeypatch.setattr("scheduler_adapters.service.peer_prefixes._ASK_S", 1.0)
        paced = Paced(service)
        submit(service, "second", PROMPT, "p1")
        paced.go(2)
        open_fetches = service.prefills["p1"].peers._open
        service.until(lambda: pulling(service) if phase == "pulling" else bool(open_fetches), phase)
        service.stop_prefill("p0")
    paced.go()
    stats = finish(service, expected)
    if fault == "revoked":
        assert (stats.prefixes["split"], p1.totals()[1]) == (1, 1)
        assert stats.pages_pulled == PAGES // 2, "the pages that had arrived before must stay"


@pytest.mark.parametrize("phase", ["asked", "pulling"])
def test_a_request_that_is_cancelled_meanwhile_leaves_nothing_held(start: Callable[..., Service], phase: str) -> None:
    service = start()
    paced = Paced(service)
    submit(service, "second", PROMPT, "p1")
    paced.go(2)
    peers = service.prefills["p1"].peers
    service.until(lambda: pulling(service) if phase == "pulling" else bool(peers._open), phase)
    service.decode.abort("second")
    service.until(lambda: "second" in service.ended, "the end")
    began, asks, lending = time.monotonic(), service.exchanges["p1"]._asks, service.exchanges["p0"].lending
    service.until(lambda: not (asks._open or lending.num_leases), "the answer, and what comes of it")
    assert time.monotonic() - began < LENT_S / 2
    service.assert_nothing_held()
    assert not peers._open


def test_without_room_the_rest_is_computed(start: Callable[..., Service], expected: list[int]) -> None:
    service = start()
    # The pulled part of the prompt takes more than half of the free pages.
    service.prefills["p1"].peers.estimate = Fixed(0.75)
    manager = service.loops["p1"].manager
    taken = (manager.total_num_pages - PAGES - 8) * SIZE
    hog = TextContext(range(taken), taken, "hog")
    manager.external_claim(hog.request_id)
    assert manager.maybe_reserve(hog)
    run(service, "second", PROMPT, "p1")
    assert service.tokens["second"] == expected
    assert service.prefills["p1"].peers.counts["no_room"] == 1
    manager.release(hog.request_id)
    finish(service, expected)


def test_pages_that_would_come_to_another_replica_are_not_pulled(
    start: Callable[..., Service], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start(dp=2)
    manager = service.loops["p1"].manager
    recommend = manager.get_or_recommend_replica
    advice = iter([0])
    monkeypatch.setattr(manager, "get_or_recommend_replica", lambda context: next(advice, 1))
    submit(service, "second", PROMPT, "p1")
    service.until(lambda: "second" in service.ended, "the end")
    monkeypatch.setattr(manager, "get_or_recommend_replica", recommend)
    assert finish(service, expected).pages_pulled == 0


def test_a_cache_that_cannot_take_later_pages_first_is_pulled_from_the_front(
    start: Callable[..., Service], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start()
    monkeypatch.setattr(PageContents, "takes_any_part", False)
    run(service, "second", PROMPT, "p1")
    stats = finish(service, expected)
    assert "split" not in stats.prefixes
    assert stats.pages_pulled == PAGES


def polled(service: Service, but: Any) -> None:
    for one in (*service.prefills.values(), *service.decodes.values()):
        if one is not but:
            one.poll()


@pytest.mark.parametrize("runs_first", [True, False])
def test_the_speed_of_the_model_is_measured_before_the_first_page_is_found(
    start: Callable[..., Service], runs_first: bool
) -> None:
    service = start()
    compute = service.prefills["p1"].peers.estimate.compute
    measured: list[tuple[int, int]] = []
    add = compute.add

    def spied(tokens: int, seconds: float, cached: int = 0) -> None:
        measured.append((tokens, cached))
        add(tokens, seconds, cached)

    compute.add = spied  # type: ignore[method-assign]
    p0 = service.prefills["p0"]
    paced = Paced(service)
    submit(service, "second", PROMPT, "p1")
    if runs_first:
        paced.go(2)
        service.until(lambda: paced.left == 0, "two steps", poll=lambda: polled(service, p0))
    service.until(lambda: service.prefills["p1"].peers.counts["split"], "the first stretch")
    paced.go()
    service.until(lambda: "second" in service.ended, "the end")
    # The whole computation is not measured, because it leaves out the last tokens of the prompt.
    assert measured == ([(64, 0)] if runs_first else [])


def test_the_time_of_a_pull_leaves_out_the_step_in_which_it_ended(
    start: Callable[..., Service], expected: list[int]
) -> None:
    service = start()
    pull = service.prefills["p1"].peers.estimate.pull
    took = list[float]()
    pull.add = lambda tokens, seconds, cached=0: took.append(seconds)  # type: ignore[method-assign]
    p1 = service.prefills["p1"]
    paced = Paced(service)
    submit(service, "second", PROMPT, "p1")
    service.until(lambda: pulling(service), "the pull")
    service.exchanges["p1"].wait(0, 30.0)
    time.sleep(1.0)  # a step
    service.until(lambda: p1.peers.counts["split"], "the first stretch")
    assert took[0] < 1.0
    paced.go()
    finish(service, expected)


@pytest.mark.parametrize(("estimated_s", "was_met"), [(1e-3, True), (60.0, True), (1e-3, False)])
def test_a_pull_that_the_computation_has_overtaken_is_measured_if_it_was_slower_than_estimated(
    start: Callable[..., Service],
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
    estimated_s: float,
    was_met: bool,
) -> None:
    monkeypatch.setattr("scheduler_adapters.service.stretches._MOST_S", 100.0)
    monkeypatch.setattr("scheduler_adapters.service.peer_prefixes._PATIENCE", 0.0)
    service = start()
    peers, exchange = service.prefills["p1"].peers, service.exchanges["p1"]
    for tokens in (SIZE * PAGES // 2, SIZE * PAGES):
        peers.estimate.pull.add(tokens, estimated_s)
    if not was_met:
        peers._met = Recent()
    measured, begun = list[tuple[int, float]](), list[tuple[Any, ...]]()
    peers.estimate.pull.add = lambda tokens, seconds, cached=0: measured.append((tokens, seconds))  # type: ignore[method-assign]
    monkeypatch.setattr(exchange, "pull", lambda *arguments: begun.append(arguments))
    since = time.monotonic()
    submit(service, "second", PROMPT, "p1")
    service.until(lambda: begun, "the pull")
    service.until(lambda: done(service), "the end of the computation")
    took_s = time.monotonic() - since
    ((_, sources, _, _),) = begun
    for source in sources:
        exchange.refuse(0, source, "the pull has never begun")
    assert finish(service, expected).pages_pulled == 0
    if was_met and estimated_s < took_s:
        ((tokens, seconds),) = measured
        assert tokens == SIZE * PAGES // 2
        assert estimated_s < seconds <= took_s
    else:
        assert not measured


def test_a_pull_that_ended_during_the_last_step_is_measured_without_that_step(
    start: Callable[..., Service], expected: list[int]
) -> None:
    service = start()
    peers = service.prefills["p1"].peers
    for tokens in (SIZE, SIZE * PAGES):
        peers.estimate.pull.add(tokens, 1e-6)
    took = list[float]()
    peers.estimate.pull.add = lambda tokens, seconds, cached=0: took.append(seconds)  # type: ignore[method-assign]
    paced = Paced(service)
    submit(service, "second", PROMPT, "p1")
    service.until(lambda: pulling(service), "the pull")
    service.exchanges["p1"].wait(0, 30.0)  # The pull has ended, and its event was not handled yet.
    time.sleep(1.0)  # This is the last step of the prompt.
    (key,) = peers._open
    peers.computed(key, len(PROMPT), 1.0, 0)
    (seconds,) = took
    assert 1e-6 < seconds < 1.0
    paced.go()
    finish(service, expected)


def test_a_late_event_of_a_pull_finds_no_fetch(start: Callable[..., Service], expected: list[int]) -> None:
    service = start()
    heard: list[PullEvent] = []
    peers = service.prefills["p1"].peers
    on_event = peers.on_event

    def spied(happened: Any) -> Any:
        if isinstance(happened.event, PullEvent):
            heard.append(happened.event)
        assert on_event(happened) is None, "a request that runs must not be admitted again"

    peers.on_event = spied  # type: ignore[method-assign]
    paced = split(service)
    service.until(lambda: done(service), "the last stretch")
    paced.go()
    finish(service, expected)
    assert heard
    assert FromTheEnd.outcome == "split"
