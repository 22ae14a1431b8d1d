"""Which sources something was said to a short while ago: it may still be on its way, below NIXL, and wait for polls."""

from __future__ import annotations

from collections.abc import Callable

from transfer.pull.remote import RemoteEngine

LATELY_S = 1.0


class SpokenTo:
    """Sources, each for a second after the last word to it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[RemoteEngine, float] = {}

    def add(self, engine: RemoteEngine) -> float:
        """Something is said to a source, at the time that is returned."""
        now = self._clock()
        self._until[engine] = now + LATELY_S
        return now

    def lately(self) -> set[RemoteEngine]:
        """Those of the last second."""
        now = self._clock()
        for engine in [engine for engine, until in self._until.items() if until <= now]:
            del self._until[engine]
        return {*self._until}
