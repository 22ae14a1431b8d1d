"""The agents that a rank reads with: one for each source engine, so that one source's end costs no other anything.

What NIXL copies cannot be stopped, except by destroying the agent that does it. So the agent that reads is not the one
that serves peers, and not the one that reads from somebody else. One is kept ready: making it takes 10 ms.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from contextlib import suppress

from transfer.errors import AgentError
from transfer.nixl.agent import Agent

log = logging.getLogger("pagewire.transfer")


class ReaderAgents:
    """Makes agents, lends each to one source, and takes it back when nothing moves over it any more.

    Args:
        name: of the rank; agents are named after it and numbered, no name is used twice.
        make: makes an agent of a name, and registers with it all memory that is read into.

    Raises:
        AgentError: NIXL refuses the first one.
    """

    def __init__(self, name: str, make: Callable[[str], Agent]) -> None:
        self._names = (f"{name}/reader{number}" for number in itertools.count())
        self._make = make
        self._spare: list[Agent] = [make(next(self._names))]

    def take(self) -> Agent:
        """Returns an agent that knows no peer."""
        return self._spare.pop() if self._spare else self._make(next(self._names))

    def keep_ready(self) -> None:
        """Makes one ahead of the next source, where there is none. For a moment in which nothing else is to be done."""
        if not self._spare:
            with suppress(AgentError):  # the next source's request will tell
                self._spare.append(self._make(next(self._names)))

    def give_back(self, agent: Agent, *, reuse: bool = True) -> None:
        """Takes an agent back, its peers unloaded and nothing in flight. One that is not to be reused is destroyed."""
        if self._spare or not reuse:
            _close(agent)
        else:
            self._spare.append(agent)

    def close(self) -> None:
        """Destroys those that are not lent. Safe to call twice."""
        while self._spare:
            _close(self._spare.pop())


def _close(agent: Agent) -> None:
    try:
        agent.close()
    except AgentError as error:
        log.warning("%s", error)
