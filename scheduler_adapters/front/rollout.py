"""`Rollout`: gives a fleet the weights of another directory, one process after another, while the fleet serves.

First every process loads the new weights beside its own. If one of them cannot, nothing has changed. Then the processes
switch in an order in which requests always find a prefill and a decode process of equal weights, if the fleet has two
of each kind; otherwise requests wait in the frontend. A process switches when its open requests have ended, so no
request sees two versions of the weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from scheduler_adapters.errors import RefusedError, ServiceError
from scheduler_adapters.service import messages as msg
from transfer.wire.allowed_peers import host_of

if TYPE_CHECKING:
    from scheduler_adapters.front.members import Member

_CHECK_S = 0.25  # seconds between two looks at the processes, if no message comes

log = logging.getLogger("pagewire.front")


class FleetMembers(Protocol):
    """The processes and their messages: a `Frontend`."""

    members: dict[str, Member]
    changed: asyncio.Event

    def send(self, name: str, message: msg.FromFrontend) -> bool:
        """Sends a message to a process. Returns whether it was sent."""
        ...

    def lose(self, name: str, reason: str) -> None:
        """Counts a process as lost."""

    async def wait(self, seconds: float) -> None:
        """Waits until something about the processes has changed, but not longer than this."""


class Rollout:
    """The weights that the processes of a frontend are to have. Belongs to the frontend's event loop.

    Attributes:
        model: the directory of the last roll-out; empty if there was none.
        weights: the name of its weights.
        is_running: whether processes load or switch at present.
    """

    def __init__(self, frontend: FleetMembers) -> None:
        self.model = self.weights = ""
        self.is_running = False
        self._asked = ""  # the directory whose weights the processes are getting, or got last
        self._frontend = frontend
        self._left_behind: set[tuple[str, str]] = set()  # names and incarnations of processes that cannot follow
        self._following: asyncio.Task[None] | None = None

    async def to(self, model: str) -> str:
        """Gives all processes the weights of a directory, and returns the name of these weights.

        A process that joins later, for example after a restart, gets them as well.

        Raises:
            RefusedError: a roll-out is running, or the fleet has no process.
            ServiceError: a process cannot load the directory, or two processes found different weights there. All
                processes keep their weights.
        """
        if self.is_running:
            raise RefusedError(f"the processes are getting the weights of {self._asked!r} now")
        self.is_running, self._asked = True, model
        try:
            members = [*self._frontend.members.values()]
            weights = await self._loaded(members, model)
            self.model, self.weights = model, weights
            self._left_behind.clear()
            await self._switch_all(members)
        finally:
            self.is_running = False
            self._frontend.changed.set()
        log.warning("the processes have the weights %s of %s", self.weights, model)
        return self.weights

    def follow(self) -> None:
        """Lets processes that have other weights than those of the last roll-out catch up. Returns at once."""
        behind = [one for one in self._frontend.members.values() if self._is_behind(one)]
        if behind and self.weights and not self.is_running:
            self.is_running, self._asked = True, self.model
            self._following = asyncio.create_task(self._catch_up(behind))

    def close(self) -> None:
        """Ends what `follow` has begun. Safe to call twice."""
        if self._following is not None:
            self._following.cancel()

    def _is_behind(self, member: Member) -> bool:
        known = (member.ready.name, member.ready.incarnation) in self._left_behind
        return not (known or member.ready.draining or member.ready.weights == self.weights)

    async def _catch_up(self, members: Sequence[Member]) -> None:
        try:
            for member in members:
                try:
                    found = await self._loaded([member], self.model)
                except ServiceError as error:
                    found = str(error)
                if found == self.weights:
                    await self._switch([member])
                else:
                    log.warning("%s keeps its weights, because %s has %s", member.ready.name, self.model, found)
                    self._left_behind.add((member.ready.name, member.ready.incarnation))
        finally:
            self.is_running = False
            self._frontend.changed.set()

    # ---- load

    async def _loaded(self, members: Sequence[Member], model: str) -> str:
        """Lets processes load a directory, those of one host one after another. Returns the name of its weights."""
        hosts = sorted(members, key=_host_of)
        each = [self._load(list(group), model) for _, group in groupby(hosts, _host_of)]
        answers = [answer for found in await asyncio.gather(*each) for answer in found]
        errors = [f"{answer.name}: {answer.error}" for answer in answers if answer.error]
        names = {answer.weights: answer.name for answer in answers if not answer.error}
        if not errors and len(names) > 1:
            errors = [f"{model!r} has the weights {weights} at {name}" for weights, name in names.items()]
        if errors or not names:
            self._tell(members, msg.Load(model=""))
            raise (
                ServiceError("; ".join(errors) or "no process has answered") if members else RefusedError("no process")
            )
        return next(iter(names))

    async def _load(self, members: Sequence[Member], model: str) -> list[msg.Loaded]:
        answers: list[msg.Loaded] = []
        for member in members:
            member.loaded = None
            self._tell([member], msg.Load(model=model))
            await self._until(lambda member=member: member.has_loaded(model) or self._is_gone(member))
            if member.loaded is not None and member.has_loaded(model):
                answers.append(member.loaded)
                if member.loaded.error:
                    break
        return answers

    # ---- switch

    async def _switch_all(self, members: Sequence[Member]) -> None:
        """Lets processes switch in an order in which a decode process always has a prefill process of its weights.

        Half of the prefill processes come first, then the decode processes one by one, then the other prefill
        processes. If there is only one prefill process, all decode processes switch before it.
        """
        prefills, decodes = ([one for one in members if one.ready.role == role] for role in ("prefill", "decode"))
        first = prefills[: len(prefills) // 2]
        for prefill in first:
            await self._switch([prefill])
        for some in [[decode] for decode in decodes] if first else [decodes]:
            await self._switch(some)
        await self._switch(prefills[len(first) :])

    async def _switch(self, members: Sequence[Member]) -> None:
        """Lets processes switch, and waits until each of them has switched or is gone."""
        for member in members:
            member.is_switching = member.ready.weights != self.weights
        moving = [member for member in members if member.is_switching]
        self._tell(moving, msg.Switch(weights=self.weights))
        for member in moving:
            await self._until(lambda member=member: member.ready.weights == self.weights or self._is_gone(member))
            member.is_switching = False
            self._frontend.changed.set()

    def _is_gone(self, member: Member) -> bool:
        return self._frontend.members.get(member.ready.name) is not member

    def _tell(self, members: Iterable[Member], message: msg.FromFrontend) -> None:
        for member in members:
            if not self._is_gone(member) and not self._frontend.send(member.ready.name, message):
                self._frontend.lose(member.ready.name, f"{member.ready.name} takes no messages")

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._frontend.wait(_CHECK_S)


def _host_of(member: Member) -> str:
    return "".join(host_of(member.ready.pulse))
