"""`Member`: a process of the fleet, as the frontend knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.sockets import Pulse


@dataclass(slots=True, eq=False)
class Member:
    """A process of the fleet.

    Attributes:
        ready: its latest `Ready` message.
        serials: serial numbers of the requests that this frontend has sent to the process, and that have not ended.
        stats: the process's latest counters, or None until it answers.
        pulse: becomes readable when the process is gone.
        loaded: its latest answer to `Load`, or None until it answers.
        is_switching: whether the process changes its weights, and gets no request until it has.
    """

    ready: msg.Ready
    pulse: Pulse
    serials: set[int] = field(default_factory=set[int])
    stats: msg.Stats | None = None
    loaded: msg.Loaded | None = None
    is_switching: bool = False

    def has_loaded(self, model: str) -> bool:
        """Whether its latest answer is about this directory, and not about one that an earlier frontend named."""
        return self.loaded is not None and self.loaded.model == model
