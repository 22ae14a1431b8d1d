"""A worker that writes a time stamp for each event of a request, and cancels requests in planned phases.

`Fleet` starts `python -m benchmarks.fleet_worker FOLDER [alone]`. The worker reads the plan from the folder and writes
stamps there. With `alone`, the decode process computes its prompts itself. A planned cancellation has the effect of a
client's `Abort` that arrives between two rounds of the decode process. An `Abort` from the client itself would rarely
arrive in the few milliseconds of a pull.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from kvcache.errors import KVCacheError
from scheduler_adapters.loop import Request, ServingLoop
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service import server
from scheduler_adapters.service.decode import DecodeScheduler
from scheduler_adapters.service.program import die_with_parent
from scheduler_adapters.service.requests import DecodeRequest, TrackedRequest
from scheduler_adapters.service.sockets import FrontendQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from scheduler_adapters.service.sockets import Socket

PLAN = "plan.json"
Phase = Literal["queue", "prefill", "pull", "decode"]
PHASES: tuple[Phase, ...] = ("queue", "prefill", "pull", "decode")


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """An event of a request, with its time.

    Attributes:
        at: seconds of `time.monotonic`, which is the same clock in all processes of a host.
        request_id: the client's id for the request.
        what: the new phase of the request (`requests`), "token" for a message with tokens to the client, or "cancel
            PHASE".
        role: role of the process that wrote the stamp.
        attempt: number of the attempt at the request; 0 if it is not known.
    """

    at: float
    request_id: str
    what: str
    role: msg.Role
    attempt: int = 0


class Planned(msgspec.Struct, frozen=True):
    """A planned cancellation.

    The cancellation takes effect in `phase` or, if the request skips this phase, in the next phase that the request
    reaches.

    Attributes:
        phase: the phase in which to cancel.
        rounds: how many rounds of the decode process to wait in that phase first.
    """

    phase: Phase
    rounds: int


def write_plan(folder: Path, plan: dict[str, Planned]) -> None:
    """Writes a plan for the servers, by request id."""
    (folder / PLAN).write_bytes(msgspec.json.encode(plan))


def read_stamps(folder: Path) -> dict[str, list[Stamp]]:
    """The stamps of all processes by request id, in order of time."""
    decoder, found = msgspec.json.Decoder(Stamp), list[Stamp]()
    for path in folder.glob("*.stamps"):
        found += map(decoder.decode, path.read_bytes().splitlines())
    by_id: dict[str, list[Stamp]] = {}
    for stamp in sorted(found, key=lambda one: one.at):
        by_id.setdefault(stamp.request_id, []).append(stamp)
    return by_id


def stage(request: DecodeRequest) -> Phase:
    """The stage of a request, as its decode process sees it.

    The decode process gets no message before the first chunk has run, so the result is "queue" before the end of the
    first chunk.
    """
    if request.phase == "decoding":
        return "decode"
    if request.phase in ("offered", "pulling"):
        return "pull" if request.has_ended_prefill else "prefill"
    return "queue"


class _Notes:
    """The stamps of this process. Each line is a single write, so that a kill cannot tear one."""

    def __init__(self, folder: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(folder / f"{os.getpid()}.stamps", flags, 0o600)

    def add(self, request_id: str, what: str, role: msg.Role, attempt: int = 0) -> None:
        stamp = Stamp(time.monotonic(), request_id, what, role, attempt)
        os.write(self._file, msgspec.json.encode(stamp) + b"\n")


class WatchedDecode(DecodeScheduler):
    """A decode process that cancels requests as planned, and writes a stamp for each cancellation."""

    notes: _Notes
    plan: dict[str, Planned]

    def poll(self) -> bool:
        """Cancel the requests that are due, then poll as usual."""
        for request in [request for request in self._requests.values() if request.request_id in self.plan]:
            planned, now = self.plan[request.request_id], stage(request)
            if PHASES.index(now) < PHASES.index(planned.phase):
                continue
            if planned.rounds:
                self.plan[request.request_id] = msgspec.structs.replace(planned, rounds=planned.rounds - 1)
                continue
            del self.plan[request.request_id]
            self.notes.add(request.request_id, f"cancel {now}", "decode", request.attempt)
            self.abort(request.request_id)
        return super().poll()


class Alone:
    """Replaces a `DecodeScheduler`: the same loop in one process, which computes its prompts itself."""

    notes: _Notes

    def __init__(self, name: str, loop: ServingLoop, *others: Any, **_: Any) -> None:
        self._name, self._loop = name, loop
        self.frontend = FrontendQueue(others[-1])
        self.sockets: list[Socket] = []
        self.draining = False
        loop.on_admit = lambda request_id, *_: self.notes.add(request_id, "leasing", "prefill")

    def submit(self, message: msg.Submit) -> None:
        """Queue a prompt."""
        request = Request(message.request_id, message.prompt, message.max_new_tokens, cache_salt=message.cache_salt)
        try:
            self._loop.add(request)
        except KVCacheError as error:
            self.frontend.send(msg.Tokens(request_id=message.request_id, finished="error", error=str(error)))

    def abort(self, request_id: str, serial: int = 0) -> None:  # noqa: ARG002  (its frontend numbers nothing)
        """Remove a request."""
        if self._loop.abort(request_id):
            self.frontend.send(msg.Tokens(request_id=request_id, finished="cancelled"))

    def poll(self) -> bool:
        """Runs one step. Returns whether there was work to do."""
        self.frontend.flush()
        for output in self._loop.step():
            tokens = () if output.token is None else (output.token,)
            self.frontend.send(
                msg.Tokens(request_id=output.request_id, tokens=tokens, finished=output.finished, error=output.error)
            )
        return self._loop.has_work

    def drain(self) -> None:
        """Exit once no request is left."""
        self.draining = True

    @property
    def open_requests(self) -> int:
        """Requests that run or wait."""
        return self._loop.num_running + self._loop.num_waiting

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do until a request arrives."""
        return not self._loop.has_work

    @property
    def has_drained(self) -> bool:
        """Whether the process drains and no request is left."""
        return self.draining and not self._loop.has_work

    def stats(self) -> msg.Stats:
        """Counters now."""
        manager = self._loop.manager
        manager.check()
        return msg.Stats(
            name=self._name,
            role="decode",
            pages_held=manager.num_held_blocks,
            open_requests=self.open_requests,
            prompt_tokens=manager.metrics.prompt_tokens,
            cached_tokens=manager.metrics.cache_tokens,
            preemptions=self._loop.preemptions,
        )


def stamped(move: Callable[..., None], notes: _Notes) -> Callable[..., None]:
    """Wraps `TrackedRequest.move` so that a time stamp is written for each new phase."""

    def move_and_stamp(request: TrackedRequest, phase: str, *deadline: Any) -> None:
        move(request, phase, *deadline)
        role = "decode" if isinstance(request, DecodeRequest) else "prefill"
        notes.add(request.request_id, phase, role, request.attempt)

    return move_and_stamp


def stamped_tokens(send: Callable[..., None], notes: _Notes) -> Callable[..., None]:
    """Wraps `FrontendQueue.send` so that a time stamp is written for each message with tokens."""

    def stamp_and_send(frontend: FrontendQueue, message: msg.ToFrontend) -> None:
        if isinstance(message, msg.Tokens) and message.tokens:
            notes.add(message.request_id, "token", "decode")
        send(frontend, message)

    return stamp_and_send


def main(arguments: Sequence[str]) -> int:
    """Runs one process, as `scheduler_adapters.service.server` does. Returns the exit status."""
    die_with_parent()
    folder = Path(arguments[0])
    notes, plan = _Notes(folder), folder / PLAN
    TrackedRequest.move = stamped(TrackedRequest.move, notes)  # type: ignore[method-assign]
    FrontendQueue.send = stamped_tokens(FrontendQueue.send, notes)  # type: ignore[method-assign]
    WatchedDecode.notes = Alone.notes = notes
    WatchedDecode.plan = msgspec.json.decode(plan.read_bytes(), type=dict[str, Planned]) if plan.exists() else {}
    server.DecodeScheduler = Alone if "alone" in arguments[1:] else WatchedDecode  # type: ignore[misc, assignment]
    return server.main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
