"""The manager as plain dicts: slow, obvious, and written from the contract, not from the code.

It knows no arrays, no hashes and no rows: a page's content is the tuple of all tokens up to its end. It decides which
reservations fit, what is hit and what is evicted; page ids themselves are the manager's own business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Content = tuple[object, ...]  # the salt, then every token up to the end of the page


@dataclass
class Held:
    """A request's pages, each by a name of our own."""

    pages: list[int] = field(default_factory=list)
    committed: int = 0


class ModelReplica:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.page_of: dict[Content, int] = {}
        self.content_of: dict[int, Content] = {}
        self.holders: dict[int, int] = {}  # pages somebody holds
        self.idle: list[int] = []  # published, held by nobody, least recently used first
        self.requests: dict[str, Held] = {}
        self.evictions = 0
        self._names = 0

    @property
    def free(self) -> int:
        return self.num_pages - len(self.holders)

    def content(self, tokens: list[int], salt: str | None, page: int) -> Content:
        return (salt, *tokens[: (page + 1) * self.page_size])

    def reserve(
        self, name: str, tokens: list[int], salt: str | None, start: int, active: int, steps: int
    ) -> int | None:
        """The new start, or None where it does not fit."""
        held = self.requests[name]
        needed = -(-(len(tokens) + steps - 1) // self.page_size)
        hits: list[int] = []
        if active - start > 1:
            for page in range(held.committed, (len(tokens) - 1) // self.page_size):
                found = self.page_of.get(self.content(tokens, salt, page))
                if found is None:
                    break
                hits.append(found)
        if (held.committed + len(hits)) * self.page_size <= start:
            hits = []
        first, end = held.committed, held.committed + len(hits)
        dropped = held.pages[first:end]
        fresh = max(0, needed - max(len(held.pages), end))
        available = self.free - sum(page not in self.holders for page in hits)
        available += sum(self.holders[page] == 1 for page in dropped)
        if fresh > available:
            return None
        if hits or (end * self.page_size > start and active - start > 1):
            start = max(start, end * self.page_size)
        for page in hits:
            self._hold(page)
        for page in reversed(dropped):
            self._drop(page)
        held.pages[first:end] = hits
        held.committed = end
        held.pages += [self._take() for _ in range(fresh)]
        return start

    def step(self, name: str, tokens: list[int], salt: str | None, start: int) -> int:
        """Publish the full pages; returns how many are shared instead."""
        held = self.requests[name]
        duplicates = []
        for page in range(held.committed, start // self.page_size):
            content, mine = self.content(tokens, salt, page), held.pages[page]
            kept = self.page_of.setdefault(content, mine)
            if kept == mine:
                self.content_of[mine] = content
            else:
                self._hold(kept)
                held.pages[page] = kept
                duplicates.append(mine)
            held.committed = page + 1
        for page in reversed(duplicates):
            self._drop(page)
        return len(duplicates)

    def fork(self, parent: str, child: str, computed: int, length: int) -> bool:
        full, needed = computed // self.page_size, -(-length // self.page_size)
        if needed - full > self.free:
            return False
        held, shared = self.requests[parent], self.requests[parent].pages[:full]
        for page in shared:
            self._hold(page)
        self.requests[child] = Held(shared + [self._take() for _ in range(needed - full)], min(full, held.committed))
        return True

    def release(self, name: str) -> None:
        for page in reversed(self.requests.pop(name).pages):
            self._drop(page)

    def reset(self) -> None:
        for page in self.idle:
            del self.page_of[self.content_of.pop(page)]
        self.idle.clear()

    def _hold(self, page: int) -> None:
        if page not in self.holders:
            self.idle.remove(page)
            self.holders[page] = 0
        self.holders[page] += 1

    def _drop(self, page: int) -> None:
        self.holders[page] -= 1
        if not self.holders[page]:
            del self.holders[page]
            if page in self.content_of:
                self.idle.append(page)

    def _take(self) -> int:
        if len(self.holders) + len(self.idle) == self.num_pages:  # no page without content is left
            victim = self.idle.pop(0)
            del self.page_of[self.content_of.pop(victim)]
            self.evictions += 1
        self._names += 1
        self.holders[self._names] = 1
        return self._names
