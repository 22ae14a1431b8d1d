"""Counters of the manager, read as one frozen value, and who counts."""

from __future__ import annotations

import msgspec
import numpy as np

from kvcache.replica.block_table import BlockRows, Ints, Rows, as_rows


class KVCacheMetrics(msgspec.Struct, frozen=True):
    """What a manager did since it was made or `reset_metrics`, over all replicas.

    Attributes:
        input_tokens: prompt tokens that ran, each counted once: not decode steps, not refused reservations.
        cache_tokens: prompt tokens that did not have to run, as their pages were found.
        h2d_blocks_copied: pages copied from the host tier.
        d2h_blocks_copied: pages copied to the host tier.
        evictions: published pages that were given away.
        d2d_blocks_copied: pages copied from one replica to another.
        file_blocks_written: pages written to the file tier.
        file_blocks_read: pages read from the file tier into the host tier.
        file_blocks_refused: pages of the file tier that were not read, for one of these reasons:
        file_blocks_gone: their file is deleted.
        file_blocks_unreadable: something else has the file's name, or the system fails to read it.
        file_blocks_cut: their file has another size than it had.
        file_blocks_foreign: the file has other pages in their place.
        file_blocks_corrupted: their checksums are others.
        files_refused: files that lay in the file tier's folder and were not taken up: broken, or of another kind.
    """

    input_tokens: int = 0
    cache_tokens: int = 0
    h2d_blocks_copied: int = 0
    d2h_blocks_copied: int = 0
    evictions: int = 0
    d2d_blocks_copied: int = 0
    file_blocks_written: int = 0
    file_blocks_read: int = 0
    file_blocks_refused: int = 0
    file_blocks_gone: int = 0
    file_blocks_unreadable: int = 0
    file_blocks_cut: int = 0
    file_blocks_foreign: int = 0
    file_blocks_corrupted: int = 0
    files_refused: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens in all."""
        return self.input_tokens + self.cache_tokens

    @property
    def cache_hit_rate(self) -> float:
        """Share of the prompt tokens that were found, 0.0 to 1.0."""
        return self.cache_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __add__(self, other: KVCacheMetrics) -> KVCacheMetrics:
        return KVCacheMetrics(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))

    def __sub__(self, other: KVCacheMetrics) -> KVCacheMetrics:
        return KVCacheMetrics(*(getattr(self, name) - getattr(other, name) for name in self.__struct_fields__))


class PromptCounter:
    """Counts each prompt token of a replica once: as found, or as run.

    Attributes:
        ran: prompt tokens that ran.
        found: prompt tokens that were found instead.
    """

    __slots__ = ("_open", "_rows", "found", "ran")

    def __init__(self, rows: BlockRows) -> None:
        self._rows = rows
        self._open: set[int] = set()  # rows whose prompt is not counted to its end: none of them in a decode step
        self.ran = 0
        self.found = 0

    def admit(self, row: int, known: int) -> None:
        """What a request knows when it is first reserved is its prompt."""
        if self._rows.prompt[row] < 0:
            self._rows.prompt[row] = known
            self._open.add(row)

    def hit(self, row: int, known: int, start: int, cached: int) -> None:
        """The tokens from `start` to `cached` of a request of `known` tokens do not have to run."""
        rows = self._rows
        prompt = known if rows.prompt[row] < 0 else int(rows.prompt[row])
        self.found += max(0, min(cached, prompt) - max(start, int(rows.counted[row])))
        rows.counted[row] = max(cached, int(rows.counted[row]))

    def run(self, rows: Rows, starts: Ints | int, ends: Ints) -> None:
        """The tokens from `starts` to `ends` of `rows` run, or ran."""
        if not self._open:
            return
        state = self._rows
        seen, prompts = np.maximum(state.counted[rows], starts), state.prompt[rows]
        self.ran += int(np.maximum(np.minimum(ends, prompts) - seen, 0).sum())
        state.counted[rows] = counted = np.maximum(seen, ends)
        self._open.difference_update(as_rows(rows)[counted >= prompts].tolist())

    def computed(self, rows: Rows, tokens: Ints) -> None:
        """The model has computed this many tokens of `rows`."""
        self._rows.cached[rows] = tokens
        self.run(rows, 0, tokens)

    def ran_elsewhere(self, row: int, tokens: int) -> None:
        """The first `tokens` tokens of the request were no prompt here."""
        self._rows.prompt[row] = self._rows.counted[row] = tokens
        self._open.discard(row)

    def forget(self, row: int) -> None:
        """The row was given back."""
        self._open.discard(row)
