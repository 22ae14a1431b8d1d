"""The client of a fleet of real processes. It records its requests, the processes that serve them, and their
outcomes.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.fleet import Fleet


@dataclass
class Asked:
    """A request and its progress. Times are from `time.monotonic`."""

    request_id: str
    prompt: tuple[int, ...]
    decode: str
    submitted: float
    serial: int
    expected: list[int] = field(default_factory=list[int])
    tokens: list[int] = field(default_factory=list[int])
    first: float = 0.0
    ended: float = 0.0
    finished: str = ""
    error: str = ""

    @property
    def is_right(self) -> bool:
        """Returns whether the received tokens are the expected ones. A request that was cancelled, or that failed with
        a reason, may have received only the first tokens.
        """
        if self.finished in ("eos", "length"):
            return self.tokens == self.expected
        begun = self.tokens == self.expected[: len(self.tokens)]
        return begun and (self.finished == "cancelled" or bool(self.error))


class Client:
    """Submits requests to decode processes, and receives messages from all processes of the fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.asked: dict[str, Asked] = {}
        self.aborts: list[tuple[float, str]] = []  # The times at which the client cancels requests.
        self.ready: list[str] = []
        self.stats: dict[str, msg.Stats] = {}
        self._serials = itertools.count(1)

    @property
    def open(self) -> list[Asked]:
        """Returns the requests that have not ended."""
        return [one for one in self.asked.values() if not one.finished]

    def submit(
        self, request_id: str, prompt: Sequence[int], new: int, decode: str, expected: list[int], **options: str
    ) -> Asked:
        """Asks a decode process to serve a prompt. `options` has more fields of the `Submit` message."""
        serial = next(self._serials)
        asked = self.asked[request_id] = Asked(request_id, tuple(prompt), decode, time.monotonic(), serial, expected)
        message = msg.Submit(request_id=request_id, prompt=asked.prompt, max_new_tokens=new, serial=serial)
        self.fleet.send(decode, msgspec.structs.replace(message, **options))
        return asked

    def abort(self, request_id: str) -> None:
        """Cancels a request if its process is alive."""
        one = self.asked.get(request_id)
        if one is not None and not one.finished and one.decode in self.fleet.running:
            self.fleet.send(one.decode, msg.Abort(request_id=request_id, serial=one.serial))

    def hear(self, timeout_s: float) -> None:
        """Handles the processes' messages for at most this long. Also cancels requests whose time of cancellation has
        come.
        """
        for due in [due for due in self.aborts if due[0] <= time.monotonic()]:
            self.aborts.remove(due)
            self.abort(due[1])
        for message in self.fleet.receive(timeout_s):
            if isinstance(message, msg.Ready):
                self.ready.append(message.name)
            elif isinstance(message, msg.Stats):
                self.stats[message.name] = message
            elif isinstance(message, msg.Tokens):
                self.take(self.asked[message.request_id], message)

    def take(self, one: Asked, message: msg.Tokens) -> None:
        """Records a message about a request. If the request has already ended, the message comes from a process that
        was given up, and is dropped.
        """
        if one.finished:
            return
        now = time.monotonic()
        one.tokens += message.tokens
        one.first = one.first or (now if message.tokens else 0.0)
        if message.finished:
            one.finished, one.error, one.ended = message.finished, message.error, now

    def give_up(self, name: str, reason: str) -> int:
        """Ends the requests of a lost decode process with this reason. Returns their number."""
        lost = [one for one in self.open if one.decode == name]
        for one in lost:
            one.finished, one.error, one.ended = "error", reason, time.monotonic()
        return len(lost)

    def wait_ready(self, name: str, timeout_s: float = 120.0) -> None:
        """Waits until a started process serves requests."""
        deadline = time.monotonic() + timeout_s
        while name not in self.ready:
            self.hear(0.05)
            assert time.monotonic() < deadline, f"{name} is not ready after {timeout_s} s"
        self.ready.remove(name)

    def settle(self, timeout_s: float) -> float:
        """Waits until no process holds pages, leases or requests. Returns the seconds that this took. Raises if a
        process still holds some after `timeout_s`.
        """
        start = time.monotonic()
        while True:
            self.stats.clear()
            for name in self.fleet.running:
                self.fleet.send(name, msg.Ask())
            while len(self.stats) < len(self.fleet.running):
                self.hear(0.05)
                assert time.monotonic() < start + timeout_s + 30, f"no counters from {self.fleet.running}"
            held = {name: one for name, one in self.stats.items() if one.pages_held or one.open_requests}
            if not held:
                return time.monotonic() - start
            assert time.monotonic() < start + timeout_s, f"still held: {held}"
            time.sleep(0.02)
