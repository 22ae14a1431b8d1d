"""Which prefill process has the head of a prompt cached, most likely: a guess from what each was asked for before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

CHUNK = 64
"""Tokens that are looked at as one: some pages. Two prompts that part within a chunk are taken to part before it."""
_MOST = 16_384  # chunks: a million tokens, more than a process of this size is likely to have cached


def chunks_of(tokens: Sequence[int], cache_salt: str | None) -> list[int]:
    """Names each whole chunk of a prompt, and all before it, by a number. Two may share one: this is for guesses."""
    chunks: list[int] = []
    before = hash(cache_salt)
    for start in range(0, len(tokens) - CHUNK + 1, CHUNK):
        before = hash((before, tuple(tokens[start : start + CHUNK])))
        chunks.append(before)
    return chunks


class AskedFor:
    """The chunks that one process was asked for last."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def tokens_of(self, chunks: Sequence[int]) -> int:
        """How many tokens of a prompt it was asked for before, from the first one on."""
        known = next((at for at, chunk in enumerate(chunks) if chunk not in self._chunks), len(chunks))
        return known * CHUNK

    def add(self, chunks: Sequence[int]) -> None:
        """It is asked for these. What was asked for longest ago is forgotten, the end of a prompt before its head."""
        for chunk in reversed(chunks):
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk)
        while len(self._chunks) > _MOST:
            self._chunks.popitem(last=False)

    def clear(self) -> None:
        """The process was restarted, perhaps: nothing is known of it."""
        self._chunks.clear()
