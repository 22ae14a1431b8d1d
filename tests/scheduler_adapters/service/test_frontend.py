"""If a frontend does not read its messages, its requests end at a stated limit. No process waits for the frontend."""

import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from pagewire.demo.demo import settled_stats
from scheduler_adapters.errors import ServiceError
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.fleet import Fleet
from scheduler_adapters.service.server import ServerConfig
from scheduler_adapters.service.sockets import FrontendQueue, received
from tests.scheduler_adapters.server_config import server_config
from tests.scheduler_adapters.service.processes import Service, Side
from tests.scheduler_adapters.serving import own_tokens

PROMPT = tuple(range(60, 76))
pytestmark = pytest.mark.usefixtures("forked_fleets")
_names = itertools.count()


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any]]:
    """Returns two connected sockets, whose own queues hold ten messages each."""
    context: zmq.Context[Any] = zmq.Context()
    ours, theirs = (context.socket(zmq.PAIR) for _ in range(2))
    for socket in (ours, theirs):
        socket.setsockopt(zmq.SNDHWM, 10)
        socket.setsockopt(zmq.RCVHWM, 10)
    endpoint = f"inproc://frontend-{next(_names)}"
    ours.bind(endpoint)
    theirs.connect(endpoint)
    yield ours, theirs
    context.destroy(linger=0)


def read(socket: Any) -> list[str]:
    return [message.request_id for (data,) in received(socket) if isinstance(message := msg.decode(data), msg.Tokens)]


def test_unread_messages_wait_in_order_and_the_frontend_turns_deaf_at_its_limit(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    frontend = FrontendQueue(ours, max_unread=8)
    told = [str(number) for number in range(28)]
    for name in told:
        frontend.send(msg.Tokens(request_id=name))
    assert (len(frontend._unread), frontend.flush(), frontend.is_deaf) == (8, False, False)
    frontend.send(msg.Tokens(request_id="one more"))
    assert [frontend.flush() for _ in range(3)] == [True, False, False]  # The frontend is reported as deaf only once.
    assert frontend.is_deaf
    heard = [theirs.recv() for _ in range(3)]
    time.sleep(0.05)
    assert not frontend.flush()
    # The frontend stays deaf until it has read half of the messages.
    assert frontend.is_deaf == (len(frontend._unread) > 4)
    heard += [data for (data,) in received(theirs)]
    assert ours.poll(5000, zmq.POLLOUT)
    # The last message waits behind the unread messages, although the sockets have room.
    frontend.send(msg.Tokens(request_id="the last"))
    while frontend._unread:
        frontend.flush()
        heard += [data for (data,) in received(theirs)]
    heard += [data for (data,) in received(theirs)]
    assert not frontend.is_deaf
    assert [msg.decode(data).request_id for data in heard] == [*told, "one more", "the last"]  # type: ignore[union-attr]


def test_requests_of_a_deaf_front_fail_and_their_pages_come_back(
    model: Any, tmp_path: Path, pair: tuple[Any, Any]
) -> None:
    service = Service(model, tmp_path, Side(), Side(pages=20))
    ours, theirs = pair
    service.decode.frontend = FrontendQueue(ours, max_unread=20)
    service.submit([[number, *PROMPT] for number in range(8)], 40)
    service.until(lambda: service.decode.frontend.is_deaf, "the limit")
    assert service.decode.counts["failed"] == 8
    service.assert_nothing_held()
    # The sum is the limit, one last message for each request, and one token for each row.
    assert len(service.decode.frontend._unread) <= 20 + 8 + 4
    service.clients.pop("d0").close()
    service.clients["d0"] = theirs
    service.until(lambda: len(service.ended) == 8, "their ends")
    for number in range(8):
        end = service.ended[f"r{number}"]
        assert (end.finished, end.error) == ("error", "the frontend of decode process 'd0' has left 20 messages unread")
        wanted = own_tokens(model, [number, *PROMPT], 40)
        assert service.tokens[f"r{number}"] == wanted[: len(service.tokens[f"r{number}"])]
    assert not service.decode.frontend.is_deaf
    service.submit([PROMPT], 12)
    service.until(lambda: "r0" in service.ended, "the next request")
    assert service.tokens["r0"] == own_tokens(model, PROMPT, 12)
    service.assert_nothing_held()
    service.close()


def test_only_a_request_beyond_the_limit_of_open_requests_is_refused(model: Any, tmp_path: Path) -> None:
    service = Service(model, tmp_path, Side(), Side(pages=20), max_open=3)
    prompts = [[number, *PROMPT] for number in range(7)]
    service.submit(prompts, 6)
    assert service.decode.open_requests == 3
    service.until(lambda: len(service.ended) == 7, "their ends")
    for number, prompt in enumerate(prompts):
        end = service.ended[f"r{number}"]
        if number < 3:
            assert service.tokens[f"r{number}"] == own_tokens(model, prompt, 6)
            assert not end.error
        else:
            assert (end.finished, service.tokens[f"r{number}"]) == ("error", [])
            assert end.error == f"request 'r{number}' is refused: decode process 'd0' has 3 open requests, its limit"
    assert service.serve(prompts[3:6], 6) == [own_tokens(model, prompt, 6) for prompt in prompts[3:6]]
    service.assert_nothing_held()
    service.close()


def test_a_refused_request_leaves_no_trace_of_its_id(model: Any, tmp_path: Path) -> None:
    """The request is refused, then cancelled without effect, and then sent again when there is room. Only the serial
    number of the refused request is used up.
    """
    service = Service(model, tmp_path, Side(), Side(pages=20), max_open=1)
    for serial, request_id in enumerate(("first", "second"), 1):
        service.decode.submit(msg.Submit(request_id=request_id, prompt=PROMPT, max_new_tokens=4, serial=serial))
    service.decode.abort("second", 2)
    service.until(lambda: len(service.ended) == 2, "both ends")
    assert (service.ended["first"].finished, service.ended["second"].finished) == ("length", "error")
    service.ended.clear()
    for serial in (2, 3):
        service.decode.submit(msg.Submit(request_id="second", prompt=PROMPT, max_new_tokens=4, serial=serial))
    service.until(lambda: service.ended, "the next")
    assert service.tokens["second"] == own_tokens(model, PROMPT, 4)
    assert service.decode.counts["late"] == 1
    service.assert_nothing_held()
    service.close()


CONFIG = server_config(max_requests=32, token_budget=1024)


def configs(**changes: Any) -> list[ServerConfig]:
    return [msgspec.structs.replace(CONFIG, role=role, **changes) for role in ("prefill", "decode")]


def collected(fleet: Fleet, requests: int, timeout_s: float = 120.0) -> tuple[dict[str, list[int]], dict[str, Any]]:
    tokens: dict[str, list[int]] = {}
    ended: dict[str, msg.Tokens] = {}
    deadline = time.monotonic() + timeout_s
    while len(ended) < requests:
        assert time.monotonic() < deadline, f"{len(ended)} of {requests} have ended"
        for message in fleet.receive(0.1):
            if isinstance(message, msg.Tokens):
                assert message.request_id not in ended, "a token after the end"
                tokens.setdefault(message.request_id, []).extend(message.tokens)
                if message.finished:
                    ended[message.request_id] = message
    return tokens, ended


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """A fleet for all tests that leave no request behind."""
    with Fleet(configs()) as started:
        yield started


@pytest.mark.ci
@pytest.mark.slow
def test_a_front_that_submits_4000_requests_before_it_reads_is_served(tiny_model: Any, fleet: Fleet) -> None:
    for number in range(4000):
        fleet.send("decode", msg.Submit(request_id=f"r{number}", prompt=PROMPT, max_new_tokens=1 + number % 2))
    tokens, ended = collected(fleet, 4000)
    stats = settled_stats(fleet)
    wanted = own_tokens(tiny_model, PROMPT, 2)
    assert {end.finished for end in ended.values()} <= {"length", "eos"}
    assert all(tokens[f"r{number}"] == wanted[: 1 + number % 2] for number in range(4000))
    assert [(one.pages_held, one.open_requests) for one in stats.values()] == [(0, 0)] * 2


@pytest.mark.slow
def test_a_front_that_submits_without_end_and_reads_is_refused_beyond_its_limit(tiny_model: Any) -> None:
    requests, limit, most = 3000, 40, 0
    wanted = own_tokens(tiny_model, PROMPT, 8)
    with Fleet(configs(max_open=limit)) as fleet:
        tokens: dict[str, list[int]] = {}
        ended: dict[str, str] = {}

        def hear(timeout_s: float) -> int:
            highest = 0
            for message in fleet.receive(timeout_s):
                if isinstance(message, msg.Stats):
                    highest = max(highest, message.open_requests)
                elif isinstance(message, msg.Tokens):
                    assert message.request_id not in ended
                    tokens.setdefault(message.request_id, []).extend(message.tokens)
                    if message.finished:
                        ended[message.request_id] = message.error
            return highest

        for number in range(requests):
            fleet.send(
                "decode", msg.Submit(request_id=f"r{number}", prompt=PROMPT, max_new_tokens=8, serial=number + 1)
            )
            if number % 100 == 0:
                fleet.send("decode", msg.Ask())
            most = max(most, hear(0.0))
        deadline = time.monotonic() + 90
        while len(ended) < requests:
            most = max(most, hear(0.1))
            assert time.monotonic() < deadline, f"{len(ended)} of {requests} have ended"
        stats = settled_stats(fleet)
    refused = {name for name, error in ended.items() if error}
    assert 0 < most <= limit
    assert 0 < len(refused) < requests
    assert {ended[name] for name in refused} == {
        f"request {name!r} is refused: decode process 'decode' has {limit} open requests, its limit" for name in refused
    }
    assert all(tokens[name] == ([] if name in refused else wanted) for name in ended)
    assert [(one.pages_held, one.open_requests) for one in stats.values()] == [(0, 0)] * 2


# The program of a process that also writes a file when its frontend turns deaf. No message would reach a deaf frontend.
TELLING = """
import sys
from pathlib import Path
from scheduler_adapters.service import program

program.die_with_parent()
from scheduler_adapters.service import server, sockets

flush = sockets.FrontendQueue.flush

def told(queue):
    has_turned = flush(queue)
    if has_turned:
        Path(sys.argv[1]).touch()
    return has_turned

sockets.FrontendQueue.flush = told
sys.exit(server.main())
"""


@pytest.mark.slow
def test_a_front_that_reads_nothing_loses_its_own_requests_and_no_more(tiny_model: Any, tmp_path: Path) -> None:
    requests, new = 300, 60
    deaf, deadline = tmp_path / "deaf", time.monotonic() + 100
    with Fleet(configs(max_unread=500), [sys.executable, "-c", TELLING, str(deaf)]) as fleet:
        for number in range(requests):
            fleet.send(
                "decode", msg.Submit(request_id=f"r{number}", prompt=(number % 200, *PROMPT), max_new_tokens=new)
            )
        while not deaf.exists():
            assert time.monotonic() < deadline, "everything was read"
            time.sleep(0.02)
        tokens, ended = collected(fleet, requests)
        failed = [end.error for end in ended.values() if end.finished == "error"]
        assert failed
        assert set(failed) == {"the frontend of decode process 'decode' has left 500 messages unread"}
        for number in range(0, requests, 40):
            wanted = own_tokens(tiny_model, [number % 200, *PROMPT], new)
            mine = tokens[f"r{number}"]
            assert mine == wanted[: len(mine)] if ended[f"r{number}"].error else mine == wanted
        fleet.send("decode", msg.Submit(request_id="next", prompt=PROMPT, max_new_tokens=8))
        assert collected(fleet, 1)[0] == {"next": own_tokens(tiny_model, PROMPT, 8)}
        stats = settled_stats(fleet)
    assert [(one.pages_held, one.open_requests) for one in stats.values()] == [(0, 0)] * 2


@pytest.mark.slow
def test_messages_to_a_process_that_takes_none_fail_at_a_deadline() -> None:
    with Fleet(configs(), send_timeout_s=1.0) as fleet:
        pid = fleet.pids["decode"]
        os.kill(pid, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            with pytest.raises(ServiceError, match="the decode process has accepted no message for 1 s"):
                send_without_end(fleet)
            assert time.monotonic() - begin < 20
        finally:
            os.kill(pid, signal.SIGCONT)
        collected(fleet, 10)  # All accepted requests are served.


def send_without_end(fleet: Fleet) -> None:
    for number in range(1 << 20):
        fleet.send("decode", msg.Submit(request_id=f"r{number}", prompt=PROMPT * 10, max_new_tokens=1))


@pytest.mark.slow
def test_rubbish_of_a_front_ends_no_process(tiny_model: Any, fleet: Fleet) -> None:
    for name in fleet.running:
        for frames in ([b"\xff"], [b"a", b"b"], [msg.encode(msg.Ready(name="x"))]):
            fleet._socket.send_multipart([name.encode(), *frames])
    fleet.send("decode", msg.Submit(request_id="next", prompt=PROMPT, max_new_tokens=8))
    assert collected(fleet, 1)[0] == {"next": own_tokens(tiny_model, PROMPT, 8)}
