"""Every message is delivered twice, late and out of order, in every phase. The client gets each token once."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvcache.errors import NoFreeRowError
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.requests import DecodeRequest
from tests.scheduler_adapters.deliverer import Deliverer, Reached
from tests.scheduler_adapters.service.processes import Service, Side
from tests.scheduler_adapters.service.test_faults import empty, fill

PROMPTS = [[seed * 7 % 250 + at % 5 for at in range(length)] for seed, length in enumerate((150, 40, 90, 16, 64, 100))]
NEW = 6


class Schedule:
    """One run: requests arrive, and some requests are cancelled. With `trouble`, attempts fail as well."""

    def __init__(self, service: Service, deliverer: Deliverer, expected: list[list[int]], seed: int) -> None:
        self.service, self.deliverer, self.expected = service, deliverer, expected
        self.random = random.Random(seed)
        # For each request, the index of its prompt and the name of its decode process.
        self.asked: dict[str, tuple[int, str]] = {}
        self.aborted: set[str] = set()
        self.trouble: Counter[str] = Counter()

    def offered(self) -> list[DecodeRequest]:
        """Returns the requests that wait for pages at their decode process. Random choices seldom meet this short
        phase.
        """
        requests = [request for one in self.service.decodes.values() for request in one._requests.values()]
        return [request for request in requests if request.phase == "offered"]

    def submit(self) -> None:
        rng, number = self.random, len(self.asked) + 1
        request_id, prompt, name = f"r{number}", rng.randrange(len(PROMPTS)), rng.choice(list(self.service.decodes))
        self.asked[request_id] = prompt, name
        self.service.tokens[request_id] = []
        message = msg.Submit(request_id=request_id, prompt=tuple(PROMPTS[prompt]), max_new_tokens=NEW, serial=number)
        self.deliverer.to_decode(name, message)

    def abort(self) -> None:
        offered = [request.request_id for request in self.offered()]
        request_id = self.random.choice(offered if offered and self.random.random() < 0.5 else list(self.asked))
        self.aborted.add(request_id)
        name = self.asked[request_id][1]
        self.deliverer.to_decode(name, msg.Abort(request_id=request_id, serial=int(request_id[1:])))

    def fill(self) -> None:
        """Takes all pages of a process for a while, so that requests stay in their phases."""
        name = self.random.choice([*self.service.loops, *self.service.decodes])
        loop = self.service.loops[name]
        if not loop.manager.contains("hog") and loop.manager.num_free_blocks and not loop.num_waiting:
            with suppress(NoFreeRowError):
                fill(self.service, name)

    def fail(self) -> None:
        """Makes an attempt fail at prefill or at decode, or breaks a connection."""
        service, rng = self.service, self.random
        kind = rng.choice(["prefill", "prefill", "decode", "decode", "connection"])
        if kind == "prefill":
            every = [(one, request) for one in service.prefills.values() for request in one._requests.values()]
            offered = {(request.request_id, request.attempt) for request in self.offered()}
            rare = [(one, request) for one, request in every if (request.request_id, request.attempt) in offered]
            if every:
                prefill, request = rng.choice(rare or every)
                prefill._end(request, "says the schedule")
                self.trouble[kind] += 1
        elif kind == "decode":
            requests = [request for one in service.decodes.values() for request in one._requests.values()]
            waiting = [request for request in requests if request.phase in ("asked", "offered", "pulling")]
            if waiting:
                rng.choice(waiting).deadline = 0.0
                self.trouble[kind] += 1
        else:
            connection = rng.choice(rng.choice(list(service.decodes.values())).connections)
            self.trouble[kind] += connection.welcome is not None
            connection.lose("a hiccup")

    def poll(self) -> None:
        self.deliverer.round += 1
        self.deliverer.deliver_to_decodes()
        every = [*self.service.prefills.values(), *self.service.decodes.values()]
        self.random.shuffle(every)
        for scheduler in every:
            scheduler.poll()

    def run(self, requests: int, *, trouble: bool) -> None:
        rng = self.random
        while len(self.asked) < requests:
            action = rng.choices([self.submit, self.abort, self.fill, self.fail], [10, 2, 2, 8 * trouble])[0]
            if self.asked or action == self.submit:
                action()
            for _ in range(rng.randrange(12)):
                self.poll()
            self.service.collect()
            if rng.random() < 0.15:
                empty(self.service)
        empty(self.service)
        until = self.service.until
        until(lambda: not set(self.asked) - set(self.service.ended), "the last token", 60, self.poll)
        until(lambda: not self.deliverer.num_held, "the last message", 60, self.poll)
        for _ in range(20):
            self.poll()
        for request_id, (prompt, _) in self.asked.items():
            self.judge(request_id, self.expected[prompt], trouble=trouble)
        every = [*self.service.prefills.values(), *self.service.decodes.values()]
        until(lambda: not any(one.open_requests for one in every), "the last lease", 60, self.poll)
        assert [one.stats().pages_held for one in every] == [0] * len(every)  # `stats` also calls `check()`.

    def judge(self, request_id: str, wanted: list[int], *, trouble: bool) -> None:
        tokens, end = self.service.tokens[request_id], self.service.ended[request_id]
        if end.finished in ("eos", "length"):
            assert tokens == wanted, request_id
            return
        assert tokens == wanted[: len(tokens)], request_id
        if end.finished == "cancelled":
            assert request_id in self.aborted
        else:
            assert trouble, f"{request_id} failed only because of how messages were delivered: {end.error}"
            assert "attempts: " in end.error


@pytest.fixture
def schedule(
    model: Any, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], Schedule]]:
    made: list[Service] = []

    def make(seed: int) -> Schedule:
        for service in made:
            service.close()
        made[:] = [
            Service(
                model,
                tmp_path / str(seed),
                Side(pages=24, count=2, budget=32),
                Side(pages=10, page_size=32, count=2, tp=2),
                lease_s=5.0,
            )
        ]
        return Schedule(made[0], Deliverer(made[0], seed, monkeypatch, late=0.5), expected, seed)

    yield make
    for service in made:
        service.close()


@pytest.mark.parametrize("seed", range(2))
def test_late_and_repeated_messages_cost_no_request_and_no_token(
    schedule: Callable[[int], Schedule], seed: int
) -> None:
    one = schedule(seed)
    one.run(20, trouble=False)
    happened = Counter(reached.how for reached in one.deliverer.reached.elements())
    assert min(happened[how] for how in ("in time", "again", "late")) > 0, happened


@pytest.mark.parametrize("seed", range(10, 12))
def test_late_messages_of_attempts_that_failed_touch_no_other(schedule: Callable[[int], Schedule], seed: int) -> None:
    one = schedule(seed)
    one.run(20, trouble=True)
    assert one.trouble.total() > 0


# The deliveries that must have occurred. Each has the message, the beginning of the phase's name, and the way in which
# the message was delivered.
WANTED = {
    *(Reached("last offer", phase, "again") for phase in ("offered, after the last", "pulling, after the last")),
    *(Reached("last offer", phase, "again") for phase in ("decoding", "over", "another attempt")),
    *(Reached("last offer", phase, "overtaken") for phase in ("over", "another attempt")),
    *(Reached("PagesOffer", phase, "again") for phase in ("offered", "pulling", "decoding", "over")),
    # The last offer waits for the offers that it has overtaken (`Offers.take`), so no offer arrives after it.
    *(Reached("PagesOffer", phase, "overtaken") for phase in ("asked", "offered, not smaller", "pulling, not smaller")),
    *(Reached("PagesOffer", phase, "overtaken") for phase in ("over", "another attempt")),
    *(Reached("Failed", phase, "again") for phase in ("over", "another attempt")),
    *(Reached("Failed", phase, "late") for phase in ("asked", "offered", "pulling")),
    *(Reached("Prefill", phase, "again") for phase in ("queued", "leasing", "offered", "held", "over")),
    *(Reached("Prefill", "not begun", how) for how in ("late", "overtaken")),
    *(Reached("Cancel", phase, "again") for phase in ("ending", "over")),
    *(Reached("Cancel", phase, "late") for phase in ("not begun", "held", "over")),
    Reached("Cancel", "a younger attempt is there", "overtaken"),
    Reached("Hello", "known", "again"),
    Reached("Hello", "new", "overtaken"),
    Reached("Welcome", "-", "again"),
    *(Reached("Submit", phase, "again") for phase in ("no request", "waiting", "asked", "pulling", "decoding")),
    Reached("Submit", "no request", "overtaken"),
    *(Reached("Abort", phase, "again") for phase in ("no request",)),
    *(Reached("Abort", phase, "in time") for phase in ("asked", "offered", "pulling", "decoding")),
}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_schedules_reach_every_message_in_every_phase(schedule: Callable[[int], Schedule]) -> None:
    total: Counter[Reached] = Counter()
    missing, seeds = set(WANTED), range(100, 160)
    for seed in seeds:
        one = schedule(seed)
        one.run(30, trouble=bool(seed % 3))
        total += one.deliverer.reached
        print(f"seed {seed}: {one.deliverer.reached.total()} deliveries, {dict(one.trouble)}")  # noqa: T201
        missing -= {wanted for wanted in missing if any(wanted.covers(reached) for reached in one.deliverer.reached)}
        if not missing:
            break
    for reached, count in sorted(total.items()):
        print(f"{count:6} {', '.join(reached)}")  # noqa: T201
    assert not missing, f"never reached with seeds {seeds}: {sorted(missing)}"
