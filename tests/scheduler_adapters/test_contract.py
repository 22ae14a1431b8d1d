"""The adapter contract for the loop, for the generator, and for the prefill and decode schedulers with pulls between
them.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from scheduler_adapters.hf.generate import PagedGenerator
from scheduler_adapters.loop import Request, ServingLoop
from tests.scheduler_adapters.contract import (
    NEW,
    AdapterContract,
    Case,
    Counters,
    Limits,
    Outcome,
    Reference,
    prompt_of,
)
from tests.scheduler_adapters.service.processes import Service, Side
from tests.scheduler_adapters.serving import new_loop, new_manager, own_tokens
from transfer.errors import AgentError
from transfer.nixl.agent import Agent
from transfer.pull.exchange import PageExchange

LIMITS = Limits(page_size=16, pages=12, rows=4, budget=32)
LONG = prompt_of(201, 5 * LIMITS.budget // 2)  # in chunks


@pytest.fixture(scope="module")
def reference(model: Any) -> Reference:
    known = functools.cache(lambda prompt, new: own_tokens(model, prompt, new))
    return lambda prompt, new: known(tuple(prompt), new)


def watch(loop: ServingLoop[Any], most: Counter[str]) -> None:
    """Records the tokens and pages of the runs of a loop's model."""
    manager, run = loop.manager, loop.runner.run

    def watched(batch: Sequence[Any], inputs: Any) -> list[int]:
        most["tokens"] = max(most["tokens"], sum(context.active_length for context in batch))
        most["pages"] = max(most["pages"], manager.total_num_pages - manager.num_free_blocks)
        return run(batch, inputs)

    loop.runner.run = watched  # type: ignore[method-assign]


class LoopDriver:
    """`ServingLoop` with a real model, in one process."""

    phases = ("waiting", "prefill", "decoding", "held")
    peers = ()
    survives = ()
    limits = LIMITS

    def __init__(self, model: Any, limits: Limits = LIMITS) -> None:
        self.loop = new_loop(model, limits.pages, limits.budget, page_size=limits.page_size, rows=limits.rows)
        self.most: Counter[str] = Counter()
        self.outcomes: dict[str, Outcome] = {}
        watch(self.loop, self.most)

    @property
    def idle(self) -> bool:
        return not self.loop.has_work

    def submit(self, request_id: str, prompt: Sequence[int], new: int, *, hold: bool = False) -> None:
        self.outcomes[request_id] = Outcome([])
        self.loop.add(Request(request_id, prompt, new, hold_pages=hold))

    def step(self) -> None:
        for output in self.loop.step():
            tokens = self.outcomes[output.request_id].tokens + ([] if output.token is None else [output.token])
            self.outcomes[output.request_id] = Outcome(tokens, output.finished or "", output.error)

    def bring(self, request_id: str, phase: str) -> tuple[list[int], int]:
        new = 2 if phase == "held" else 3 * NEW
        self.submit(request_id, LONG, new, hold=phase == "held")
        reached: dict[str, Callable[[], object]] = {
            "waiting": lambda: self.loop.num_waiting,
            "prefill": lambda: self.loop.manager.contains(request_id),
            "decoding": lambda: len(self.outcomes[request_id].tokens) > 2,
            "held": lambda: self.outcomes[request_id].finished,
        }
        while not reached[phase]():
            self.step()
        assert phase != "prefill" or not self.outcomes[request_id].tokens
        return LONG, new

    def cancel(self, request_id: str) -> None:
        if self.loop.abort(request_id) and not self.outcomes[request_id].finished:
            self.outcomes[request_id] = self.outcomes[request_id]._replace(finished="cancelled")

    def outcome(self, request_id: str) -> Outcome:
        return self.outcomes[request_id]

    def counters(self) -> Counters:
        reused = self.loop.manager.metrics.cache_tokens
        return Counters(self.loop.preemptions, reused, self.most["tokens"], self.most["pages"])

    def held_pages(self) -> int:
        return self.loop.manager.total_num_pages - self.loop.manager.num_free_blocks

    def check(self) -> None:
        self.loop.manager.check()

    def kill_peer(self, peer: str) -> Collection[str]:
        raise NotImplementedError

    revive_peer = fail_pull = kill_peer

    def close(self) -> None:
        self.loop.manager.close()


class GeneratorDriver(LoopDriver):
    """A driver of `PagedGenerator`. A step is one call with all submitted prompts. A cancellation interrupts the
    call.
    """

    phases = ("prefill", "decoding")

    def __init__(self, model: Any) -> None:
        limits = self.limits
        manager = new_manager(model, limits.pages, limits.page_size, limits.rows)
        self.generator = PagedGenerator(model, manager, limits.budget)
        self.loop = self.generator._loop
        self.most = Counter()
        self.outcomes = {}
        self.queue: dict[str, tuple[Sequence[int], int]] = {}
        self.phase = ""
        watch(self.loop, self.most)

    @property
    def idle(self) -> bool:
        return not self.queue

    def submit(self, request_id: str, prompt: Sequence[int], new: int, *, hold: bool = False) -> None:  # noqa: ARG002
        self.outcomes[request_id] = Outcome([])
        self.queue[request_id] = prompt, new

    def step(self) -> None:
        for new in {new for _, new in self.queue.values()}:
            mine = {request_id: prompt for request_id, (prompt, count) in self.queue.items() if count == new}
            for request_id, tokens in zip(mine, self.generator.generate(list(mine.values()), new), strict=True):
                self.outcomes[request_id] = Outcome(tokens, "length" if len(tokens) == new else "eos")
                del self.queue[request_id]

    def bring(self, request_id: str, phase: str) -> tuple[list[int], int]:
        self.phase = phase
        self.submit(request_id, LONG, 3 * NEW)
        return LONG, 3 * NEW

    def cancel(self, request_id: str) -> None:
        if request_id not in self.queue:
            return
        run, least = self.loop.runner.run, {"prefill": 1, "decoding": len(LONG) + 2}[self.phase]

        def interrupted(batch: Sequence[Any], inputs: Any) -> list[int]:
            if any(c.start_idx >= least and c.tokens[: len(LONG)].tolist() == LONG for c in batch):
                raise KeyboardInterrupt
            return run(batch, inputs)

        self.loop.runner.run = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            self.step()
        self.loop.runner.run = run  # type: ignore[method-assign]
        del self.queue[request_id]
        self.outcomes[request_id] = Outcome([], "cancelled")


class WatchedService(Service):
    """The service, with counters for the runs of its models."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.most: Counter[str] = Counter()
        super().__init__(*args, **options)

    def _start(self, name: str, side: Side) -> tuple[ServingLoop[Any], PageExchange]:
        started = super()._start(name, side)
        watch(started[0], self.most)
        return started


class PairDriver:
    """A driver of `PrefillScheduler` and `DecodeScheduler`. They use real sockets and real READs, and are polled in
    turns.
    """

    phases = ("waiting", "asked", "offered", "pulling", "decoding")
    peers = ("prefill", "decode")
    survives = ("prefill", "pull")
    limits = Limits(page_size=16, pages=20, rows=4, budget=32)

    def __init__(self, model: Any, directory: Path) -> None:
        limits = self.limits
        side = Side(pages=limits.pages, page_size=limits.page_size, rows=limits.rows, budget=limits.budget)
        self.service = WatchedService(model, directory, side, side, lease_s=1.0)
        self.service.until(lambda: self.service.connected, "the link")
        self.lost: set[str] = set()
        self.victim, self.refusals, self.stalled = "", 0.0, False
        self.patch = pytest.MonkeyPatch()
        self._meddle_with_reads()

    def _meddle_with_reads(self) -> None:
        """Patches NIXL so that chosen READs fail when they are posted or in flight, or stay in flight until the test
        ends them. A READ that is already in flight must also fail, because it may be the last READ that the victim
        needs.
        """
        read, done = Agent.read, Agent.done

        def fail_one() -> None:
            if self.refusals > 0 and self.victim not in self.service.ended:
                self.refusals -= 1
                raise AgentError("the test makes this READ fail")

        def meddled_read(agent: Agent, *args: Any) -> Any:
            fail_one()
            peer, local, remote, kinds = args
            return agent.post("READ", peer, local, remote, b"", kinds)[0] if self.stalled else read(agent, *args)

        def meddled_done(*args: Any) -> bool:
            if self.stalled:
                return False
            fail_one()
            return done(*args)

        self.patch.setattr(Agent, "read", meddled_read)
        self.patch.setattr(Agent, "done", meddled_done)

    @property
    def idle(self) -> bool:
        service = self.service
        ended = all(self.outcome(request_id).finished for request_id in service.tokens)
        return ended and not any(one.open_requests for one in (*service.prefills.values(), *service.decodes.values()))

    def submit(self, request_id: str, prompt: Sequence[int], new: int) -> None:
        self.service.submit_one(request_id, prompt, new)

    def step(self) -> None:
        self.stalled = False
        self.service.poll()

    def bring(self, request_id: str, phase: str) -> tuple[list[int], int]:
        # The request stays in "offered" because another request leaves too few pages at decode. It stays in "pulling"
        # because a READ is in flight.
        self.stalled = phase == "pulling"
        prompt, new = (prompt_of(202, 300), 10) if phase == "offered" else (LONG, 3 * NEW)
        request = self.service.submit_one(request_id, prompt, new)
        many = 2 if phase == "decoding" else 0
        self.service.until(lambda: request.phase == phase and len(self.service.tokens[request_id]) >= many, phase)
        return prompt, new

    def cancel(self, request_id: str) -> None:
        self.service.decode.abort(request_id)
        self.service.collect()

    def outcome(self, request_id: str) -> Outcome:
        tokens, end = self.service.tokens[request_id], self.service.ended.get(request_id)
        if end is not None:
            return Outcome(tokens, str(end.finished), end.error)
        return Outcome(tokens, "error", "its process was killed") if request_id in self.lost else Outcome(tokens)

    def counters(self) -> Counters:
        service, page_size = self.service, self.limits.page_size
        prefill, decode = service.prefill.stats(), service.decode.stats()
        return Counters(
            sum(loop.preemptions for loop in service.loops.values()),
            min(prefill.cached_tokens, decode.pages_reused * page_size),
            service.most["tokens"],
            service.most["pages"],
            service.exchanges["d0"].totals()[1],
        )

    def held_pages(self) -> int:
        return sum(loop.manager.num_held_blocks for loop in self.service.loops.values())

    def check(self) -> None:
        for loop in self.service.loops.values():
            loop.manager.check()

    def kill_peer(self, peer: str) -> Collection[str]:
        if peer == "prefill":
            self.service.stop_prefill("p0")
            return ()
        # The end of the decode engine waits for READs in flight, so the READ must no longer be stalled.
        self.stalled = False
        self.service.stop_decode("d0")
        lost = {request_id for request_id in self.service.tokens if request_id not in self.service.ended}
        self.lost |= lost
        return lost

    def revive_peer(self, peer: str) -> None:
        self.service.start_prefill("p0") if peer == "prefill" else self.service.start_decode("d0")

    def fail_pull(self, request_id: str, *, final: bool) -> None:
        self.victim, self.refusals = request_id, math.inf if final else 1

    def close(self) -> None:
        self.stalled = False
        self.service.close()
        self.patch.undo()


class TestServingLoop(AdapterContract):
    driver = LoopDriver

    @pytest.fixture
    def adapter(self, model: Any) -> Iterator[LoopDriver]:
        made = self.driver(model)
        yield made
        made.close()


class TestPagedGenerator(TestServingLoop):
    driver = GeneratorDriver


class TestPrefillAndDecode(AdapterContract):
    driver = PairDriver

    @pytest.fixture
    def adapter(self, model: Any, tmp_path: Path) -> Iterator[PairDriver]:
        made = PairDriver(model, tmp_path)
        yield made
        made.close()


def keep_pages_at_abort(driver: LoopDriver) -> None:
    def abort(request_id: str) -> bool:
        return driver.loop._running.pop(request_id, None) is not None

    driver.loop.abort = abort  # type: ignore[method-assign]


def never_find_anything(driver: LoopDriver) -> None:
    manager, reserve = driver.loop.manager, driver.loop.manager.maybe_reserve
    manager.maybe_reserve = lambda *args: (manager.reset_prefix_cache(), reserve(*args))[1]


def say_other_tokens(driver: LoopDriver) -> None:
    run = driver.loop.runner.run
    driver.loop.runner.run = lambda *args: [(token + 1) % 250 for token in run(*args)]  # type: ignore[method-assign]


BROKEN: dict[str, tuple[Callable[[Any], Any], Callable[[AdapterContract, Case], None], str]] = {
    "an ended request keeps its pages": (
        lambda driver: setattr(driver.loop.manager, "release", lambda request_id: None),
        AdapterContract.test_hit,
        "4 pages are held",
    ),
    "a cancelled request keeps its pages": (
        keep_pages_at_abort,
        lambda cases, case: cases.test_cancel(case, "prefill"),
        "pages are held",
    ),
    "a cancelled request runs on": (
        lambda driver: setattr(driver.loop, "abort", lambda request_id: False),
        lambda cases, case: cases.test_cancel(case, "decoding"),
        "victim generated tokens after its cancellation",
    ),
    "a request never ends": (
        lambda driver: setattr(driver.loop, "step", list),
        AdapterContract.test_drain,
        "waited 0.2 s for the end",
    ),
    "tokens are not the model's": (say_other_tokens, AdapterContract.test_admission, "the model's own are"),
    "nothing is found again": (never_find_anything, AdapterContract.test_hit, "0 tokens were found cached, 48 were"),
    "the budget is not kept": (
        lambda driver: setattr(driver.loop, "token_budget", 512),
        AdapterContract.test_chunk,
        "80 tokens ran at a time",
    ),
    "there is room for all": (
        lambda driver: driver.__init__(driver.loop.runner.model, LIMITS._replace(pages=100)),
        AdapterContract.test_preempt,
        "no request was preempted",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_contract_notices_a_loop_that_is_broken(model: Any, reference: Reference, what: str) -> None:
    driver = LoopDriver(model)
    break_it, run, message = BROKEN[what]
    break_it(driver)
    with pytest.raises(AssertionError, match=message):
        run(AdapterContract(), Case(driver, reference, **({"limit_s": 0.2} if message.startswith("waited") else {})))


def test_the_contract_notices_pages_that_a_failed_pull_keeps(model: Any, reference: Reference, tmp_path: Path) -> None:
    driver = PairDriver(model, tmp_path)
    driver.service.loops["d0"].manager.cancel_import = lambda pending: None
    with pytest.raises(AssertionError, match="pages are held, but no request is running"):
        AdapterContract().test_cancel(Case(driver, reference), "pulling")
    driver.close()
