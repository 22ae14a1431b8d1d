"""Random and mutated messages through the schedulers' own sockets: `python -m tests.scheduler_adapters.fuzz_sockets`.

The schedulers of one prefill and one decode process serve in this process. A hostile client with many names floods
prefill's socket. An impostor at the address of a second prefill process answers decode's messages with random bytes.
From time to time a valid request must end with the model's own tokens. At the end no page is held.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import zmq

from scheduler_adapters.hf.runner import load_model, reference_tokens
from scheduler_adapters.service import messages as msg
from tests.scheduler_adapters.service.processes import Service, Side
from tests.scheduler_adapters.service.test_messages import MESSAGES
from tests.transfer.fuzz import mutated, resident_kib, with_odd_values

PROMPT = [at * 7 % 250 for at in range(40)]
NEW = 4
AT_ONCE = 50  # The number of messages between two rounds of the schedulers.
GOOD_EVERY = 200  # The number of rounds between two valid requests.
ENDS_S = 30.0
LEAVES = 1e-3
STRANGER = msg.encode(next(message for message in MESSAGES if isinstance(message, msg.Rejected)))


def rubbish(rng: random.Random, seeds: list[bytes]) -> list[bytes]:
    """Returns one of these at random: noise, a changed message, a message with odd values, or a message of several
    frames.
    """
    data = rng.choice(seeds)
    match rng.randrange(10):
        case 0:
            data = rng.randbytes(rng.randint(0, 200))
        case 1 | 2 | 3:
            fields = msgspec.msgpack.decode(data)
            try:
                data = msgspec.msgpack.encode(with_odd_values(fields, rng, rng.choice((0.05, 0.2))))
            except OverflowError:
                data = b"\xdf\xff"
        case 4:
            pass  # The message stays valid, but it may come at a wrong time.
        case _:
            data = mutated(data, rng)
    return [data] * rng.choice((1, 1, 1, 1, 1, 1, 1, 1, 2, 5))


class Stranger:
    """Floods prefill's socket under one name after another."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._socket = self._connect()
        self.heard: Counter[str] = Counter()

    def _connect(self) -> "zmq.Socket[bytes]":
        socket = self._service.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{self._service.directory}/p0")
        socket.send(msg.encode(msg.Hello(reader="stranger", incarnation="i")))
        return socket

    def send(self, rng: random.Random, seeds: list[bytes]) -> None:
        try:
            self._socket.send_multipart(rubbish(rng, seeds), zmq.NOBLOCK)
        except zmq.Again:
            time.sleep(1e-4)
        while self._socket.poll(0):
            self.heard[type(msg.decode(self._socket.recv())).__name__] += 1
        if rng.random() < 2e-4:
            self.close()
            self._socket = self._connect()

    def close(self) -> None:
        self._socket.close()


class Impostor:
    """Poses as a prefill process, and answers with random bytes."""

    def __init__(self, service: Service) -> None:
        service.stop_prefill("p1")
        self._socket = service.context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"ipc://{service.directory}/p1")
        self._readers: list[bytes] = []
        self._asked: list[msg.Prefill] = []

    def send(self, rng: random.Random, seeds: list[bytes]) -> None:
        while self._socket.poll(0):
            sender, data = self._socket.recv_multipart()[:2]
            message = msg.decode(data)
            if isinstance(message, msg.Hello):
                self._readers.append(sender)
                welcome = msg.Welcome(name="p1", incarnation=str(len(self._readers)), engines=("p1/0",))
                self._socket.send_multipart([sender, msg.encode(welcome)])
            elif isinstance(message, msg.Prefill):
                self._asked = [*self._asked[-4:], message]
        if self._readers:
            # A wrong answer makes the decode process disconnect. It reconnects a little later.
            if rng.random() > LEAVES:
                seeds = [data for data in seeds if data != STRANGER]
            self._socket.send_multipart([self._readers[-1], *rubbish(rng, self._about_what_was_asked(rng, seeds))])

    def _about_what_was_asked(self, rng: random.Random, seeds: list[bytes]) -> list[bytes]:
        if not self._asked or rng.random() < 0.5:
            return seeds
        one = rng.choice(self._asked)
        made: list[bytes] = []
        for message in MESSAGES:
            if isinstance(message, (msg.PagesOffer, msg.Failed)):
                about = msgspec.structs.replace(message, request_id=one.request_id, attempt=one.attempt)
                made.append(msg.encode(about))
        return made

    def close(self) -> None:
        self._socket.close()


def run(messages: int, seed: int, say: Callable[[str], None]) -> list[str]:
    """Sends this many messages. Returns the failures. Exceptions pass through."""
    rng = random.Random(seed)
    model = load_model(None)
    wanted, wrong = reference_tokens(model, PROMPT, NEW), list[str]()
    seeds = [msg.encode(message) for message in MESSAGES]
    with tempfile.TemporaryDirectory(prefix="pagewire-") as folder:
        service = Service(model, Path(folder), Side(pages=64, count=2), Side(pages=64), lease_s=1.0)
        stranger, impostor = Stranger(service), Impostor(service)
        half_kib = good = 0
        for round_ in range(messages // AT_ONCE):
            for _ in range(AT_ONCE):
                rng.choice((stranger, impostor)).send(rng, seeds)
            service.poll()
            if round_ % GOOD_EVERY == 0:
                ended = serve(service, f"good{round_}", lambda: impostor.send(rng, seeds))
                good += 1
                if ended != wanted:
                    wrong.append(f"after {round_ * AT_ONCE} messages a good request ended with {ended}")
            if round_ == messages // AT_ONCE // 2:
                half_kib = resident_kib()
        stranger.close()
        impostor.close()
        grown = resident_kib() - half_kib
        for identity in list(service.prefill._readers):
            if service.prefill._readers[identity].name != "d0":
                service.prefill._lose(identity, "the stranger is gone")
        service.until(lambda: not service.prefill.open_requests, "prefill's last request", timeout_s=30)
        service.assert_nothing_held()
        say(
            f"prefill: {dict(service.prefill.counts)}; decode: {service.decode.connections[1].malformed} malformed, "
            f"{dict(service.decode.counts)}; the stranger heard {dict(stranger.heard)}; {good} good requests; "
            f"peak memory grew by {grown} KiB in the second half"
        )
        if not service.prefill.counts["malformed"] or not service.decode.connections[1].malformed:
            wrong.append("nothing was refused")
        if grown > 20_000:
            wrong.append(f"memory grew by {grown} KiB")
        service.close()
    return wrong


def serve(service: Service, request_id: str, meanwhile: Callable[[], None]) -> list[int]:
    """Serves a valid request. Returns its tokens."""
    service.submit_one(request_id, PROMPT, NEW)
    end = time.monotonic() + ENDS_S
    while request_id not in service.ended:
        meanwhile()
        service.poll()
        service.collect()
        if time.monotonic() > end:
            raise AssertionError(f"{request_id} has not ended in {ENDS_S} s; open requests: {service.decode._requests}")
    tokens = service.tokens.pop(request_id)
    end_of = service.ended.pop(request_id)
    return tokens if not end_of.error else [end_of.error]  # type: ignore[list-item]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=500_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    wrong = run(args.messages, args.seed, print)
    took = time.perf_counter() - begin
    print(f"{args.messages} messages, seed {args.seed}, {took:.0f} s: {wrong or 'nothing wrong'}")  # noqa: T201
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
