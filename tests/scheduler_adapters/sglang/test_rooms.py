"""SGLang's rooms without SGLang. Leases and pulls run over real sockets and NIXL, in the steps of SGLang's
schedulers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from scheduler_adapters.sglang.leases import Computed, FollowerLeases, RoomLeases
from scheduler_adapters.sglang.pulls import Destination, RoomPulls
from scheduler_adapters.sglang.ranks import RankFollower, RankLeader
from scheduler_adapters.sglang.rooms import RoomClient, RoomServer, connect, endpoint
from transfer.connector.config import GroupConfig, Timing, WorkerConfig
from transfer.connector.scheduler import NixlConnectorScheduler
from transfer.connector.worker import NixlConnectorWorker
from transfer.wire.allowed_peers import AllowedPeers
from transfer.wire.prompt import Prompt

HEADS, DIM, PAGE, TOKENS = 2, 4, 4, 10
ROOM = 1 << 40
GROUP = GroupConfig(
    layers={"layer.0": 0},
    block_size=PAGE,
    layout="page,side,token,head,dim",
    num_kv_heads=HEADS,
    head_dim=DIM,
    dtype="float32",
)
PROMPT = Prompt(range(TOKENS))
WRITTEN = torch.arange(1.0, 3 * PAGE + 1)


_VALUES: list[torch.Tensor] = []  # The process keeps the tensors until its end, because READs may still write to them.


class Told:
    """Records the reports of transfers that SGLang's manager would get."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda room, reason="": self.heard.append(f"{name}: {reason}" if reason else name)


class Sides:
    """A prefill engine of several ranks, and a decode engine of one rank."""

    def __init__(self, ranks: int = 1, lease_s: float = 30.0, expect_s: float = 10.0) -> None:
        self.prefill, self.decode = Told(), Told()
        self.followers_told: list[Told] = [Told() for _ in range(ranks - 1)]
        self.keys = [torch.zeros(8, PAGE, HEADS // ranks, DIM) for _ in range(ranks)]
        workers, configs = zip(
            *(self._worker("prefill", rank, ranks, self.keys[rank], lease_s) for rank in range(ranks)), strict=True
        )
        server, token = RoomServer("127.0.0.1", None), b"t" * 16
        self.address = endpoint("127.0.0.1", server.port)
        scheduler = NixlConnectorScheduler(configs[0])
        scheduler.set_handshake_metadata({rank: worker.get_handshake_metadata() for rank, worker in enumerate(workers)})
        self.leases: list[Any] = [
            RoomLeases(workers[0], scheduler, server, RankLeader(server, ranks, token), self.prefill, expect_s)
        ]
        self.leases += [
            FollowerLeases(worker, RankFollower(self.address, rank, token, None), self.followers_told[rank - 1])
            for rank, worker in enumerate(workers)
            if rank
        ]
        self.server = server
        self.here = torch.zeros(8, PAGE, HEADS, DIM)
        worker, config = self._worker("decode", 0, 1, self.here, lease_s)
        client = RoomClient(None, AllowedPeers())
        self.pulls = RoomPulls(worker, NixlConnectorScheduler(config), client, self.decode)
        self.rows: list[Any] = []

    @staticmethod
    def _worker(
        role: str, rank: int, ranks: int, keys: torch.Tensor, lease_s: float
    ) -> tuple[NixlConnectorWorker, WorkerConfig]:
        config = WorkerConfig(
            engine_id=f"{role}-{id(Sides)}",
            incarnation="one",
            groups=(GROUP,),
            model="m",
            tp_rank=rank,
            tp_size=ranks,
            timing=Timing(lease=lease_s),
        )
        worker = NixlConnectorWorker(config)
        _VALUES.append(torch.zeros_like(keys))
        worker.register_kv_caches({"layer.0": (keys, _VALUES[-1])})
        return worker, config

    def until(self, ready: Callable[[], bool], seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < end, (self.prefill.heard, self.decode.heard)
            for side in (*self.leases, self.pulls):
                side.step()
            time.sleep(1e-3)

    def check_hears(self, told: Told, text: str) -> None:
        self.until(lambda: any(text in heard for heard in told.heard))

    def compute(self, prompt: Prompt = PROMPT) -> None:
        """Makes pages 5, 2 and 7 hold the prompt's tokens on every rank."""
        for rank, keys in enumerate(self.keys):
            keys[[5, 2, 7]] = WRITTEN.view(3, PAGE, 1, 1) + 100 * rank
        for lease in self.leases:
            lease.offer(ROOM, Computed([[5, 2, 7]], [0], TOKENS, (b"row",), prompt))

    def open(self) -> None:
        for lease in self.leases:
            lease.open(ROOM)

    def place(self, blocks: list[int], done: int = 0) -> None:
        self.pulls.place(ROOM, Destination([blocks], [done // PAGE], done, self.rows.append))

    def close(self) -> None:
        for side in (*self.leases, self.pulls):
            side.shutdown()


@pytest.fixture
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    made = Sides(**getattr(request, "param", {}))
    yield made
    made.close()


def arrived(sides: Sides, blocks: list[int], first: int = 0) -> None:
    ranks = len(sides.keys)
    wanted = WRITTEN.view(3, PAGE)[first:]
    for head in range(HEADS):
        found = sides.here[blocks][..., head, 0].flatten()[: TOKENS - first * PAGE]
        assert torch.equal(found, (wanted + 100 * (head * ranks // HEADS)).flatten()[: len(found)])


@pytest.mark.parametrize("sides", [{"ranks": 1}, {"ranks": 2}], indirect=True)
def test_a_room_goes_from_its_question_to_its_end(sides: Sides) -> None:
    sides.open()
    sides.pulls.want(ROOM, sides.address, PROMPT)
    sides.check_hears(sides.prefill, "room_wanted")
    sides.place([1, 4, 3])
    sides.compute()
    sides.check_hears(sides.decode, "room_loaded")
    sides.check_hears(sides.prefill, "room_read")
    for told in sides.followers_told:
        sides.check_hears(told, "room_read")
    arrived(sides, [1, 4, 3])
    assert sides.rows == [(b"row",)]
    for lease in sides.leases:
        lease.close(ROOM, "done")
        assert lease.open_count == 0
    assert sides.pulls.open_count == 0
    assert sides.pulls.is_over(ROOM)


@pytest.mark.parametrize("sides", [{"lease_s": 4.0}], indirect=True)
def test_decode_without_pages_keeps_the_lease_until_it_has_some(sides: Sides) -> None:
    sides.pulls.want(ROOM, sides.address, PROMPT)  # Decode asks before prefill has the request.
    sides.open()
    sides.check_hears(sides.prefill, "room_wanted")
    sides.compute()
    end = time.monotonic() + 5.0
    sides.until(lambda: time.monotonic() > end)
    assert sides.prefill.heard[-1] == "room_wanted", "the lease must not be renewed"
    sides.place([1, 4, 3])
    sides.check_hears(sides.decode, "room_loaded")
    arrived(sides, [1, 4, 3])


def test_pages_that_decode_has_are_not_read(sides: Sides) -> None:
    sides.open()
    sides.pulls.want(ROOM, sides.address, PROMPT)
    sides.check_hears(sides.prefill, "room_wanted")
    sides.place([4, 3], done=PAGE)
    sides.compute()
    sides.check_hears(sides.decode, "room_loaded")
    arrived(sides, [4, 3], first=1)
    assert not sides.here[1].any()


@pytest.mark.parametrize("sides", [{"ranks": 1}, {"ranks": 2}], indirect=True)
def test_a_reader_of_a_closed_room_is_told_why_even_if_it_asks_later(sides: Sides) -> None:
    sides.open()
    sides.pulls.want(ROOM, sides.address, PROMPT)
    sides.check_hears(sides.prefill, "room_wanted")
    for lease in sides.leases:
        lease.close(ROOM, "aborted for a reason")
    sides.check_hears(sides.decode, "room_failed: prefill: aborted for a reason")
    sides.decode.heard.clear()
    sides.pulls.want(ROOM, sides.address, PROMPT)
    sides.check_hears(sides.decode, "room_failed: prefill: aborted for a reason")


@pytest.mark.parametrize("sides", [{"ranks": 1}, {"ranks": 2}], indirect=True)
def test_a_room_that_is_closed_while_its_lease_stands_is_free_at_once(sides: Sides) -> None:
    sides.open()
    sides.pulls.want(ROOM, sides.address, PROMPT)
    sides.check_hears(sides.prefill, "room_wanted")
    sides.compute()
    sides.until(lambda: ROOM in sides.pulls._rooms and sides.pulls._rooms[ROOM].ready is not None)
    for lease in reversed(sides.leases):
        lease.close(ROOM, "aborted")
        assert lease.open_count == 0
    sides.place([1, 4, 3])
    sides.check_hears(sides.decode, "room_failed")
    sides.until(lambda: sides.pulls.is_over(ROOM))
    assert sides.rows == []


def test_a_room_that_decode_drops_before_and_after_prefill_has_it(sides: Sides) -> None:
    sides.pulls.want(ROOM, sides.address, PROMPT)
    sides.pulls.give_up(ROOM, "its client went away")
    sides.until(lambda: ROOM in sides.leases[0]._rooms and bool(sides.leases[0]._rooms[ROOM].dropped))
    sides.open()
    sides.check_hears(sides.prefill, "room_failed: decode: its client went away")
    sides.leases[0].close(ROOM, "dropped")
    sides.pulls.want(ROOM + 1, sides.address, PROMPT)
    sides.leases[0].open(ROOM + 1)
    sides.check_hears(sides.prefill, "room_wanted")
    sides.pulls.give_up(ROOM + 1, "its client went away, too")
    sides.check_hears(sides.prefill, "room_failed: decode: its client went away, too")


def test_pages_of_other_tokens_are_not_read(sides: Sides) -> None:
    sides.open()
    sides.pulls.want(ROOM, sides.address, PROMPT)
    sides.check_hears(sides.prefill, "room_wanted")
    sides.place([1, 4, 3])
    sides.compute(Prompt(range(1, TOKENS + 1)))
    sides.check_hears(sides.decode, "holds the pages of another prompt")
    sides.check_hears(sides.prefill, "room_failed: decode: ")
    assert not sides.here.any()


def test_pages_that_do_not_fit_are_not_read(sides: Sides) -> None:
    sides.open()
    sides.pulls.want(ROOM, sides.address, PROMPT)
    sides.check_hears(sides.prefill, "room_wanted")
    sides.place([1, 4])
    sides.compute()
    sides.check_hears(sides.decode, "but SGLang named 2 local pages, starting at page 0")
    assert not sides.here.any()


@pytest.mark.parametrize("sides", [{"expect_s": 0.2}], indirect=True)
def test_a_request_that_never_comes_to_prefill(sides: Sides) -> None:
    sides.pulls.want(ROOM, sides.address, PROMPT)
    sides.check_hears(
        sides.decode, "room_failed: prefill: decode asked for room 1099511627776, but prefill got no request for it"
    )
    assert sides.leases[0]._rooms == {}


@pytest.mark.parametrize("sides", [{"lease_s": 0.3}], indirect=True)
def test_a_decode_that_is_gone_costs_prefill_one_lease(sides: Sides) -> None:
    sides.open()
    sides.pulls.want(ROOM, sides.address, PROMPT)
    sides.check_hears(sides.prefill, "room_wanted")
    sides.pulls.shutdown()
    sides.compute()
    end = time.monotonic() + 10
    while not any("not read" in heard for heard in sides.prefill.heard) and time.monotonic() < end:
        sides.leases[0].step()
        time.sleep(1e-3)
    assert any("the pages were leased and not read" in heard for heard in sides.prefill.heard)


def test_a_prefill_that_is_gone_fails_the_rooms_that_wait_for_it(sides: Sides) -> None:
    sides.open()
    sides.pulls.want(ROOM, sides.address, PROMPT)
    sides.check_hears(sides.prefill, "room_wanted")
    sides.server.close()
    end = time.monotonic() + 10
    while not any("is gone" in heard for heard in sides.decode.heard) and time.monotonic() < end:
        sides.pulls.step()
        time.sleep(1e-3)
    assert any(heard.startswith("prefill_gone") or "is gone" in heard for heard in sides.decode.heard)
    assert any(f"room_failed: the prefill process at {sides.address} is gone" in heard for heard in sides.decode.heard)


def test_an_address_outside_of_the_allowed_peers_is_not_asked(sides: Sides) -> None:
    sides.pulls.want(ROOM, "tcp://192.0.2.77:5555", PROMPT)
    assert "is not in allowed_peers" in sides.decode.heard[-1]


@pytest.mark.parametrize(
    "message",
    [b"", b"\xff" * 100, msgspec.msgpack.encode({"type": "wanted", "room": -1}), msgspec.msgpack.encode({"type": "x"})],
)
def test_bytes_that_are_no_message_do_no_harm(sides: Sides, message: bytes) -> None:
    socket = connect(sides.address, None)
    socket.send(message)
    sides.until(lambda: sides.server.malformed == 1)
    socket.close(linger=0)
    test_a_room_goes_from_its_question_to_its_end(sides)


def test_an_output_without_the_ranks_token_is_not_booked(sides: Sides, caplog: pytest.LogCaptureFixture) -> None:
    follower = RankFollower(sides.address, 1, b"another token...", None)
    sides.until(lambda: "was not sent by a rank of this engine" in caplog.text)
    follower.close()
    test_a_room_goes_from_its_question_to_its_end(sides)
