"""The contract that every adapter must keep: a class of tests, and the driver that an adapter provides for it.

A test module of an adapter says

    class TestMine(AdapterContract):
        driver = MyDriver

        @pytest.fixture
        def adapter(self): ...  # yields a MyDriver that is idle, and closes it

and has a fixture `reference`: a function that gives the model's own greedy tokens for a prompt. After each case every
output equals these tokens, or is a stated failure if the case allows one. No page is held, and `check` finds nothing.
"""

import random
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import pytest

NEW = 8
LIMIT_S = 30.0
Reference = Callable[[Sequence[int], int], list[int]]


class Limits(NamedTuple):
    """The sizes of one engine of the adapter. The cases choose the sizes of their requests by these limits."""

    page_size: int
    pages: int
    rows: int  # The number of requests that may run at a time.
    budget: int  # The largest number of tokens that one run of the model may compute for a single request.

    @property
    def tokens(self) -> int:
        return self.page_size * self.pages


class Outcome(NamedTuple):
    """The state of a request: its tokens so far, the reason of its end ("" while it continues), and its error."""

    tokens: list[int]
    finished: str = ""  # One of "eos", "length", "cancelled" and "error".
    error: str = ""


class Counters(NamedTuple):
    """The work of an adapter since its start, summed over all of its living engines.

    Attributes:
        preemptions: number of preempted requests.
        reused_tokens: prompt tokens that were found cached, summed over all engines that the requests pass through.
        most_tokens: most tokens of one run of the model.
        peak_pages: the largest number of pages held at a time, as counted in the runs.
        failed_pulls: failed pulls that the adapter has noticed.
    """

    preemptions: int
    reused_tokens: int
    most_tokens: int
    peak_pages: int
    failed_pulls: int = 0


class Adapter(Protocol):
    """A driver for one adapter. It owns the adapter's engines, the model and the adapter's peers, if there are any."""

    phases: ClassVar[Sequence[str]]
    """The phases in which a request may be cancelled, in their order."""
    peers: ClassVar[Sequence[str]]
    """The kinds of processes that may die. Empty if the adapter runs in one process."""
    survives: ClassVar[Collection[str]]
    """The faults after which no request may lose its tokens: the kind of a peer that dies, or "pull" for a pull that
    fails once.
    """
    limits: Limits

    @property
    def idle(self) -> bool:
        """Returns whether every request has ended and was completely cleaned up."""
        ...

    def submit(self, request_id: str, prompt: Sequence[int], new: int) -> None:
        """Asks for `new` tokens. No request id is a prefix of another request id."""
        ...

    def step(self) -> None:
        """Runs one turn of every part of the adapter. The call must be harmless if there is nothing to do."""
        ...

    def bring(self, request_id: str, phase: str) -> tuple[list[int], int]:
        """Submits a request, and steps until the request is in the phase. The request stays in the phase until the next
        step. Returns the request's prompt and length. The length is more than a few tokens. Other requests may run. A
        phase after the last token is allowed.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Cancels a request. The call does nothing if the request has ended or is unknown."""
        ...

    def outcome(self, request_id: str) -> Outcome:
        """Returns the current state of a request."""
        ...

    def counters(self) -> Counters: ...

    def held_pages(self) -> int:
        """Returns the number of pages, on all living engines, that a request holds or that a transfer may still write.
        Idle pages do not count.
        """
        ...

    def check(self) -> None:
        """Recounts all pages and requests. Raises if a count differs from the recorded count."""
        ...

    def kill_peer(self, peer: str) -> Collection[str]:
        """Ends a process as `kill -9` would. Returns the requests that were lost with the process. Their outcome is an
        error.
        """
        ...

    def revive_peer(self, peer: str) -> None:
        """Restarts a peer at its old address."""
        ...

    def fail_pull(self, request_id: str, *, final: bool) -> None:
        """Makes the READs of a request in phase "pulling" fail. Without `final`, only the READs of this attempt fail.
        With `final`, the READs of every attempt fail.
        """
        ...

    def close(self) -> None:
        """Ends all engines and peers. A second call must be harmless."""
        ...


class Case:
    """An adapter, the requests of a case, and the results that the requests must have at the end."""

    def __init__(self, adapter: Adapter, reference: Reference, limit_s: float = LIMIT_S) -> None:
        self.adapter, self.limits = adapter, adapter.limits
        self._reference = reference
        self._limit_s = limit_s
        self._asked: dict[str, tuple[Sequence[int], int]] = {}
        # For each cancelled request, the largest number of tokens that it may have generated.
        self._most: dict[str, int] = {}
        self._may_fail: set[str] = set()

    def submit(self, request_id: str, prompt: Sequence[int], new: int = NEW) -> None:
        self._asked[request_id] = prompt, new
        self.adapter.submit(request_id, prompt, new)

    def bring(self, request_id: str, phase: str) -> None:
        self._asked[request_id] = self.adapter.bring(request_id, phase)

    def again(self, request_id: str, name: str) -> None:
        """Submits an earlier request's prompt again, under a new name. If the earlier request has left wrong pages in
        the cache, the tokens differ.
        """
        self.submit(name, self._asked[request_id][0])

    def cancel(self, request_id: str) -> None:
        before = self.adapter.outcome(request_id)
        # The step in flight may add one more token.
        self._most.setdefault(request_id, len(before.tokens) + (not before.finished))
        self.adapter.cancel(request_id)

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + self._limit_s
        while not condition():
            self.adapter.step()
            assert time.monotonic() < deadline, f"waited {self._limit_s} s for {what}"

    def start_bystander(self) -> None:
        """Starts a request that runs independently. Faults of other requests must not affect it."""
        self.submit("bystander", prompt_of(0, self.limits.page_size + 1), 4 * NEW)
        outcome = self.adapter.outcome
        self.until(lambda: len(outcome("bystander").tokens) > 1 or outcome("bystander").finished, "the bystander")

    def check_end(self, may_fail: Collection[str] = ()) -> None:
        """Runs until all requests have ended. Checks the outcome of every request, including earlier requests, and the
        held pages.
        """
        self._may_fail.update(may_fail)
        self.until(lambda: self.adapter.idle, "the end")
        for request_id, (prompt, new) in self._asked.items():
            wanted, outcome = self._reference(prompt, new), self.adapter.outcome(request_id)
            begun = outcome.tokens == wanted[: len(outcome.tokens)]
            assert begun, f"{request_id}: {outcome.tokens}, the model's own are {wanted}"
            assert outcome.finished, f"{request_id} has not ended"
            if request_id in self._most:
                assert len(outcome.tokens) <= self._most[request_id], (
                    f"{request_id} generated tokens after its cancellation: {outcome}"
                )
            elif outcome.finished == "error" and request_id in self._may_fail:
                assert outcome.error, f"{request_id} failed without a reason"
            else:
                assert outcome.finished in {"eos", "length"}, f"{request_id}: {outcome}"
                assert len(outcome.tokens) == len(wanted), f"{request_id}: {outcome.tokens} of {wanted}"
        held = self.adapter.held_pages()
        assert held == 0, f"{held} pages are held, but no request is running"
        self.adapter.check()


def prompt_of(seed: int, length: int) -> list[int]:
    """Returns random tokens. For seeds below 200 even the first tokens differ."""
    chance = random.Random(seed)
    return [seed, *(chance.randrange(250) for _ in range(length - 1))]


def _params(driver: type[Adapter], names: tuple[str, ...], rows: list[tuple[object, ...]], lacks: str) -> list[Any]:
    reason = f"{driver.__name__} {lacks}"
    return rows or [pytest.param(*[None] * len(names), marks=pytest.mark.skip(reason=reason))]


class AdapterContract:
    """The cases of the contract. A subclass names its driver, and its fixture `adapter` yields an instance of it."""

    driver: ClassVar[type[Adapter]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrises the tests by the phases and peers of the driver. If a driver has no phase or no peer, the test
        is skipped with a reason.
        """
        driver = self.driver
        rows: dict[tuple[str, ...], tuple[list[tuple[object, ...]], str]] = {
            ("phase",): ([(phase,) for phase in driver.phases], "has nothing to cancel"),
            ("peer", "dies_in"): (
                [(peer, phase) for peer in driver.peers for phase in driver.phases],
                "has no peers that could die",
            ),
            ("final",): ([(final,) for final in (False, True) if driver.peers], "pulls nothing"),
        }
        for names, (values, lacks) in rows.items():
            if set(names) <= set(metafunc.fixturenames):
                metafunc.parametrize(names, _params(driver, names, values, lacks))

    @pytest.fixture
    def case(self, adapter: Adapter, reference: Reference) -> Case:
        assert adapter.idle
        assert adapter.held_pages() == 0
        return Case(adapter, reference)

    def test_admission(self, case: Case) -> None:
        """There are more requests than rows and pages. The requests wait for each other, and all requests end."""
        limits = case.limits
        for number in range(limits.rows + 2):
            case.submit(f"r{number:02}", prompt_of(number, limits.tokens // 2))
        case.check_end()
        peak = case.adapter.counters().peak_pages
        assert limits.pages // 2 <= peak <= limits.pages, f"{peak} of {limits.pages} pages were held at a time"

    def test_hit(self, case: Case) -> None:
        """If the first pages of a prompt were served before, only its other pages run. If the whole prompt was served
        before, only its last page runs.
        """
        size, before = case.limits.page_size, case.adapter.counters().reused_tokens
        head = prompt_of(1, max(size, 16) * 3)
        for name, tail, reused in (
            ("first", [1, 2, 3, 4, 5], 0),
            ("second", [9, 8, 7], len(head)),
            ("third", [1, 2, 3, 4, 5], (len(head) + 4) // size * size),
        ):
            case.submit(name, [*head, *tail])
            case.check_end()
            found = case.adapter.counters().reused_tokens - before
            before += found
            assert found == reused, f"{name}: {found} tokens were found cached, {reused} were served before"

    def test_chunk(self, case: Case) -> None:
        """A prompt that is longer than the budget of a run takes several runs."""
        budget = case.limits.budget
        case.submit("long", prompt_of(2, 5 * budget // 2))
        case.check_end()
        most = case.adapter.counters().most_tokens
        assert 0 < most <= budget, f"{most} tokens ran at a time, the budget is {budget}"

    def test_preempt(self, case: Case) -> None:
        """All requests fit at first. They no longer fit after they have grown. Some requests are then preempted, and no
        request's tokens change.
        """
        limits = case.limits
        length = limits.page_size + 1
        new = 8 * limits.tokens // (5 * limits.rows) - length
        assert (
            limits.rows * -(-length // limits.page_size)
            <= limits.pages
            < limits.rows * (length + new) / limits.page_size
        )
        before = case.adapter.counters().preemptions
        for number in range(limits.rows):
            case.submit(f"r{number:02}", prompt_of(number, length), new)
        case.check_end()
        assert case.adapter.counters().preemptions > before, "no request was preempted, so this test has shown nothing"

    def test_cancel(self, case: Case, phase: str) -> None:
        """A cancelled request affects no other request, and leaves no page behind."""
        case.start_bystander()
        case.bring("victim", phase)
        for _ in range(2):  # A second cancellation must be harmless.
            case.cancel("victim")
        case.adapter.cancel("nobody")
        case.check_end()
        case.again("victim", "next")
        case.check_end()

    def test_peer_death(self, case: Case, peer: str, dies_in: str) -> None:
        """A request whose peer dies gets its tokens from another process or fails with a reason. No other request is
        affected.
        """
        case.start_bystander()
        case.bring("victim", dies_in)
        may_fail = {*case.adapter.kill_peer(peer)}
        for _ in range(5):
            case.adapter.step()
        case.adapter.revive_peer(peer)
        case.check_end(may_fail if peer in case.adapter.survives else {*may_fail, "victim"})
        case.again("victim", "next")
        case.check_end()

    def test_failed_pull(self, case: Case, *, final: bool) -> None:
        """After a failed pull, another attempt gets the pages, or the request fails with a reason. Its tokens are never
        wrong.
        """
        case.start_bystander()
        before = case.adapter.counters().failed_pulls
        case.bring("victim", "pulling")
        case.adapter.fail_pull("victim", final=final)
        case.check_end(() if "pull" in case.adapter.survives and not final else {"victim"})
        assert case.adapter.counters().failed_pulls > before, "no pull failed, so this test has shown nothing"
        case.again("victim", "next")
        case.check_end()

    def test_drain(self, case: Case) -> None:
        """Requests in every state end. After this the state no longer changes, and closing has nothing to give back."""
        limits = case.limits
        for number, length in enumerate(
            (limits.tokens // 2, 3, 2 * limits.budget, limits.page_size, limits.tokens // 2)
        ):
            case.submit(f"r{number:02}", prompt_of(number, length))
            case.adapter.step()
        case.cancel("r02")
        case.check_end()
        case.adapter.step()
        case.check_end()
        case.adapter.close()
        case.adapter.close()
