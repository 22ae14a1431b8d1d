"""Submits requests to a fleet, and records the processes that serve them and the results with times."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler_adapters.errors import ServiceError
from scheduler_adapters.service import messages as msg

if TYPE_CHECKING:
    from benchmarks.fleet_trace import TraceRequest
    from scheduler_adapters.service.fleet import Fleet

STALL_S = 120.0
_START_S = 120.0
_SETTLE_S = 30.0


@dataclass(slots=True, eq=False)
class Asked:
    """A request and its result. Times are seconds of `time.monotonic`.

    Attributes:
        request_id: id of the request.
        request: what was submitted.
        decode: the decode process to which it was submitted.
        submitted: when the request was submitted.
        tokens: the tokens so far.
        times: when each message with tokens of the request arrived.
        finished: why the request ended; empty while it continues.
        error: the error, if the request failed.
        ended: when the request ended.
    """

    request_id: str
    request: TraceRequest
    decode: str
    submitted: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finished: str = ""
    error: str = ""
    ended: float = 0.0


class Client:
    """Submits requests to decode processes, and receives messages from all processes. One thread calls it.

    Args:
        fleet: a fleet that has been entered and all of whose servers serve.

    Attributes:
        asked: every request by its id.
        open: requests that have not ended.
        stats: the latest counters of each process.
        lost_stats: the last counters of killed processes.
        started: when each restarted process began to serve again.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.asked: dict[str, Asked] = {}
        self.open: dict[str, Asked] = {}
        self.stats: dict[str, msg.Stats] = {}
        self.lost_stats: list[msg.Stats] = []
        self.started: dict[str, float] = {}
        self._starting: set[str] = set()
        self._heard = time.monotonic()

    @property
    def decodes(self) -> list[str]:
        """The decode processes that serve now."""
        fleet = self.fleet
        return [name for name in fleet.running if fleet.role(name) == "decode" and name not in self._starting]

    @property
    def is_whole(self) -> bool:
        """Whether every process serves."""
        return not self._starting

    def submit(self, request_id: str, request: TraceRequest, at: float | None = None) -> None:
        """Submits a request to the decode process that has the fewest open requests of this client.

        The request counts as arrived at `at`; None means now.
        """
        load = dict.fromkeys(self.decodes, 0)
        for one in self.open.values():
            if one.decode in load:
                load[one.decode] += 1
        decode = min(load, key=lambda name: load[name])
        one = Asked(request_id, request, decode, time.monotonic() if at is None else at)
        self.asked[request_id] = self.open[request_id] = one
        submit = msg.Submit(request_id=request_id, prompt=request.prompt, max_new_tokens=request.new)
        self.fleet.send(decode, submit)

    def hear(self, timeout_s: float) -> None:
        """Handle the processes' messages, waiting up to `timeout_s` seconds for the first one.

        Raises:
            ServiceError: a process has died without being killed here, or requests are open and no message has arrived
                for two minutes.
        """
        messages = self.fleet.receive(timeout_s)
        now = time.monotonic()
        for message in messages:
            match message:
                case msg.Tokens():
                    self._take(message, now)
                case msg.Ready(name=name):
                    self._starting.discard(name)
                    self.started[name] = now
                case msg.Stats():
                    self.stats[message.name] = message
                case _:
                    pass
        if messages or not self.open:
            self._heard = now
        elif now > self._heard + STALL_S:
            raise ServiceError(f"no message has come for {STALL_S:.0f} s, although {len(self.open)} requests are open")

    def _take(self, message: msg.Tokens, now: float) -> None:
        one = self.open.get(message.request_id)
        if one is None:
            return  # a message from a killed process, whose requests have already been given up
        if message.tokens:
            one.tokens += message.tokens
            one.times.append(now)
        if message.finished:
            one.finished, one.error, one.ended = message.finished, message.error, now
            del self.open[one.request_id]

    def kill(self, name: str) -> float:
        """Kills a process as a crash would, and restarts it.

        If it is a decode process, its requests fail. Returns the time of the kill. The process's counters must be in
        `stats`; any later work of the process is not counted.
        """
        self.lost_stats.append(self.stats.pop(name))
        self.fleet.kill(name)
        at = time.monotonic()
        for one in [one for one in self.open.values() if one.decode == name]:
            one.finished, one.error, one.ended = "error", f"decode process {name!r} was killed", at
            del self.open[one.request_id]
        self._starting.add(name)
        self.fleet.restart(name)
        return at

    def wait_until_whole(self) -> None:
        """Waits until each restarted process serves.

        Raises:
            ServiceError: a process does not serve.
        """
        deadline = time.monotonic() + _START_S
        while self._starting:
            self.hear(0.05)
            if time.monotonic() > deadline:
                raise ServiceError(f"processes not ready after {_START_S:.0f} s: {', '.join(sorted(self._starting))}")

    def count(self, names: list[str]) -> None:
        """Fetch the current counters of these processes into `stats`.

        Raises:
            ServiceError: a process does not answer, or its check finds an inconsistency in its pages.
        """
        for name in names:
            self.stats.pop(name, None)
            self.fleet.send(name, msg.Ask())
        deadline = time.monotonic() + _SETTLE_S
        while not all(name in self.stats for name in names):
            self.hear(0.05)
            if time.monotonic() > deadline:
                raise ServiceError(f"processes that have sent no counters for {_SETTLE_S:.0f} s: {', '.join(names)}")

    def settle(self) -> float:
        """Waits at most half a minute until no process holds a page. Returns the seconds that this took.

        Afterwards `stats` shows what is still held.
        """
        start = time.monotonic()
        while True:
            self.count(self.fleet.running)
            passed = time.monotonic() - start
            if passed > _SETTLE_S or not any(one.pages_held or one.open_requests for one in self.stats.values()):
                return passed
            time.sleep(0.02)
