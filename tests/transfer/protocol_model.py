"""Explores every interleaving of the ownership protocol: `python -m tests.transfer.protocol_model --help`.

The search is breadth first over distinct states, so the first violation has the shortest possible trace. States that
differ only in the names of equal readers, or in the order of a request's pages, count as one.

Each possible state of a room has an index. A state of the search is one number, made of the indices of all rooms and
the number of deaths that are still allowed. For each state of a room, and for each view of the other rooms, the moves
are computed once, as differences of that number. A successor of a state is then the sum of the state and such a
difference.
"""

from __future__ import annotations

import argparse
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.transfer import protocol_promises as promises
from tests.transfer.protocol_room import (
    CLEARED,
    CLOSED,
    COMMITTED,
    COPYING,
    FENCED_EARLY,
    GIVEN_UP,
    IDLE,
    KEPT,
    PASSED,
    PULLING,
    STALE,
    STANDING,
    UNSET,
    Move,
    Protocol,
    Room,
    View,
)
from tests.transfer.protocol_rules import ASSUMPTIONS, CASTS, RULES, SHOWN_BY, Cast, Part

_BITS = 20  # The number of bits that a room's index takes in a state.
_MASK = (1 << _BITS) - 1
_SOURCES = "PQ"


class Face(NamedTuple):
    """The part of a room's state that other rooms can see."""

    held: int
    pages: tuple[int, ...]
    failed: bool  # True if a new attempt may begin.
    past: int  # The number of readers that have started a later attempt.
    new: int  # The number of readers that do not know this attempt yet.
    claims: bool  # True if this attempt's lease word is taken.
    standing: int  # The number of source ranks on which this attempt's lease word is set.
    said: int
    # The state of the only reader's pull, if the prompt comes in stretches.
    pull: int = IDLE
    here: int = -1  # The number of pages that the reader has. It is -1 until the stretch is over.
    # For one part of an import. True if every lease word that the reader has read held the lease's id and the pull is
    # not over.
    passed: bool = False


class Steps(NamedTuple):
    """The possible moves of a room in one view of the other rooms. Each move has two numbers: one is added to a state,
    and one is added to the mirrored state.
    """

    deltas: tuple[tuple[int, int], ...]
    deaths: tuple[tuple[int, int], ...]  # For the death of each process, the same two numbers as in `deltas`.
    spoils: bool  # True if a move writes to pages of other rooms. With all rules this never happens.
    wrong: bool


class Result(NamedTuple):
    """The result of a search. `story` is the trace of the first violation. It is empty if there is no violation."""

    states: int
    moves: int
    finals: int
    depth: int
    seconds: float
    wrong: str = ""
    story: tuple[str, ...] = ()


def _of_source(source: int, text: str) -> str:
    """Returns the description of a move, with the name of the room's own source in place of P."""
    return re.sub(r"\bP(?=\d|\b)", _SOURCES[source], text) if source else text


class Explorer:
    """Explores all states of one cast, with all rules or without some."""

    def __init__(self, cast: Cast, without: frozenset[str] = frozenset()) -> None:
        self.cast = cast
        self.protocol = Protocol(cast.shape, without)
        readers = cast.shape.readers
        # True if the set of a request's present pages matters. False if only their number matters.
        self._exact = (
            bool(without & {"writer-hold", "quarantine", "settled-ends", "named-by-source"})
            or cast.shape.by_content
            or cast.shape.ahead
            or cast.shape.weights
        )
        self._mirrors = len(readers) == 2 and readers[0] == readers[1] and not self._exact
        self._rooms: list[Room] = []
        self._faces: list[Face] = []
        self._face_ids: dict[Face, int] = {}
        self._seen_as: list[int] = []
        self._mirror: list[int] = []
        self._sees: list[bool] = []
        self._ids: dict[tuple[int, Room], int] = {}
        self._steps: dict[tuple[int, ...], Steps] = {}
        self._shifts = [_BITS * position for position in range(len(cast.parts))]
        self._stretches = any(part.head >= 0 for part in cast.parts)
        self._in_parts = any(part.front >= 0 for part in cast.parts)
        self._sources = range(1 + max(part.source for part in cast.parts))
        self._processes = [
            f"{_SOURCES[source]}{rank}" for source in self._sources for rank in range(cast.shape.sources)
        ]
        self._processes += [f"D{reader}" for reader in range(len(readers))]

    # Rooms and their indices.

    def _id(self, position: int, room: Room) -> int:
        size = self.cast.parts[position].pages
        room = self._canonical(size, room)
        found = self._ids.get((size, room))
        if found is None:
            found = self._ids[size, room] = len(self._rooms)
            self._rooms.append(room)
            self._faces.append(self._face(room))
            self._seen_as.append(self._face_ids.setdefault(self._faces[-1], len(self._face_ids)))
            waits = UNSET in room.word or (IDLE in room.pull and self.protocol.offered(room))
            self._sees.append(waits or self._stretches or self._in_parts or bool(self.protocol.without))
            self._mirror.append(found)
            if self._mirrors:
                self._mirror[found] = self._id(position, self._mirrored(room))
        return found

    def _canonical(self, size: int, room: Room) -> Room:
        room = self._forget(room)
        return room if size == 1 or self._exact else self._ordered(size, room)

    def _forget(self, room: Room) -> Room:
        """Drops details that no longer matter: messages to an ended lease, and pages that no reader reads."""
        said, heard, intact = room.said, room.heard, list(room.intact)
        for rank, links in enumerate(self.protocol.of_source):
            if room.word[rank] == CLEARED and self.protocol.has("attempt-check"):
                said, heard = (mask & ~sum(1 << i for i in links) for mask in (said, heard))
            states = {(room.pull[self.protocol.links[i][0]], room.link[i][0]) for i in links}
            if not room.held and not any(pull == IDLE or link in (COPYING, FENCED_EARLY) for pull, link in states):
                intact[rank] = 0
        own = room.own if PULLING in room.pull else 0
        return room._replace(said=said, former=room.former & said, heard=heard, intact=tuple(intact), own=own)

    def _ordered(self, size: int, room: Room) -> Room:
        masks = [*room.intact, *(mask for _, *both in room.link for mask in both)]
        order = sorted(range(size), key=lambda page: [mask >> page & 1 for mask in masks])
        if order == list(range(size)):
            return room

        def ordered(mask: int) -> int:
            return sum((mask >> old & 1) << new for new, old in enumerate(order))

        link = tuple((state, ordered(copied), ordered(good)) for state, copied, good in room.link)
        return room._replace(intact=tuple(map(ordered, room.intact)), link=link)

    def _mirrored(self, room: Room) -> Room:
        half = len(room.link) // 2

        def swapped(mask: int) -> int:
            return (mask & (1 << half) - 1) << half | mask >> half

        said, former, heard = map(swapped, (room.said, room.former, room.heard))
        link = room.link[half:] + room.link[:half]
        pull, pages, loose = room.pull[::-1], room.pages[::-1], room.loose[::-1]
        return Room(room.word, room.held, room.intact, said, former, heard, pull, pages, loose, link)

    def _face(self, room: Room) -> Face:
        reserved = self.protocol.has("writer-hold")
        pages = zip(room.pages, room.pull, strict=True)
        return Face(
            held=room.held,
            pages=tuple(mask if reserved or pull != PULLING else 0 for mask, pull in pages),
            failed=CLEARED in room.word or any(pull in (GIVEN_UP, CLOSED) for pull in room.pull),
            past=sum(1 << i for i, pull in enumerate(room.pull) if pull in (IDLE, GIVEN_UP, CLOSED)),
            new=sum(1 << i for i, pull in enumerate(room.pull) if pull == IDLE),
            claims=bool(room.held) or STANDING in room.word or STALE in room.word,
            standing=sum(1 << i for i, word in enumerate(room.word) if word in (STANDING, STALE)),
            said=0 if self.protocol.has("attempt-check") else room.said,
            pull=room.pull[0] if self._stretches or self._in_parts else IDLE,
            here=self._here(room) if self._stretches else -1,
            passed=self._in_parts and self._has_passed(room),
        )

    def _has_passed(self, room: Room) -> bool:
        links = [room.link[link][0] for link in self.protocol.of_reader[0]]
        return room.pull[0] == COMMITTED or (room.pull[0] == PULLING and {*links} == {PASSED})

    def _here(self, room: Room) -> int:
        if room.pull[0] in (COMMITTED, KEPT):
            return room.first + room.found
        return 0 if room.pull[0] in (GIVEN_UP, CLOSED) else -1

    def _view(self, position: int, faces: Sequence[Face]) -> View:
        parts, shape = self.cast.parts, self.cast.shape
        mine = parts[position]
        source, readers = (1 << shape.pool) - 1, [(1 << shape.pool) - 1] * len(shape.readers)
        take, foreign, claimed = (1 << len(shape.readers)) - 1, 0, False
        tail = next((face.pull for part, face in zip(parts, faces, strict=True) if part.head == position), -1)
        for other, (part, face) in enumerate(zip(parts, faces, strict=True)):
            if other == position:
                continue
            source &= ~face.held if part.source == mine.source else -1
            readers = [free & ~pages for free, pages in zip(readers, face.pages, strict=True)]
            if (part.source, part.word) == (mine.source, mine.word):
                claimed |= face.claims
                foreign |= face.standing
            if other == mine.before:
                take &= face.past
            if part.before == position:
                take &= face.new
        may_lease = not claimed and (mine.before < 0 or faces[mine.before].failed)
        late = faces[mine.before].said if mine.before >= 0 else 0
        head = faces[mine.head] if mine.head >= 0 else None
        front = faces[mine.front] if mine.front >= 0 else None
        backs = [face for part, face in zip(parts, faces, strict=True) if part.front == position]
        return View(
            may_lease,
            source,
            tuple(readers),
            take,
            late,
            foreign,
            has_tail=tail >= 0,
            tail=max(tail, 0),
            head=-1 if head is None else head.here,
            head_words=-1 if head is None else head.standing,
            has_front=front is not None,
            front_passed=front is not None and front.passed,
            front_words=-1 if front is None else front.standing,
            back_committed=any(face.pull == COMMITTED for face in backs),
        )

    # States and what can follow.

    def _encode(self, crashes: int, ids: list[int]) -> int:
        state = crashes
        for room in reversed(ids):
            state = state << _BITS | room
        return state

    def _key(self, crashes: int, ids: list[int]) -> int:
        return min(self._encode(crashes, ids), self._encode(crashes, [self._mirror[room] for room in ids]))

    def _moves(self, position: int, room: Room, faces: Sequence[Face]) -> list[Move]:
        part = self.cast.parts[position]
        moves = self.protocol.moves(part.name, part.pages, room, self._view(position, faces))
        return [move._replace(text=_of_source(part.source, move.text)) for move in moves]

    def _waits(self, position: int, faces: Sequence[Face]) -> bool:
        """Returns whether a room is the back of an import whose front has not passed yet."""
        front = self.cast.parts[position].front
        return front >= 0 and not faces[front].passed

    def _steps_of(self, position: int, ids: list[int]) -> Steps:
        own = ids[position]
        key = (position, own, *map(self._seen_as.__getitem__, ids)) if self._sees[own] else (position, own)
        steps = self._steps.get(key)
        if steps is None:
            room, part = self._rooms[own], self.cast.parts[position]
            faces = [self._faces[other] for other in ids]
            moves, waits = self._moves(position, room, faces), self._waits(position, faces)
            after = [self._id(position, move.room) for move in moves]
            wrong = any(move.wrong or promises.stale(self.protocol, part.name, part.pages, move.room) for move in moves)
            steps = self._steps[key] = Steps(
                deltas=tuple(dict.fromkeys(self._delta(position, own, other) for other in after if other != own)),
                deaths=tuple(self._delta(position, own, self._id(position, room)) for room in self._killed(part, room)),
                spoils=any(move.writes for move in moves),
                wrong=wrong or bool(promises.stuck(self.protocol, part.name, room, moves, waits)),
            )
            if not self.protocol.without:
                self._check_rank(part.pages, room, [self._rooms[i] for i in after if i != own])
        return steps

    def _delta(self, position: int, room: int, after: int) -> tuple[int, int]:
        shift = self._shifts[position]
        return (after - room) << shift, (self._mirror[after] - self._mirror[room]) << shift

    def _check_rank(self, size: int, room: Room, after: list[Room]) -> None:
        for other in after:
            if promises.rank(size, other) <= promises.rank(size, room):
                raise RuntimeError(f"a move does not increase the rank: from {room} to {other}")

    def _killed(self, part: Part, room: Room) -> list[Room]:
        """Returns the room after the death of each process."""
        shape = self.cast.shape
        sources = [
            self.protocol.crash_source(room, rank) if part.source == source else room
            for source in self._sources
            for rank in range(shape.sources)
        ]
        return sources + [self.protocol.crash_reader(room, reader) for reader in range(len(shape.readers))]

    def _tell(self, crashes: int, rooms: list[Room]) -> Iterator[tuple[str, int, list[Room], str]]:
        """Yields all successors of a state with their descriptions. They are computed without caches and without
        symmetry.
        """
        faces = [self._face(room) for room in rooms]
        for position, part in enumerate(self.cast.parts):
            moves = self._moves(position, rooms[position], faces)
            for move in moves:
                after = [
                    room if other == position or move.writes is None else self.protocol.spoil(room, *move.writes)
                    for other, room in enumerate(rooms)
                ]
                after[position] = self._forget(move.room)
                yield move.text, crashes, after, move.wrong or self._stale(after)
            waits = self._waits(position, faces)
            if stuck := promises.stuck(self.protocol, part.name, rooms[position], moves, waits):
                yield "", crashes, rooms, stuck
        for name, *killed in (
            zip(self._processes, *map(self._killed, self.cast.parts, rooms), strict=True) if crashes else ()
        ):
            yield f"{name} dies and starts anew", crashes - 1, [*map(self._forget, killed)], ""

    def _stale(self, rooms: list[Room]) -> str:
        found = (
            _of_source(part.source, promises.stale(self.protocol, part.name, part.pages, room))
            for part, room in zip(self.cast.parts, rooms, strict=True)
        )
        return next(filter(None, found), "")

    # The search.

    def run(self) -> Result:
        """Explores every reachable state, or stops at the first state that breaks a promise."""
        began = time.perf_counter()
        rooms = [self._id(position, self.protocol.initial) for position in range(len(self.cast.parts))]
        first = self._key(self.cast.crashes, rooms)
        seen: dict[int, int] = {first: first}  # For each state, the state from which the search first reached it.
        level, depth, moves, finals = [first], 0, 0, 0
        while level:
            following: list[int] = []
            for state in level:
                after = self._expand(state)
                if after is None:
                    wrong, story = self._story(seen, state)
                    return Result(len(seen), moves, finals, len(story), time.perf_counter() - began, wrong, story)
                moves += len(after)
                finals += not after
                for other in after:
                    if other not in seen:
                        seen[other] = state
                        following.append(other)
            level = following
            depth += bool(following)
        return Result(len(seen), moves, finals, depth, time.perf_counter() - began)

    def _expand(self, state: int) -> list[int] | None:
        """Returns the successors of a state. Returns None if the state, or a move from it, breaks a promise."""
        ids = [state >> shift & _MASK for shift in self._shifts]
        crashes = state >> _BITS * len(ids)
        steps = [self._steps_of(position, ids) for position in range(len(ids))]
        if any(step.wrong for step in steps):
            return None
        if any(step.spoils for step in steps):
            told = list(self._tell(crashes, [self._rooms[room] for room in ids]))
            if any(wrong for *_, wrong in told):
                return None
            keys = {self._key(left, [*map(self._id, range(len(ids)), rooms)]) for _, left, rooms, _ in told}
            return list(keys - {state})
        mirrored = self._encode(crashes, [self._mirror[room] for room in ids]) if self._mirrors else state
        after = [min(state + one, mirrored + two) for step in steps for one, two in step.deltas]
        if not after and not all(promises.is_over(self._rooms[room]) for room in ids):
            return None
        if crashes:
            one_less = 1 << _BITS * len(ids)
            for deltas in zip(*(step.deaths for step in steps), strict=True):
                one, two = (sum(both) - one_less for both in zip(*deltas, strict=True))
                after.append(min(state + one, mirrored + two))
        return after

    def _story(self, seen: dict[int, int], state: int) -> tuple[str, tuple[str, ...]]:
        """Describes the moves that lead to a state, and the promise that the state breaks. Readers and pages keep their
        names throughout the description.
        """
        path = [state]
        while seen[path[-1]] != path[-1]:
            path.append(seen[path[-1]])
        crashes, rooms, story = self.cast.crashes, [self.protocol.initial] * len(self.cast.parts), list[str]()
        for target in reversed(path[:-1]):
            for text, left, after, _ in self._tell(crashes, rooms):
                if self._key(left, [*map(self._id, range(len(after)), after)]) == target:
                    story.append(text)
                    crashes, rooms = left, after
                    break
            else:
                raise RuntimeError(f"no move after {story} leads to the next state of the trace")
        for text, _, _, wrong in self._tell(crashes, rooms):
            if wrong:
                return wrong, (*story, *filter(None, [text]))
        return "pages are lost: nothing can happen any more, and not all are given back", tuple(story)


# The command.


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.transfer.protocol_model", description="Explores the ownership protocol."
    )
    parser.add_argument("--config", choices=sorted(CASTS), help="default: full, or what shows the rule's absence")
    parser.add_argument(
        "--without", choices=[*RULES, *ASSUMPTIONS], metavar="RULE", help="leave a rule out; --rules lists"
    )
    parser.add_argument("--rules", action="store_true", help="list the rules and assumptions")
    return parser.parse_args()


def _print(line: str = "") -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _print_result(cast: Cast, result: Result) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    _print(
        f"{cast.title:32} crashes {cast.crashes}  {result.states:>10,} states {result.moves:>11,} moves "
        f"{result.finals:>4} final {result.depth:>3} deep {result.seconds:>7.1f} s {memory:>5} MiB"
    )
    for number, line in enumerate(result.story, 1):
        _print(f"  {number:>2}. {line}")
    if result.wrong:
        _print(f"  => {result.wrong}")


def main() -> int:
    """Runs the command. The exit status is 0 if all promises hold.

    If a rule is left out, the exit status is 0 if a promise is broken.
    """
    arguments = _arguments()
    if arguments.rules:
        for name, text in {**RULES, **ASSUMPTIONS}.items():
            _print(f"{name:20} {text}")
        return 0
    without = arguments.without
    casts = (SHOWN_BY[without],) if without and not arguments.config else CASTS[arguments.config or "full"]
    results = list[Result]()
    for cast in casts:
        results.append(Explorer(cast, frozenset({without} if without else ())).run())
        _print_result(cast, results[-1])
    broken = any(result.wrong for result in results)
    if not broken:
        _print("no stale page accepted, no page lost, no state stuck, nobody else affected")
    return int(broken == (without is None))


if __name__ == "__main__":
    sys.exit(main())
