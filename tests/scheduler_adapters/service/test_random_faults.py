"""Random requests and faults from a seed. Every request ends once, with right tokens or a reason, and no pages stay
held.
"""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.errors import NoFreeRowError
from scheduler_adapters.service.requests import DECODE_MOVES, PREFILL_MOVES, PrefillRequest, TrackedRequest
from tests.scheduler_adapters.service.processes import Service, Side
from tests.scheduler_adapters.service.test_faults import empty, fill

PROMPTS = [[seed * 7 % 250 + at % 5 for at in range(length)] for seed, length in enumerate((150, 40, 90, 16, 64, 100))]
NEW = 6
# Moves that need an error of the transfer thread, or a race of less than a millisecond.
RARE = {(phase, "over") for phase in ("fetching", "leasing", "computing", "offered")} | {("leasing", "computing")}


SHARES = {"submit": 40, "abort": 10, "lose": 6, "hang up": 3, "late": 6, "prefill": 3, "decode": 2, "fill": 3}


class Moves:
    """Counts the moves that requests make."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: Counter[tuple[str, str, str]] = Counter()
        move = TrackedRequest.move

        def counted(request: TrackedRequest, phase: str, *deadline: float) -> None:
            side = "prefill" if isinstance(request, PrefillRequest) else "decode"
            self.seen[side, request.phase, phase] += 1
            move(request, phase, *deadline)

        monkeypatch.setattr(TrackedRequest, "move", counted)


class Storm:
    """One run of random faults: the open requests, and the outcomes of the ended requests."""

    def __init__(self, service: Service, expected: list[list[int]], seed: int) -> None:
        self.service, self.expected, self.random = service, expected, random.Random(seed)
        # For each request, the index of its prompt and the name of its decode process.
        self.asked: dict[str, tuple[int, str]] = {}
        self.lost: set[str] = set()  # The requests of stopped decode processes.
        self.faults: Counter[str] = Counter()  # For each fault, how often it had an effect.

    def act(self, kind: str) -> bool:  # noqa: C901  (a case for each kind)
        """Causes a fault, if the fault has a target. Returns whether it had a target."""
        service, rng = self.service, self.random
        requests = [request for decode in service.decodes.values() for request in decode._requests.values()]
        if kind == "submit":
            request_id, prompt = f"r{len(self.asked)}", rng.randrange(len(PROMPTS))
            name = rng.choice(list(service.decodes))
            self.asked[request_id] = prompt, name
            service.submit_one(request_id, PROMPTS[prompt], NEW, service.decodes[name])
        elif kind == "abort":
            if not requests:
                return False
            request = rng.choice(requests)
            service.decodes[self.asked[request.request_id][1]].abort(request.request_id)
        elif kind == "lose":
            connections = [
                connection for one in service.decodes.values() for connection in one.connections if connection.welcome
            ]
            if not connections:
                return False
            rng.choice(connections).lose("a hiccup")
        elif kind == "hang up":
            readers = [(one, reader) for one in service.prefills.values() for reader in one._readers]
            if not readers:
                return False
            prefill, reader = rng.choice(readers)
            prefill._lose(reader, "a full queue")
        elif kind == "late":
            every = [*requests, *(request for one in service.prefills.values() for request in one._requests.values())]
            every = [request for request in every if request.phase not in ("held", "ending")]
            if not every:
                return False
            rng.choice(every).deadline = 0.0
        elif kind == "fill":
            name = rng.choice(list(service.loops))
            manager = service.loops[name].manager
            if manager.contains("hog") or not manager.num_free_blocks or service.loops[name].num_waiting:
                return False
            try:
                fill(service, name)
            except NoFreeRowError:  # Requests have claimed all rows of the replica.
                return False
        elif kind in ("prefill", "decode"):
            self.restart(kind)
        return True

    def restart(self, kind: str) -> None:
        service = self.service
        if kind == "prefill":
            name = self.random.choice(list(service.prefills))
            service.stop_prefill(name)
            service.start_prefill(name)
            return
        name = self.random.choice(list(service.decodes))
        service.collect()
        self.lost |= {request_id for request_id, (_, at) in self.asked.items() if at == name} - set(service.ended)
        service.stop_decode(name)
        service.start_decode(name)

    def check_run(self, actions: int) -> None:
        service = self.service
        kinds = list(SHARES)
        todo = [*kinds, *self.random.choices(kinds, list(SHARES.values()), k=actions - len(kinds))]
        self.random.shuffle(todo)
        for _ in range(20 * actions):
            if not todo:
                break
            kind = todo.pop(0)
            if self.act(kind):
                self.faults[kind] += 1
            else:  # The fault has no target now, so it is tried again later.
                if "submit" in todo:
                    todo.remove("submit")
                todo[:3] = ["submit", *todo[:2], kind, *todo[2:3]]
            for _ in range(self.random.randrange(6)):
                service.poll()
            if self.random.random() < 0.3:
                empty(service)
        empty(service)
        assert set(self.faults) == set(SHARES), f"left to do: {todo}"
        service.until(lambda: not set(self.asked) - set(service.ended) - self.lost, "the last token")
        for request_id, (prompt, _) in self.asked.items():
            self.judge(request_id, self.expected[prompt])
        service.assert_nothing_held()

    def judge(self, request_id: str, wanted: list[int]) -> None:
        tokens, end = self.service.tokens[request_id], self.service.ended.get(request_id)
        assert tokens == wanted[: len(tokens)], request_id
        if end is None:
            assert request_id in self.lost
        elif end.finished in ("eos", "length"):
            assert tokens == wanted, request_id
        else:
            assert end.finished == "cancelled" or end.error


@pytest.fixture
def storm(model: Any, expected: list[list[int]], tmp_path: Path) -> Iterator[Any]:
    made: list[Service] = []

    def make(seed: int) -> Storm:
        made.append(
            Service(
                model,
                tmp_path / str(len(made)),
                Side(pages=24, count=2, budget=32),
                Side(pages=10, page_size=32, count=2, tp=2),
                lease_s=1.0,
            )
        )
        return Storm(made[-1], expected, seed)

    yield make
    for service in made:
        service.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_every_request_of_a_storm_ends_once_and_nothing_is_held(storm: Any, seed: int) -> None:
    run = storm(seed)
    run.check_run(60)
    assert len(run.asked) >= SHARES["submit"] // 2
    assert not set(run.service.ended) - set(run.asked)


@pytest.mark.long
def test_storms_make_every_legal_move(storm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moves = Moves(monkeypatch)
    legal = {("prefill", a, b) for a, after in PREFILL_MOVES.items() for b in after}
    legal |= {("decode", a, b) for a, after in DECODE_MOVES.items() for b in after}
    wanted = {move for move in legal if move[1:] not in RARE}
    for seed in range(100, 124):
        one = storm(seed)
        one.check_run(80)
        one.service.close()  # The threads of this service would slow down the next storms.
        if wanted <= set(moves.seen):
            break
    assert wanted <= set(moves.seen), f"never made: {sorted(wanted - set(moves.seen))}"
