"""The two READs of a pull that is to be over as soon as it is posted: its pages, and the lease word after them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from transfer.errors import AgentError
from transfer.memory import MemoryType
from transfer.nixl.agent import WORD_BYTES, Handle
from transfer.pull.lease import LeaseRef
from transfer.pull.parts import Part
from transfer.pull.remote import RemoteEngine


@dataclass(slots=True, eq=False)
class AtOnce:
    """The READs of a part that were posted at once, and their state.

    Attributes:
        reading: the READ of the pages; None where it has ended, or failed.
        fencing: the READ of the word, likewise.
        fenced: the word was read, or is being read: all pages were there before.
        post_s: seconds until the pages' READ was posted.
        error: of what has failed.
    """

    reading: Handle | None = None
    fencing: Handle | None = None
    fenced: bool = False
    post_s: float = 0.0
    error: AgentError | None = None


def read_and_fence(
    engine: RemoteEngine, part: Part, memory_type: MemoryType, lease: LeaseRef, word: int | None, note: bytes
) -> AtOnce:
    """Reads a part. If all of it has arrived by then, it also reads the lease's word, and sends the note.

    Without an address for the word, it does not fence. The result holds any error.
    """
    there, found, begin = engine.ranks[part.rank], AtOnce(), time.perf_counter()
    try:
        kinds = (memory_type, there.memory_type)
        found.reading = engine.agent.read_at_once(there.agent_name, part.local, part.remote, kinds)
        found.post_s = time.perf_counter() - begin
        if found.reading is None and word is not None:
            address = there.words_addr + lease.slot * WORD_BYTES
            found.fencing = engine.agent.read_word(there.agent_name, word, address, note)
            found.fenced = True
    except AgentError as error:
        found.error = error
    return found
