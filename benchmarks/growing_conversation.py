"""What does a conversation's next turn cost, as the conversation grows?

A turn adds 256 tokens, or 16 pages. With `kept` the same context continues, as in an open session. With `hasher kept`,
a new request's context takes over the previous page hashes. With `new`, a new request takes over nothing, as over HTTP.
All of its tokens must be hashed again, because only their hashes show which pages are cached. In these three cases the
context exists already, and only the reservation is timed. `new, from a list` is like `new`, but starts from a
tokenizer's list of integers, so it also includes making and claiming the context.
"""

from __future__ import annotations

import numpy as np

from benchmarks.frame import Row, options, pin, report, samples, summary
from benchmarks.pools import LONGEST, Prompts, claimed, compute, expect, manager_of, reserve
from kvcache import PagedKVCacheManager, TextContext

TURN = 256
PAGE = 16


class Conversation:
    """A conversation of `length` tokens, all computed and published, and its next turn."""

    def __init__(self, length: int, algorithm: str) -> None:
        self.manager: PagedKVCacheManager = manager_of(1 << 15, algorithm=algorithm)
        self.prompts = Prompts()
        self.history = self.prompts.tokens(length)
        self.context = self.started()

    def started(self) -> TextContext:
        """Returns a request that has run the whole history."""
        context = claimed(self.manager, self.history)
        reserve(self.manager, context)
        compute(self.manager, context)
        return context

    def kept(self) -> TextContext:
        """Returns the same context, `TURN` tokens longer."""
        self.manager.release(self.context.request_id)
        self.context = self.started()
        reserve(self.manager, self.context)  # reserves a page for the model's token, as a decode step does
        context, end = self.context, self.context.end_idx
        context.append(self.prompts.tokens(TURN), context.start_idx, end + TURN)
        return context

    def next_request(self) -> TextContext:
        """Returns a new request with the history and `TURN` more tokens."""
        self.manager.release(self.context.request_id)
        self.context = claimed(self.manager, np.concatenate((self.history, self.prompts.tokens(TURN))))
        return self.context

    def next_list(self) -> list[int]:
        """Returns the tokens of the history and `TURN` more tokens, as a list for a new request."""
        self.manager.release(self.context.request_id)
        return np.concatenate((self.history, self.prompts.tokens(TURN))).tolist()

    def reserve_list(self, tokens: list[int]) -> None:
        """Creates a request from a list of tokens, claims it, and reserves its pages."""
        self.context = claimed(self.manager, tokens)
        reserve(self.manager, self.context)

    def with_hasher(self) -> TextContext:
        """Like `next_request`, but with the hasher of a request that has run the history."""
        before = claimed(self.manager, self.history)
        reserve(self.manager, before)
        self.manager.release(before.request_id)
        context = self.next_request()
        context.prefix_hasher = before.prefix_hasher
        return context


def measure(length: int, algorithm: str, repeats: int) -> list[Row]:
    """The rows for one length."""
    rows: list[Row] = []
    for case in ("kept", "hasher kept", "new", "new, from a list"):
        talk = Conversation(length, algorithm)
        from_context = {"kept": talk.kept, "hasher kept": talk.with_hasher, "new": talk.next_request}
        if case in from_context:
            times = samples(repeats, from_context[case], talk.manager.maybe_reserve)
        else:
            times = samples(repeats, talk.next_list, talk.reserve_list)
        hit = length // PAGE * PAGE
        expect(talk.context.start_idx == hit, f"the {length} tokens of before are cached")
        expect(len(talk.manager.get_req_blocks(talk.context.request_id)) >= (length + TURN) // PAGE, "pages are there")
        rows.append({"conversation": length, "hash": algorithm, "context": case, **summary(times)})
    return rows


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    pin()
    lengths = (1024, 32_768) if chosen.quick else (1024, 4096, 16_384, 32_768, 65_536, 120_000)
    repeats = 20 if chosen.quick else 60
    expect(max(lengths) + 2 * TURN < LONGEST, "the longest conversation fits")
    rows = [row for algorithm in ("sha256", "xxh3_128") for at in lengths for row in measure(at, algorithm, repeats)]
    report("growing_conversation", rows, chosen)


if __name__ == "__main__":
    main()
