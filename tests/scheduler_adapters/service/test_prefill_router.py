"""Whom a decode process asks, and what it books for it: over real sockets, with nobody behind them but the test."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from scheduler_adapters.loop import Request
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.prefills import Prefills
from scheduler_adapters.service.requests import DecodeRoom
from scheduler_adapters.service.sockets import bind_router, received

_names = itertools.count()


@pytest.fixture
def fleet() -> Iterator[tuple[Prefills, list[Any]]]:
    """Two prefill processes, and the routers where they listen."""
    context: zmq.Context[Any] = zmq.Context()
    at = [f"inproc://prefills-{next(_names)}" for _ in range(2)]
    routers = [bind_router(context, endpoint) for endpoint in at]
    prefills = Prefills(context, at, msg.Hello(reader="d", incarnation="1"), time.monotonic)
    yield prefills, routers
    prefills.close()
    context.destroy(linger=0)


def heard(prefills: Prefills, router: Any, answers: int = 0) -> list[msg.AnyMessage]:
    """What has come to a router; the first so many messages are answered with `Welcome`."""
    found = []
    deadline = time.monotonic() + 5
    while not found and time.monotonic() < deadline:
        for identity, data in received(router):
            found.append(msg.decode(data))
            if len(found) <= answers:
                welcome = msg.Welcome(name=f"p{id(router)}", incarnation="1", engines=("e",))
                router.send_multipart([identity, msg.encode(welcome)])
    for _ in range(50 * answers):
        for link in prefills.links:
            list(link.poll())
        time.sleep(0.001)
    return found


def room_of(name: str, length: int, first: int = 0) -> DecodeRoom:
    return DecodeRoom(name, 1, "waiting", 0.0, request=Request(name, [first, *range(length - 1)], 4))


def test_nobody_is_asked_before_it_is_there(fleet: tuple[Prefills, list[Any]]) -> None:
    prefills, routers = fleet
    room = room_of("r", 10)
    assert not prefills.connected
    assert not prefills.ask(room, 1.0, chunkwise=True)
    assert (room.link, room.load) == (None, 0)
    assert heard(prefills, routers[1], 1) == [msg.Hello(reader="d", incarnation="1")]
    assert prefills.connected
    assert prefills.ask(room, 2.5, chunkwise=False)
    assert room.link is prefills.links[1]
    (message,) = heard(prefills, routers[1])
    assert message == msg.Prefill(request_id="r", attempt=1, prompt=tuple(room.tokens), within_s=2.5, chunkwise=False)


def test_load_is_booked_until_it_is_relieved_once(fleet: tuple[Prefills, list[Any]]) -> None:
    prefills, routers = fleet
    for router in routers:
        heard(prefills, router, 1)
    rooms = [room_of(f"r{number}", 100 + number, number) for number in range(3)]
    assert all(prefills.ask(room, 1.0, chunkwise=True) for room in rooms)
    first, second, third = (room.link for room in rooms)
    assert first is not second
    assert third is first  # it has the least before it
    assert sorted(link.load for link in prefills.links) == [101, 202]
    for _ in range(2):
        prefills.relieve(rooms[0])
    assert sorted(link.load for link in prefills.links) == [101, 102]


def test_cancelling_names_the_attempt(fleet: tuple[Prefills, list[Any]]) -> None:
    prefills, routers = fleet
    heard(prefills, routers[0], 1)
    prefills.links[0].cancel("r", 7, "x" * 5000)
    (message,) = heard(prefills, routers[0])
    assert isinstance(message, msg.Cancel)
    assert (message.request_id, message.attempt, len(message.reason)) == ("r", 7, 2000)
