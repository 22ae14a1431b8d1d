"""The last hop of every message.

It delivers messages twice, late and out of order, as a seed decides. It counts each kind of delivery by the phase of
the request.

The messages travel over the schedulers' own sockets. Instead of reading from a socket, a scheduler gets the messages
that are due here. A message is delivered in one of these ways:

    in time     when it arrived
    again       a second time
    overtaken   after a later message of the same request
    late        some rounds after it arrived, but not overtaken
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from scheduler_adapters.service import messages as msg
from scheduler_adapters.service import prefill as prefill_module
from scheduler_adapters.service import prefill_router
from scheduler_adapters.service.decode import DecodeScheduler
from scheduler_adapters.service.prefill import PrefillScheduler
from scheduler_adapters.service.sockets import received
from tests.scheduler_adapters.service.processes import Service


class Reached(NamedTuple):
    """A delivery: the type of the message, the way in which it was delivered, and the phase of its request at this
    time.
    """

    message: str
    phase: str
    how: str

    def covers(self, other: "Reached") -> bool:
        """Returns whether `other` is a delivery of this kind. `other` may have a more specific phase."""
        return (self.message, self.how) == (other.message, other.how) and other.phase.startswith(self.phase)


@dataclass(eq=False)
class _Held:
    item: Any
    message: msg.AnyMessage
    number: int
    due: int
    copy: bool
    late: bool = False


@dataclass
class _Hop:
    """The messages that wait for one receiver, and for each request the message that was delivered last."""

    held: list[_Held] = field(default_factory=list)
    youngest: dict[str, int] = field(default_factory=dict)


class Deliverer:
    """Delivers the messages of all schedulers of a service.

    Args:
        service: the service.
        seed: decides what happens to each message.
        patch: replaces the schedulers' own `received`.
        twice: share of the messages that are delivered twice.
        late: share of the messages that are delivered late.
        rounds: the largest number of rounds by which a message is delayed.
    """

    def __init__(
        self,
        service: Service,
        seed: int,
        patch: pytest.MonkeyPatch,
        *,
        twice: float = 0.3,
        late: float = 0.3,
        rounds: int = 60,
    ) -> None:
        self.service, self.random = service, random.Random(seed)
        self.twice, self.late, self.rounds = twice, late, rounds
        self.reached: Counter[Reached] = Counter()
        self.round = self._number = 0
        self._hops: dict[Any, _Hop] = {}
        self._seen: set[tuple[Any, ...]] = set()
        patch.setattr(prefill_router, "received", self._received_here)
        patch.setattr(prefill_module, "received", self._received_here)

    @property
    def num_held(self) -> int:
        """The number of messages that are not delivered yet. Messages for closed sockets are not included."""
        return sum(len(hop.held) for key, hop in self._hops.items() if not getattr(key, "closed", False))

    def to_decode(self, name: str, message: msg.Submit | msg.Abort) -> None:
        """Sends a message from a frontend to a decode process."""
        self._take(self._hops.setdefault(name, _Hop()), message, message)

    def deliver_to_decodes(self) -> None:
        """Delivers the frontends' messages that are due."""
        for name, decode in self.service.decodes.items():
            for held in self._due(self._hops.setdefault(name, _Hop()), lambda m, d=decode: _frontend_phase(d, m)):
                message = held.message
                if isinstance(message, msg.Submit):
                    decode.submit(message)
                elif isinstance(message, msg.Abort):
                    decode.abort(message.request_id, message.serial)

    def _received_here(self, socket: Any) -> Iterator[list[bytes]]:
        hop = self._hops.setdefault(socket, _Hop())
        for frames in received(socket):
            self._take(hop, frames, msg.decode(frames[-1]))
        for held in self._due(hop, self._phase_at(socket)):
            yield held.item

    def _take(self, hop: _Hop, item: Any, message: msg.AnyMessage) -> None:
        self._number += 1
        rng = self.random
        late = rng.random() < self.late
        due = self.round + (rng.randrange(1, self._delay()) if late else 0)
        hop.held.append(_Held(item, message, self._number, due, copy=False, late=late))
        while rng.random() < self.twice:
            due += rng.choice((0, rng.randrange(1, self._delay())))
            hop.held.append(_Held(item, message, self._number, due, copy=True))

    def _delay(self) -> int:
        return self.random.choice((3, 12, self.rounds)) + 1

    def _due(self, hop: _Hop, phase: Callable[[Any], str]) -> Iterator[_Held]:
        """Yields due messages one by one, because each message may change the phase in which the next message
        arrives.
        """
        for held in sorted((one for one in hop.held if one.due <= self.round), key=lambda one: (one.due, one.number)):
            hop.held.remove(held)
            request_id = getattr(held.message, "request_id", "")
            if held.copy:
                how = "again"
            elif hop.youngest.get(request_id, 0) > held.number:
                how = "overtaken"
            else:
                how = "late" if held.late else "in time"
            hop.youngest[request_id] = max(held.number, hop.youngest.get(request_id, 0))
            self.reached[Reached(_name(held.message), phase(held.item), how)] += 1
            yield held

    def _phase_at(self, socket: Any) -> Callable[[Any], str]:
        for prefill in self.service.prefills.values():
            if socket in prefill.sockets:
                return lambda frames: self._prefill_phase(prefill, frames)
        for decode in self.service.decodes.values():
            if any(socket in connection.sockets for connection in decode.connections):
                return lambda frames: _decode_phase(decode, msg.decode(frames[-1]))
        return lambda _: "nobody"

    def _prefill_phase(self, prefill: PrefillScheduler, frames: list[bytes]) -> str:
        message, reader = msg.decode(frames[-1]), prefill._readers.get(frames[0])
        if not isinstance(message, (msg.Prefill, msg.Cancel)):
            return "known" if reader else "new"
        key = (frames[0], message.request_id, message.attempt)
        seen, _ = key in self._seen, self._seen.add(key) if isinstance(message, msg.Prefill) else None
        if reader is None:
            return "stranger"
        request = reader.requests.get((message.request_id, message.attempt))
        if request is not None:
            return request.phase
        others = [attempt for request_id, attempt in reader.requests if request_id == message.request_id]
        if others:
            return "a younger attempt is there" if max(others) > message.attempt else "an older attempt is there"
        return "over" if seen else "not begun"


def _decode_phase(decode: DecodeScheduler, message: msg.AnyMessage) -> str:
    if not isinstance(message, (msg.PagesOffer, msg.Failed)):
        return "-"
    request = decode._requests.get(message.request_id)
    if request is None:
        return "over"
    if request.attempt != message.attempt:
        return f"another attempt, {request.phase}"
    if isinstance(message, msg.PagesOffer) and request.offer is not None and request.phase != "decoding":
        size = "smaller" if message.table.num_tokens < request.offer.table.num_tokens else "not smaller"
        return f"{request.phase}, {'after the last' if request.has_ended_prefill else size}"
    return request.phase


def _frontend_phase(decode: DecodeScheduler, message: msg.Submit | msg.Abort) -> str:
    request = decode._requests.get(message.request_id)
    return "no request" if request is None else request.phase


def _name(message: msg.AnyMessage) -> str:
    if isinstance(message, msg.PagesOffer):
        return "last offer" if message.token is not None else "PagesOffer"
    return type(message).__name__
