"""The prefill processes as a decode process sees them: whom to ask for a prompt, and what each has before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.prefill_router import PrefillLink, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from scheduler_adapters.service.requests import DecodeRoom
    from scheduler_adapters.service.sockets import Context, Socket
    from transfer.wire.keys import Keyring


class Prefills:
    """Asks the process that will have computed a prompt first, and books its load.

    Args:
        context: makes the sockets.
        endpoints: of the prefill processes.
        hello: who we are.
        clock: seconds, monotonic.
        keyring: what we show there, and know them by; None for plain sockets.

    Attributes:
        links: to each of them.
    """

    def __init__(
        self,
        context: Context,
        endpoints: Sequence[str],
        hello: msg.Hello,
        clock: Callable[[], float],
        keyring: Keyring | None = None,
    ) -> None:
        self.links = [PrefillLink(context, endpoint, hello, clock, keyring) for endpoint in endpoints]

    @property
    def connected(self) -> bool:
        """Whether one is there."""
        return any(link.welcome for link in self.links)

    @property
    def sockets(self) -> list[Socket]:
        """What to wait for."""
        return [socket for link in self.links for socket in link.sockets]

    @property
    def malformed(self) -> int:
        """Messages that could not be decoded."""
        return sum(link.malformed for link in self.links)

    def ask(self, room: DecodeRoom, within_s: float, *, chunkwise: bool) -> bool:
        """Have the room's prompt computed. Whether somebody was there to take the message."""
        choice = choose(self.links, room.tokens, room.request.cache_salt, room.avoid)
        if choice is None:
            return False
        message = msg.Prefill(
            request_id=room.request_id,
            attempt=room.attempt,
            prompt=tuple(room.tokens),
            within_s=within_s,
            chunkwise=chunkwise,
            cache_salt=room.request.cache_salt,
        )
        if not choice.link.send(message):
            return False
        room.link, room.load = choice.link, choice.load
        choice.link.load += room.load
        choice.link.asked_for.add(choice.chunks)
        return True

    @staticmethod
    def relieve(room: DecodeRoom) -> None:
        """The process that was asked has this prompt no longer before it."""
        if room.link is not None:
            room.link.load = max(0, room.link.load - room.load)
        room.load = 0

    def close(self) -> None:
        """Close the connections. Safe twice."""
        for link in self.links:
            link.close()
