"""The names of the rules of the ownership protocol. For each rule, there is the smallest cast that shows the harm of
leaving the rule out.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.transfer.protocol_room import Shape


class Part(NamedTuple):
    """One attempt of one request: its name, its pages, the previous attempt (or -1), and the index of its lease word.
    With an earlier stretch, `pages` counts the pages of the whole prompt. This stretch then brings the pages that the
    earlier stretch has not brought.
    """

    name: str
    pages: int
    before: int = -1
    word: int = 0
    source: int = 0  # The source that has the word and the pages: P or Q.
    head: int = -1  # The index of the earlier stretch of the same prompt, or -1.
    front: int = -1  # The index of the front of the same import, or -1. Front and back are read at the same time.


class Cast(NamedTuple):
    """The processes of a search, and the number of processes that may die. No other number is limited."""

    title: str
    shape: Shape
    parts: tuple[Part, ...]
    crashes: int = 0


RULES = {
    "fence": "a pull counts only if the lease word, read from the source, still holds the lease's id",
    "fence-after-data": "the word is read when every READ of data has ended, not with them",
    "clear-before-release": "a lease ends by clearing its word; only then do its pages lose their holder",
    "all-words": "pages lose their holder when the words of all ranks of the source are cleared, not of one",
    "word-before-offer": "the id stands in the words of all ranks before the offer leaves the source",
    "fresh-ids": "the word holds a number that no other lease ever has, not a flag that says 'valid'",
    "mortal-words": "the word lives in the process whose pages it guards, and dies with it",
    "no-revival": "a renewal prolongs a lease that stands; it never sets a word again",
    "notify-with-fence": "'done' rides on the READ of the word, not on the READs of data",
    "all-readers": "a lease is read when every rank that it names has said so, not one",
    "count-names": "the source keeps who has said so, not how many messages came",
    "attempt-check": "a message of an earlier attempt does nothing to a later one",
    "writer-hold": "a page that a READ is to fill is nobody else's from the moment it is reserved",
    "quarantine": "after a time-out the pages wait until nothing of the pull is in flight",
    "all-or-nothing": "a pull commits when the words of all ranks that it read from held the id, or not at all",
    "source-deadline": "the source ends a lease at a deadline of its own",
    "reader-deadline": "the reader gives a pull up at a deadline of its own",
    "find-and-hold": "pages that are asked for by what they hold are held in the moment in which they are found",
    "unlist-first": "a page leaves the index before it is given to anybody else",
    "take-what-is-held": "a reader takes as many pages as the source says that it holds, not as many as it asked for",
    "list-when-there": "a page that a source brings from a lower tier is listed when it is there, not when it is begun",
    "no-hole": "a later stretch of a prompt is taken only where all pages before it are here",
    "hold-the-head": "what comes before a stretch is held from when that is taken",
    "named-by-source": "a page is read only if the source itself has named it for this lease",
    "own-word": "each stretch, and each part of an import, counts by the word of its own lease, on its own source",
    "parts-in-order": "a part of an import counts only if the part before it has passed",
    "found-when-committed": "a page that a pull is to fill is found by nobody before its import is committed",
    "prove-what-came": "a pull that ends early commits the pages that came before its fence, and no others",
    "same-weights": "a reader takes an offer only if its own version of the weights is the one that the offer names",
    "own-segment": "what a source computes across a switch has a name that no other request has",
    "asked-by-version": "a question by content finds only pages of the version that the reader has when it asks",
    "sealed-version": "a reader notices if the version in an offer was changed on its way",
    "committed-as-taken": "an import that outlives a switch is not found by requests of the new version",
    "switch-keeps-leases": "a switch ends no lease, and gives away no page that a lease holds",
}
ASSUMPTIONS = {
    "whole-reads": "a READ that ended well has delivered every byte, while the source lives and its pool is mapped",
    "settled-ends": "when NIXL says that a READ has ended, well or not, it writes nothing more",
    "newer-reads": "a READ posted after another has ended sees memory at least as new",
}


_A, _B = Part("A", 2, word=0), Part("B", 1, word=1)
_AGAIN = Part("A again", 2, before=0, word=2)
_STRETCHES = (Part("A's head", 1), Part("A's tail", 2, source=1, head=0))
_PARTS = (Part("A's front", 1), Part("A's back", 1, source=1, front=0))
_ELSEWHERE = (Part("A", 1), Part("A again", 1, before=0, source=1))
_ONE, _TWO = ((0,),), ((0,), (0,))

CASTS = {
    "full": (
        Cast("2 requests, 2 readers", Shape(1, _TWO, 3), (_A, _B), crashes=2),
        Cast("2 requests, 2 attempts each", Shape(1, _ONE, 3), (_A, _AGAIN, _B, Part("B again", 1, 2, 3)), crashes=2),
        Cast("2 attempts, 2 readers", Shape(1, _TWO, 3), (_A, _AGAIN), crashes=2),
        Cast("2 requests, 2 source ranks", Shape(2, ((0, 1),), 3), (_A, _B), crashes=0),
        Cast("2 attempts, 2 by 2 ranks", Shape(2, ((0, 1, 0, 1),), 3), (_A, _AGAIN), crashes=0),
        Cast("2 source ranks, 2 readers", Shape(2, ((0, 1), (0, 1)), 3), (_A,), crashes=2),
        Cast("one word for all leases", Shape(1, _ONE, 3), (_A, Part("A again", 2, 0), Part("B", 1)), crashes=2),
        Cast("2 requests by content", Shape(1, _ONE, 3, by_content=True, tiers=True), (_A, _B), crashes=2),
        Cast("by content, 2 source ranks", Shape(2, ((0, 1),), 3, by_content=True, tiers=True), (_A,), crashes=2),
        Cast("2 stretches, 2 sources", Shape(1, _ONE, 3, by_content=True), _STRETCHES, crashes=2),
        Cast("1 import, 2 sources", Shape(1, _ONE, 3), _PARTS, crashes=2),
        Cast("again from another source", Shape(1, _ONE, 1), _ELSEWHERE, crashes=2),
        Cast("no request waits", Shape(1, _ONE, 3, ahead=True), (_A, _B), crashes=2),
        Cast("switches, 2 attempts", Shape(1, _ONE, 3, weights=True), (_A, _AGAIN), crashes=2),
        Cast("switches, 2 readers", Shape(1, _TWO, 3, weights=True), (_A,), crashes=2),
        Cast("switches, 2 source ranks", Shape(2, ((0, 1),), 3, weights=True), (_A,), crashes=2),
        Cast("switches, by content", Shape(1, _ONE, 3, by_content=True, tiers=True, weights=True), (_A,), crashes=2),
    ),
    "small": (
        Cast("2 requests, 1 reader", Shape(1, _ONE, 3), (_A, _B), crashes=1),
        Cast("1 request, 2 readers", Shape(1, _TWO, 3), (_A,), crashes=1),
        Cast("2 attempts, 1 reader", Shape(1, _ONE, 3), (_A, _AGAIN), crashes=1),
        Cast("1 request, 2 source ranks", Shape(2, ((0, 1),), 3), (_A,), crashes=1),
        Cast("one word for all leases", Shape(1, _ONE, 3), (_A, Part("B", 1)), crashes=1),
        Cast("by content", Shape(1, _ONE, 3, by_content=True), (_A,), crashes=1),
        Cast("by content, lower tiers", Shape(1, _ONE, 3, by_content=True, tiers=True), (_A,), crashes=1),
        Cast("2 stretches, 2 sources", Shape(1, _ONE, 3, by_content=True), _STRETCHES, crashes=0),
        Cast("1 import, 2 sources", Shape(1, _ONE, 3), _PARTS, crashes=1),
        Cast("again from another source", Shape(1, _ONE, 1), _ELSEWHERE, crashes=1),
        Cast("no request waits", Shape(1, _ONE, 3, ahead=True), (_A,), crashes=1),
        Cast("switches of the weights", Shape(1, _ONE, 3, weights=True), (_A,), crashes=1),
        Cast("switches, by content", Shape(1, _ONE, 3, by_content=True, weights=True), (_A,), crashes=1),
    ),
}

_PAIR = Cast("1 request, 1 reader", Shape(1, _ONE, 3), (_A,))
_MORTAL = _PAIR._replace(crashes=1)
_READERS = Cast("1 request, 2 readers", Shape(1, _TWO, 3), (_A,))
_ATTEMPTS = Cast("2 attempts, 1 reader", Shape(1, _ONE, 4), (_A, _AGAIN))
_RANKS = Cast("1 request, 2 source ranks", Shape(2, ((0, 1),), 3), (_A,))
_REQUESTS = Cast("2 requests, 1 reader", Shape(1, _ONE, 3), (Part("A", 2, word=0), Part("B", 2, word=1)))
_ASKED = Cast("by content", Shape(1, _ONE, 3, by_content=True), (_A,))
_TIERS = Cast("by content, lower tiers", Shape(1, _ONE, 3, by_content=True, tiers=True), (_A,))
_PROMPT = Cast("2 stretches, 2 sources", Shape(1, _ONE, 3, by_content=True), _STRETCHES)
_IMPORT = Cast("1 import, 2 sources", Shape(1, _ONE, 3), _PARTS)
_AHEAD = Cast("no request waits", Shape(1, _ONE, 3, ahead=True), (_A,))
_WEIGHTS = Cast("switches of the weights", Shape(1, _ONE, 3, weights=True), (_A,))
_WEIGHTS_ASKED = Cast("switches, by content", Shape(1, _ONE, 3, by_content=True, weights=True), (_A,))
_WORD = Cast("2 requests, one word", Shape(1, _ONE, 3), (Part("A", 2), Part("B", 1)))

SHOWN_BY = dict.fromkeys((*RULES, *ASSUMPTIONS), _PAIR) | {
    "all-words": _RANKS,
    "fresh-ids": _WORD,
    "mortal-words": _MORTAL,
    "all-readers": _READERS,
    "count-names": _READERS,
    "attempt-check": _ATTEMPTS,
    "writer-hold": _REQUESTS,
    "quarantine": _REQUESTS,
    "settled-ends": _REQUESTS,
    "all-or-nothing": _RANKS,
    "find-and-hold": _ASKED,
    "unlist-first": _ASKED,
    "take-what-is-held": _ASKED,
    "list-when-there": _TIERS,
    "no-hole": _PROMPT,
    "hold-the-head": _PROMPT,
    "own-word": _PROMPT,
    "parts-in-order": _IMPORT,
    "found-when-committed": _AHEAD,
    "prove-what-came": _AHEAD,
    "same-weights": _WEIGHTS,
    "own-segment": _WEIGHTS,
    "asked-by-version": _WEIGHTS_ASKED,
    "sealed-version": _WEIGHTS,
    "committed-as-taken": _WEIGHTS,
    "switch-keeps-leases": _WEIGHTS,
}
"""The smallest cast in which the absence of a rule, or of an assumption, does harm."""
