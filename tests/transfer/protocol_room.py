"""One lease and its pulls, as a state machine. `protocol_model` explores all interleavings of several leases.

A *room* is one attempt of one request: a source engine P of one or several ranks leases pages to the readers D0 and D1,
each of which copies them over *links*, one for each pair of ranks. `docs/concepts/protocol.md` says the same in prose.
If pages are asked for by content (`Shape.by_content`), P has computed them for another request. These pages are idle,
so each of them may be evicted at any time and be loaded again from a lower tier. P leases the pages that it has when it
is asked. A prompt may come in two stretches from two sources. Each stretch is a room. The second stretch begins after
the pages of the first stretch that the reader has. The reader has published these pages, and may lose them again. One
import may also be read from two sources at the same time, a part of its pages from each. Each part is a room: front and
back. If no request waits for the pages (`Shape.ahead`), the reader computes the pages during the pull, and may end the
pull early. With `Shape.weights`, P and each reader switch to other weights once, at any moment. Each room has its own
switches. The network is the set of all messages ever sent: a message may arrive at once, late, out of order, many
times or never, and the model has no separate move for this. A deadline may pass at any moment. Each idle page may be
overwritten at any moment. A READ copies page by page, in any order, and a copied page counts as what the page held when
its last byte was read. Under one lease a page can only change from right to wrong, so a torn copy is no worse than a
wrong one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

# States of a lease word. STALE means that the id is still set, but the pages are gone.
UNSET, STANDING, STALE, CLEARED = range(4)
# States of a reader's pull. KEPT means that its pages are cached and idle.
IDLE, PULLING, GIVEN_UP, COMMITTED, CLOSED, KEPT = range(6)
NONE, COPYING, FENCED_EARLY, FENCING, MATCHED, MISMATCHED, PASSED, FLYING = range(8)  # a link

# Special numbers of leased pages, for leases by content. ABSENT: the source engine has not computed the pages
# yet. UNASKED: the source engine has computed the pages, but has answered no reader.
ABSENT, UNASKED = 0, -1
BOTH = 2  # Pages of both versions of the weights.

T = TypeVar("T")


class Room(NamedTuple):
    """One attempt of one request. In a mask over the request's pages, bit k stands for page k of the request."""

    word: tuple[int, ...]  # [source rank]
    held: int  # The pages that the source holds, as a mask over its pool. Every rank has the same mask.
    intact: tuple[int, ...]  # For each source rank, the request's pages that still have the leased content there.
    said: int  # The links over which the reader has sent "done" or "refused".
    former: int  # The links over which an earlier incarnation of the reader has sent "done" or "refused".
    heard: int  # The links whose message the source has recorded.
    pull: tuple[int, ...]  # [reader]
    # For each reader, the pages that it holds, as a mask over its pool. All its ranks have the same mask.
    pages: tuple[int, ...]
    # For each reader, the pages that it has given back although a READ may still write to them. With all rules there
    # are none.
    loose: tuple[int, ...]
    # For each link: its state, its copied pages, and the pages whose copy has the leased content.
    link: tuple[tuple[int, int, int], ...]
    # For leases by content, the number of leased pages, counted from the first requested page. It is UNASKED until
    # the source has answered a reader.
    found: int = ABSENT
    listed: int = 0  # The pages that the source finds in its index.
    below: int = 0  # The pages that the source has in a lower tier and may load again.
    coming: int = 0  # The pages that the source is loading from the lower tier.
    # The number of the prompt's pages before the first requested page. The other masks do not include these pages.
    first: int = 0
    # The readers whose table was changed in transit, so that its first page id belongs to another request.
    forged: int = 0
    own: int = 0  # If no request waits, the number of pages that the reader has computed or found during the pull.
    # Versions of the weights are 0, from the start on, and 1, after the switch of a process.
    source_new: int = 0  # 1 if the source has switched.
    reader_new: int = 0  # The readers that have switched.
    made: int = 0  # The version that has computed the pages, or BOTH.
    told: int = 0  # The version that the offer names.
    wants: int = 0  # The readers whose request had version 1 when they took the offer.


class View(NamedTuple):
    """The part of the other rooms' state that a room can see."""

    may_lease: bool = False  # True if the previous attempt has failed somewhere and the lease word is free.
    free_source: int = 0
    free_reader: tuple[int, ...] = ()
    may_take: int = 0  # The readers for which this attempt is not out of date.
    # The links over which the previous attempt's message was sent. They matter only without the attempt check.
    late: int = 0
    # The source ranks on which another lease's id is in the same word. They matter only without fresh ids.
    foreign: int = 0
    has_tail: bool = False  # True if another stretch of the prompt follows this stretch.
    tail: int = IDLE  # The state of the next stretch's pull.
    # The number of the previous stretch's pages that the reader has. It is -1 if there is no previous stretch, or if it
    # is not over.
    head: int = -1
    # The number of source ranks on which the previous stretch's lease word is set. It is -1 if there is no previous
    # stretch.
    head_words: int = -1
    # For the back of an import from two sources. True if the import has a front.
    has_front: bool = False
    front_passed: bool = False  # True if the front has passed its fence and is not over.
    front_words: int = -1  # The number of source ranks on which the front's lease word is set.
    back_committed: bool = False  # For the front of an import. True if the front was committed together with the back.


class Move(NamedTuple):
    """A move: its description and its result.

    `due` names the party that makes the move by itself, with its own clock and memory. `wrong` names the promise that
    the move breaks. `writes` is a reader's page that a READ writes although another request may already have the page.
    """

    text: str
    room: Room
    due: str = ""
    wrong: str = ""
    writes: tuple[int, int] | None = None


class Shape(NamedTuple):
    """The size of a room: the ranks of the source, the source rank of each link of each reader, and the pages of each
    pool.
    """

    sources: int
    readers: tuple[tuple[int, ...], ...]
    pool: int
    by_content: bool = False
    tiers: bool = False  # For leases by content. True if the source may load lost pages again.
    # True if no request waits for the pages. The reader then computes the pages during the pull, and may commit a part
    # of the import.
    ahead: bool = False
    weights: bool = False  # True if the source and the readers switch to other weights.


def put(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])


def bits(mask: int) -> list[int]:
    return [index for index in range(mask.bit_length()) if mask >> index & 1]


def lowest(free: int, count: int) -> int:
    return sum(1 << page for page in bits(free)[:count])


class Protocol:
    """The possible moves of a room, with all rules or without some of them."""

    def __init__(self, shape: Shape, without: frozenset[str] = frozenset()) -> None:
        self.shape = shape
        self.without = without
        self.links = [(reader, source) for reader, sources in enumerate(shape.readers) for source in sources]
        self.of_reader = [[i for i, link in enumerate(self.links) if link[0] == r] for r in range(len(shape.readers))]
        self.of_source = [[i for i, link in enumerate(self.links) if link[1] == s] for s in range(shape.sources)]
        everywhere = (0,) * len(shape.readers)
        ranks = (0,) * shape.sources
        self.initial = Room(
            ranks, 0, ranks, 0, 0, 0, everywhere, everywhere, everywhere, ((0, 0, 0),) * len(self.links)
        )

    def has(self, rule: str) -> bool:
        return rule not in self.without

    def moves(self, name: str, size: int, room: Room, view: View) -> Iterator[Move]:
        """Yields all possible next moves in the room of request `name`, which has `size` pages."""
        if self.shape.weights:
            yield from self._switch(name, room)
        yield from (self._lend if self.shape.by_content else self._grant)(name, size, room, view)
        size = self.pages_of(size, room)
        for rank in range(self.shape.sources):
            yield from self._lease(name, rank, room, view)
        yield from self._give_away(name, room)
        for reader in range(len(self.shape.readers)):
            yield from self._pull(name, size, reader, room, view)
            for link in self.of_reader[reader]:
                yield from self._read(name, size, link, room, view)

    # The source.

    def _grant(self, name: str, size: int, room: Room, view: View) -> Iterator[Move]:
        if not room.held and all(word == UNSET for word in room.word):
            if view.may_lease and view.free_source.bit_count() >= size:
                full = ((1 << size) - 1,) * self.shape.sources
                room = room._replace(held=lowest(view.free_source, size), intact=full)
                yield from self._computed(f"P has computed {name} and holds its pages {bits(room.held)}", room)
            return
        yield from self._set_words(name, room)

    def _switch(self, name: str, room: Room) -> Iterator[Move]:
        if not room.source_new:
            switched, text = room._replace(source_new=1), "P switches to other weights"
            if self.has("switch-keeps-leases"):
                yield Move(text, switched)
            else:
                yield Move(f"{text}, and gives away what it held of {name}", switched._replace(held=0))
        for reader in range(len(self.shape.readers)):
            if not room.reader_new >> reader & 1:
                yield Move(
                    f"D{reader} switches to other weights", room._replace(reader_new=room.reader_new | 1 << reader)
                )

    def _computed(self, text: str, room: Room) -> Iterator[Move]:
        """Yields the end of a computation, also with a switch of the weights in its midst."""
        version = room.source_new
        yield Move(text, room._replace(made=version, told=version))
        if self.shape.weights and not version:
            told = BOTH if self.has("own-segment") else 1
            yield Move(f"{text} (some of them are of other weights)", room._replace(source_new=1, made=BOTH, told=told))

    def pages_of(self, size: int, room: Room) -> int:
        """Returns how many pages a reader takes if it has asked for `size` pages."""
        return room.found if room.found > 0 and self.has("take-what-is-held") else size

    def _lend(self, name: str, size: int, room: Room, view: View) -> Iterator[Move]:
        """Yields the moves before a lease by content, and the lease."""
        if room.found == ABSENT:
            if view.may_lease and view.free_source.bit_count() >= size:
                full = (1 << size) - 1
                below = full if self.shape.tiers else 0
                room = room._replace(intact=(full,) * self.shape.sources, found=UNASKED, listed=full, below=below)
                text = f"P has computed {name} for somebody, its pages are listed, and nobody holds them"
                yield from self._computed(text, room)
            return
        for page in bits(room.listed):
            yield Move(f"page {page} of {name} leaves P's index", room._replace(listed=room.listed & ~(1 << page)))
        yield from self._load(name, room)
        if room.found == UNASKED and all(word == UNSET for word in room.word):
            if view.head_words < 0 or view.head >= 0:
                yield from self._ask(name, size, room, view)
        elif room.found > 0 and not room.held and all(word == UNSET for word in room.word):
            yield self._hold(name, room, view)
        elif room.held:
            yield from self._set_words(name, room)

    def _load(self, name: str, room: Room) -> Iterator[Move]:
        """Yields the moves that load pages from a lower tier of the source, one by one, before it answers a reader."""
        for page in bits(room.below & ~room.listed) if room.found == UNASKED else []:
            bit, whole = 1 << page, self.has("list-when-there")
            loading = room._replace(below=room.below & ~bit, coming=room.coming | bit)
            text = f"P begins to bring page {page} of {name} from below" + ("" if whole else ", and lists it")
            yield Move(text, loading if whole else loading._replace(listed=room.listed | bit))
        for page in bits(room.coming):
            bit = 1 << page
            there = room._replace(coming=room.coming & ~bit, intact=tuple(mask | bit for mask in room.intact))
            listed = room.listed | bit if room.found == UNASKED else room.listed
            yield Move(f"page {page} of {name} is there", there._replace(listed=listed))

    def _ask(self, name: str, size: int, room: Room, view: View) -> Iterator[Move]:
        """Yields the moves of a question by content. The reader asks the source for the pages after its own pages.

        The source answers with the pages that it has.
        """
        first = max(0, view.head)
        listed, coming = room.listed >> first, room.coming >> first
        run = next(page for page in range(size + 1) if not listed >> page & 1)
        run = min(run, view.free_source.bit_count())  # Pages of other leases are not available to this request.
        behind = f"what is behind page {first} of {name}" if first else name
        room = room._replace(below=0, coming=0 if self.has("list-when-there") else coming)
        asked = room.reader_new & 1  # Only one reader asks.
        if room.told != asked and self.has("asked-by-version"):
            run = 0
        room = room._replace(told=asked)
        if not run:
            none = room._replace(word=(CLEARED,) * self.shape.sources, listed=0, coming=0)
            yield Move(f"P is asked for {behind} and has nothing of it: there is no lease", none)
            return
        room = room._replace(found=run, listed=listed, first=first, intact=tuple(mask >> first for mask in room.intact))
        if self.has("find-and-hold"):
            yield self._hold(behind, room, view)
        else:
            yield Move(f"P is asked for {behind} and finds {run} pages of it", room)

    def _hold(self, name: str, room: Room, view: View) -> Move:
        held = lowest(view.free_source, room.found)
        # The pages after the leased pages do not matter.
        kept = (1 << room.found) - 1 if self.has("take-what-is-held") else -1
        intact = tuple(mask & kept for mask in room.intact)
        return Move(f"P holds {room.found} pages of {name}", room._replace(held=held, intact=intact, listed=0))

    def _set_words(self, name: str, room: Room) -> Iterator[Move]:
        for rank, word in enumerate(room.word):
            if word == UNSET:
                text = f"P{rank} writes the id of {name}'s lease into its word"
                yield Move(text, room._replace(word=put(room.word, rank, STANDING)), "P")

    def offered(self, room: Room) -> bool:
        """Returns whether the offer has left the source. Readers learn of the offer at this moment or later."""
        if room.found in (ABSENT, UNASKED) and self.shape.by_content:
            return False
        if self.has("word-before-offer"):
            return UNSET not in room.word
        return bool(room.held) or UNSET not in room.word

    def _lease(self, name: str, rank: int, room: Room, view: View) -> Iterator[Move]:
        if room.word[rank] == STANDING:
            if self.has("source-deadline"):
                yield self._end(f"the deadline of {name}'s lease passes on P{rank}", rank, room, "P")
            for link in self.of_source[rank]:
                yield from self._hear(name, link, room, view)
        elif room.word[rank] == STALE:
            yield Move(f"P{rank} clears the word of {name}", room._replace(word=put(room.word, rank, CLEARED)), "P")
        elif room.word[rank] == CLEARED and not self.has("no-revival") and not room.held:
            text = f"a renewal of {name}'s lease arrives late, and P{rank} writes its id into the word again"
            yield Move(text, room._replace(word=put(room.word, rank, STALE)))

    def _end(self, text: str, rank: int, room: Room, due: str = "", wrong: str = "") -> Move:
        if self.has("clear-before-release"):
            ended = room._replace(word=put(room.word, rank, CLEARED))
            return Move(f"{text}: it clears the word", ended, due, wrong)
        ended = room._replace(word=put(room.word, rank, STALE), held=0)
        return Move(f"{text}: it lets go of the pages, and is yet to clear the word", ended, due, wrong)

    def _hear(self, name: str, link: int, room: Room, view: View) -> Iterator[Move]:
        reader, rank = self.links[link]
        named = sum(1 << other for other in self.of_source[rank])
        bit = 1 << link
        if not (room.said | view.late) & bit or (room.heard & bit and self.has("count-names")):
            return
        unheard = named & ~room.heard
        heard = room.heard | (unheard & -unheard if room.heard & bit else bit)
        text = f"P{rank} hears that D{reader} is through with {name}"
        if not room.said & bit:
            text += ", said of the attempt before"
        elif room.heard & bit:
            text += ", a second time"
        if heard & named == named or not self.has("all-readers"):
            ended = room._replace(heard=heard)
            yield self._end(text + ", the last that it waits for", rank, ended, wrong=self._robbed(name, rank, room))
        else:
            yield Move(text, room._replace(heard=heard))

    def _robbed(self, name: str, rank: int, room: Room) -> str:
        for link in self.of_source[rank]:
            if room.link[link][0] in (COPYING, FENCED_EARLY, FENCING) and not room.former >> link & 1:
                return (
                    f"{name}'s lease ended as read while D{self.links[link][0]} was reading: its pull fails, though "
                    "nobody died, gave up or was late"
                )
        return ""

    def _give_away(self, name: str, room: Room) -> Iterator[Move]:
        gone = room.word.count(CLEARED)
        if room.held and (gone == len(room.word) or (gone and not self.has("all-words"))):
            yield Move(f"P lets go of the pages of {name}", room._replace(held=0), "P")
        if not room.held or self.shape.by_content:
            kept = (1 << room.found) - 1 if room.held else room.listed if self.has("unlist-first") else 0
            for rank, intact in enumerate(room.intact):
                for page in bits(intact & ~kept):
                    text = f"page {page} of {name} is rewritten on P{rank}, for another request"
                    yield Move(text, room._replace(intact=put(room.intact, rank, intact & ~(1 << page))))

    # The readers.

    def _pull(self, name: str, size: int, reader: int, room: Room, view: View) -> Iterator[Move]:
        state, links = room.pull[reader], self.of_reader[reader]
        if state == IDLE and self.offered(room):
            free, whole = view.free_reader[reader], room.first <= max(0, view.head) or not self.has("no-hole")
            version = room.reader_new >> reader & 1
            same = room.told == version or not self.has("same-weights")
            room_for = view.may_take >> reader & 1 and free.bit_count() >= size and whole
            if room_for and (same or not self.has("sealed-version")):
                taken = self._with_links(room, links, COPYING)._replace(wants=room.wants | version << reader)
                pages = lowest(free, size)
                taken = taken._replace(pull=put(room.pull, reader, PULLING), pages=put(room.pages, reader, pages))
                text = f"D{reader} takes the offer of {name}, reserves pages {bits(pages)}, posts its READs"
                text += "" if same else ": its version was changed on its way"
                yield Move(text, taken)
                # The rule lets the reader refuse a changed table. The refusal of any offer is a separate move.
                if not self.has("named-by-source"):
                    text = f"{text}: its table was changed on its way, and names another request's page for page 0"
                    yield Move(text, taken._replace(forged=room.forged | 1 << reader))
            refused = room._replace(pull=put(room.pull, reader, CLOSED), said=room.said | self._mask(links))
            yield Move(f"D{reader} refuses {name}", refused, f"D{reader}")
        elif state == IDLE and room.found == UNASKED and UNSET not in room.word:
            closed = room._replace(pull=put(room.pull, reader, CLOSED))
            yield Move(f"D{reader} is told that P has nothing of {name}", closed)
        elif state == PULLING:
            yield from self._compute(name, size, reader, room)
            yield from self._commit(name, reader, room, view)
            if not view.back_committed:
                yield self._give_up(name, reader, room)
        elif state == COMMITTED and view.has_tail:
            kept = self._with_links(room, links, NONE)._replace(pull=put(room.pull, reader, KEPT))
            yield Move(f"D{reader} has published {name} and lets go of it", kept, f"D{reader}")
        elif state == KEPT and (view.tail not in (PULLING, COMMITTED) or not self.has("hold-the-head")):
            gone = room._replace(pull=put(room.pull, reader, CLOSED), pages=put(room.pages, reader, 0))
            wrong = f"hole: D{reader} serves what is behind {name}, and gives {name} away"
            text = f"D{reader} gives the pages of {name} to another request"
            yield Move(text, gone, wrong=wrong if view.tail == COMMITTED else "")
        elif state == COMMITTED:
            closed = self._with_links(room, links, NONE)._replace(pull=put(room.pull, reader, CLOSED))
            text = f"D{reader} has answered {name}, its pages are given back"
            yield Move(text, closed._replace(pages=put(room.pages, reader, 0)), f"D{reader}")

    def _compute(self, name: str, size: int, reader: int, room: Room) -> Iterator[Move]:
        """Yields the moves in which the reader computes the next page during the pull. Without the rule
        "found-when-committed", the reader may instead find the page in its cache before the page has arrived.
        """
        page, after = room.own, room._replace(own=room.own + 1)
        if not self.shape.ahead or page >= size:
            return
        yield Move(f"D{reader} computes page {page} of {name} itself", after)
        if not self.has("found-when-committed"):
            good = all(room.link[link][2] >> page & 1 for link in self.of_reader[reader])
            wrong = "" if good else f"stale page: D{reader} serves page {page} of {name}, which has not come"
            yield Move(f"D{reader} finds page {page} of {name}, which is on its way", after, wrong=wrong)

    def _mask(self, links: list[int]) -> int:
        return sum(1 << link for link in links)

    def _with_links(self, room: Room, links: list[int], state: int) -> Room:
        return room._replace(link=tuple((state, 0, 0) if i in links else link for i, link in enumerate(room.link)))

    def _commit(self, name: str, reader: int, room: Room, view: View) -> Iterator[Move]:
        states = {room.link[link][0] for link in self.of_reader[reader]}
        alone = view.has_front and not view.front_passed
        if alone and self.has("parts-in-order"):
            return
        if states == {PASSED} or (
            PASSED in states and states <= {PASSED, MISMATCHED} and not self.has("all-or-nothing")
        ):
            link = tuple(
                (NONE, 0, good) if self.links[i][0] == reader else (state, copied, good)
                for i, (state, copied, good) in enumerate(room.link)
            )
            done = room._replace(pull=put(room.pull, reader, COMMITTED), link=link)
            hole = alone or room.first > max(0, view.head)
            wrong = f"hole: D{reader} serves {name} without the pages before it" if hole else ""
            version = (room.wants if self.has("committed-as-taken") else room.reader_new) >> reader & 1
            if room.made != version:
                made = "both versions" if room.made == BOTH else f"version {room.made}"
                wrong = f"other weights: D{reader} serves {name} of {made} to requests of version {version}"
            yield Move(f"D{reader} commits {name}", done, f"D{reader}", wrong)

    def _give_up(self, name: str, reader: int, room: Room) -> Move:
        links = self.of_reader[reader]
        flying = [i for i in links if room.link[i][0] not in (PASSED, MISMATCHED)]
        failed = any(room.link[i][0] == MISMATCHED for i in links)
        cause = "finds another word than the id" if failed else "gives up (time-out, abort or lost peer)"
        due = f"D{reader}" if failed or self.has("reader-deadline") else ""
        left = self._with_links(self._with_links(room, links, NONE), flying, FLYING)
        left = left._replace(said=room.said | self._mask(links))
        if flying and self.has("quarantine"):
            text = f"D{reader} {cause}: {name} fails, its pages wait for what is in flight"
            return Move(text, left._replace(pull=put(room.pull, reader, GIVEN_UP)), due)
        left = left._replace(pull=put(room.pull, reader, CLOSED), pages=put(room.pages, reader, 0))
        if flying:
            left = left._replace(loose=put(room.loose, reader, room.pages[reader]))
        return Move(f"D{reader} {cause}: {name} fails, its pages are given back", left, due)

    # ---- the part of NIXL at a reader

    def _read(self, name: str, size: int, link: int, room: Room, view: View) -> Iterator[Move]:
        state = room.link[link][0]
        if state in (COPYING, FENCED_EARLY):
            yield from self._copy(name, size, link, room)
        if state == COPYING and not self.has("fence-after-data"):
            yield self._sample(name, link, room, view)
        elif state == FENCING:
            yield self._sample(name, link, room, view)
            if not self.has("newer-reads") and room.word[self.links[link][1]] == CLEARED:
                yield self._sampled(name, link, room, "an old word", matched=True)
        elif state == MATCHED:
            reader, rank = self.links[link]
            passed = self._to(room, link, PASSED)._replace(said=room.said | 1 << link)
            yield Move(f"D{reader} sees that the word of {name} matched; 'done' goes to P{rank} with it", passed)
        elif state == FLYING:
            yield from self._drain(name, link, room)

    def _to(self, room: Room, link: int, state: int) -> Room:
        return room._replace(link=put(room.link, link, (state, 0, room.link[link][2])))

    def _copy(self, name: str, size: int, link: int, room: Room) -> Iterator[Move]:
        reader, rank = self.links[link]
        state, copied, good = room.link[link]
        pages = bits(room.pages[reader])
        for page in range(size):
            bit = 1 << page
            if copied & bit:
                continue
            writes = None if self.has("writer-hold") else (reader, pages[page])
            right = room.intact[rank] & bit & ~(room.forged >> reader & 1)
            text = f"page {page} of {name} is copied from P{rank} to D{reader}, page {pages[page]}"
            text += "" if right else ": bytes of another request"
            yield Move(
                text, room._replace(link=put(room.link, link, (state, copied | bit, good | right))), writes=writes
            )
            if right and not self.has("whole-reads"):
                text = f"the READ of page {page} of {name} delivers half of it to D{reader}, and is called done"
                yield Move(text, room._replace(link=put(room.link, link, (state, copied | bit, good))))
        if copied == (1 << size) - 1:
            yield self._post_fence(name, link, room)
        elif self.shape.ahead and state == COPYING and (part := copied.bit_length()) == copied.bit_count() > 0:
            cut = room._replace(found=part) if self.has("prove-what-came") else room
            fence = self._post_fence(name, link, cut)
            yield fence._replace(text=f"the pull of {name} ends after {part} of its pages: {fence.text}")

    def _post_fence(self, name: str, link: int, room: Room) -> Move:
        reader, rank = self.links[link]
        if room.link[link][0] == FENCED_EARLY:
            return Move(f"D{reader} sees that the READs of {name} have ended", self._to(room, link, MATCHED))
        if not self.has("fence"):
            passed = self._to(room, link, PASSED)._replace(said=room.said | 1 << link)
            return Move(f"D{reader} sees that the READs of {name} have ended; 'done' went to P{rank} with them", passed)
        fencing = self._to(room, link, FENCING)
        if self.has("notify-with-fence"):
            return Move(f"D{reader} sees that the READs of {name} have ended, posts that of P{rank}'s word", fencing)
        text = f"D{reader} sees that the READs of {name} have ended, 'done' with them, posts that of P{rank}'s word"
        return Move(text, fencing._replace(said=room.said | 1 << link))

    def _sample(self, name: str, link: int, room: Room, view: View) -> Move:
        rank = self.links[link][1]
        stands = room.word[rank] in (STANDING, STALE)
        for words in (view.head_words, view.front_words):
            if words >= 0 and not self.has("own-word"):
                stands |= bool(words >> rank & 1)
        flag = bool(view.foreign >> rank & 1) and not self.has("fresh-ids")
        word = "its id" if stands else "the flag of another lease" if flag else "no such id"
        return self._sampled(name, link, room, word, matched=stands or flag)

    def _sampled(self, name: str, link: int, room: Room, word: str, *, matched: bool) -> Move:
        reader, rank = self.links[link]
        text = f"the word of {name} is read from P{rank} for D{reader}: {word}"
        if matched:
            state, copied, good = room.link[link]
            after = (FENCED_EARLY, copied, good) if state == COPYING else (MATCHED, 0, good)
            return Move(text, room._replace(link=put(room.link, link, after)))
        wrong = f"D{reader}'s pull of {name} fails, though its lease has not ended" if room.word[rank] == UNSET else ""
        return Move(text, room._replace(link=put(room.link, link, (MISMATCHED, 0, 0))), wrong=wrong)

    def _drain(self, name: str, link: int, room: Room) -> Iterator[Move]:
        reader = self.links[link][0]
        ended = room._replace(link=put(room.link, link, (NONE, 0, 0)))
        text = f"what D{reader} had in flight of {name} has ended, or its agent is destroyed"
        if all(ended.link[other][0] != FLYING for other in self.of_reader[reader]):
            ended = ended._replace(loose=put(room.loose, reader, 0))
            if room.pull[reader] == GIVEN_UP:
                ended = ended._replace(pull=put(room.pull, reader, CLOSED), pages=put(room.pages, reader, 0))
                text += ": its pages are given back"
        yield Move(text, ended, f"D{reader}")
        if room.pull[reader] == GIVEN_UP and not self.has("settled-ends"):
            closed = room._replace(pull=put(room.pull, reader, CLOSED), pages=put(room.pages, reader, 0))
            text = f"NIXL calls what D{reader} had in flight of {name} ended, and copies on: its pages are given back"
            yield Move(text, closed._replace(loose=put(room.loose, reader, room.pages[reader])))
        for page in bits(room.loose[reader]):
            text = f"the READ of {name} that D{reader} gave up writes to page {page}"
            yield Move(text, room, writes=(reader, page))

    # ---- events from outside of a room

    def crash_source(self, room: Room, rank: int) -> Room:
        """Returns the room after a rank of the source has died and restarted.

        The pages of the rank have other bytes, its lease words are empty, and its memory is lost.
        """
        if not room.held and room.word[rank] == UNSET:
            return room._replace(intact=put(room.intact, rank, 0), listed=0, coming=0)
        survives = room.word[rank] in (STANDING, STALE) and not self.has("mortal-words")
        word = put(room.word, rank, STALE if survives else CLEARED)
        held = 0 if all(state in (CLEARED, STALE) for state in word) else room.held
        return room._replace(word=word, intact=put(room.intact, rank, 0), held=held)

    def crash_reader(self, room: Room, reader: int) -> Room:
        """Returns the room after a reader has died and restarted: its pool is empty, no READ is in flight, and it knows
        no offer.
        """
        if room.pull[reader] == IDLE and not room.said:
            return room
        links = self.of_reader[reader]
        room = self._with_links(room, links, NONE)._replace(former=room.former | (room.said & self._mask(links)))
        return room._replace(
            pull=put(room.pull, reader, IDLE),
            pages=put(room.pages, reader, 0),
            loose=put(room.loose, reader, 0),
            forged=room.forged & ~(1 << reader),
            found=0 if self.shape.ahead else room.found,
            own=0,
            wants=room.wants & ~(1 << reader),
        )

    def spoil(self, room: Room, reader: int, page: int) -> Room:
        """Returns the room after a READ of another room has written to a page of a reader. If the page has a copy of
        this room, the copy is lost.
        """
        if not room.pages[reader] >> page & 1 or room.pull[reader] not in (PULLING, COMMITTED):
            return room
        bit = 1 << bits(room.pages[reader]).index(page)
        link = self.of_reader[reader][0]
        state, copied, good = room.link[link]
        if state in (COPYING, FENCED_EARLY) and not copied & bit:
            return room
        return room._replace(link=put(room.link, link, (state, copied, good & ~bit)))
