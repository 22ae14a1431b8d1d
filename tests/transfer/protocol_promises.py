"""The promises of the protocol, which `protocol_model` checks for every room in every state."""

from __future__ import annotations

from collections.abc import Sequence

from tests.transfer.protocol_room import (
    CLOSED,
    COMMITTED,
    FLYING,
    GIVEN_UP,
    IDLE,
    KEPT,
    MATCHED,
    MISMATCHED,
    PASSED,
    PULLING,
    STALE,
    STANDING,
    UNASKED,
    UNSET,
    Move,
    Protocol,
    Room,
    bits,
)

# For each state of a pull, its rank in the order of progress.
_STAGE = {IDLE: 0, PULLING: 1, GIVEN_UP: 2, COMMITTED: 2, KEPT: 3, CLOSED: 4}


def stale(protocol: Protocol, name: str, size: int, room: Room) -> str:
    """Promise "no stale page": returns the name of a committed page without the leased content, or an empty text."""
    for link, (reader, rank) in enumerate(protocol.links):
        wrong = ((1 << protocol.pages_of(size, room)) - 1) & ~room.link[link][2]
        if room.pull[reader] == COMMITTED and wrong:
            return f"stale page: D{reader} serves page {bits(wrong)[0]} of {name} from P{rank}, and it is another's"
    return ""


def stuck(protocol: Protocol, name: str, room: Room, moves: Sequence[Move], waits: bool = False) -> str:
    """Promise "no stuck state, no one else affected": returns the name of a party that cannot progress, or an empty
    text.

    Every holder of pages must have a move of its own that brings it nearer to giving the pages back. Every open pull
    with an open lease must have a move that brings it nearer to its commit, whatever happens to other readers and
    requests. `waits`: the room is the back of an import whose front has not passed. A back that has passed waits for
    the front.
    """
    due = {move.due for move in moves}
    if (room.held or STANDING in room.word or STALE in room.word) and "P" not in due:
        return f"P holds the pages of {name}, and waits for a message that may never come"
    for reader, state in enumerate(room.pull):
        if state not in (IDLE, KEPT, CLOSED) and f"D{reader}" not in due:
            return f"D{reader} holds pages for {name}, and waits for a READ that may never end"
        if waits and all(room.link[link][0] == PASSED for link in protocol.of_reader[reader]):
            continue
        if _is_sound(protocol, room, reader) and not any(
            move.room.pull[reader] == COMMITTED
            or (move.room.link != room.link and _is_sound(protocol, move.room, reader))
            for move in moves
        ):
            return f"D{reader} cannot go on with {name}, though nothing has gone wrong with it"
    return ""


def _is_sound(protocol: Protocol, room: Room, reader: int) -> bool:
    return room.pull[reader] == PULLING and all(
        room.link[link][0] in (MATCHED, PASSED)
        or (room.link[link][0] != MISMATCHED and room.word[protocol.links[link][1]] == STANDING)
        for link in protocol.of_reader[reader]
    )


def is_over(room: Room) -> bool:
    """Promise "no lost page": returns whether no page is held, no page may be written, no lease word is set and no pull
    is open.
    """
    words = STANDING in room.word or STALE in room.word
    pages = room.held or any(room.pages) or any(room.loose)
    return not (words or pages) and all(state in (IDLE, CLOSED) for state in room.pull)


def rank(size: int, room: Room) -> int:
    """Returns a number that every move increases. No sequence of moves can therefore return to an earlier state, and
    every run ends.
    """
    switches = room.source_new + room.reader_new.bit_count()
    gone = 0 if UNSET in room.word or room.held else sum(1 + size - mask.bit_count() for mask in room.intact)
    if room.found == UNASKED and UNSET in room.word:
        lost = sum(size - mask.bit_count() for mask in (room.listed, *room.intact))
        loads = 2 * (size - room.below.bit_count()) - room.coming.bit_count()
        return 1 + switches + lost + 10 * loads + 1000 * sum(_STAGE[state] for state in room.pull)
    source = (
        100 * bool(room.found) + 10 * sum(room.word) + room.heard.bit_count() + bool(room.held or any(room.word)) + gone
    )
    reads = sum(-1 if state == FLYING else 10 * state + copied.bit_count() for state, copied, _ in room.link)
    return source + reads + room.own + switches + 1000 * sum(_STAGE[state] for state in room.pull)
