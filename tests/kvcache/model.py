"""The manager as plain dicts: slow, obvious, and written from the contract, not from the code.

It knows no arrays, no hashes and no rows: a page's content is the tuple of all tokens up to its end. It decides which
reservations fit, what is hit and what is evicted; page ids themselves are the manager's own business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.kvcache.kv import Named

Content = tuple[object, ...]  # the salt, the keys and every token up to the end of the page


class ModelHost:
    """The host tier, shared by the replicas: contents, least recently used first, and those that a load holds."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.idle: list[Content] = []
        self.held: dict[Content, int] = {}  # how many loads
        self.loads: list[tuple[str, list[Content]]] = []  # of whom, in logical order
        self.stored = 0
        self.loaded = 0

    def has(self, content: Content) -> bool:
        return content in self.held or content in self.idle

    def store(self, contents: list[Content]) -> None:
        """Contents that were published together, in logical order."""
        absent = [content for content in contents if not self.has(content)]
        absent = absent[: self.num_slots - len(self.held)]
        room = self.num_slots - len(self.held) - len(absent)
        self.idle = self.idle[max(0, len(self.idle) - room) :]
        self.idle += reversed(absent)
        self.stored += len(absent)

    def hold(self, name: str, contents: list[Content]) -> None:
        for content in contents:
            if content in self.idle:
                self.idle.remove(content)
            self.held[content] = self.held.get(content, 0) + 1
        self.loads.append((name, contents))

    def drop(self, names: set[str], *, arrived: bool) -> None:
        """The loads of these requests are over."""
        mine = [load for load in self.loads if load[0] in names]
        self.loads = [load for load in self.loads if load[0] not in names]
        for _, contents in mine:
            self.loaded += len(contents) * arrived
            for content in reversed(contents):
                self.held[content] -= 1
                if not self.held[content]:
                    del self.held[content]
                    self.idle.append(content)

    def touch(self, contents: list[Content]) -> None:
        for content in reversed(contents):
            if content in self.idle:
                self.idle.remove(content)
                self.idle.append(content)


@dataclass
class Held:
    """A request's pages, each by a name of our own."""

    pages: list[int] = field(default_factory=list)
    committed: int = 0
    cached: int = 0
    leases: list[ModelLease] = field(default_factory=list)


@dataclass(eq=False)
class ModelLease:
    """The pages of a request that has left, and those that left it before; each part in logical order."""

    parts: list[list[int]] = field(default_factory=list)


class ModelReplica:
    def __init__(self, num_pages: int, page_size: int, host: ModelHost | None = None) -> None:
        self.host = host
        # Pages to be copied to the host, by the step that published them; and contents that were used, in between.
        self.waiting: list[list[int] | list[Content]] = []
        self.page_size = page_size
        self.num_pages = num_pages
        self.page_of: dict[Content, int] = {}
        self.content_of: dict[int, Content] = {}
        self.holders: dict[int, int] = {}  # pages somebody holds
        self.idle: list[int] = []  # published, held by nobody, least recently used first
        self.requests: dict[str, Held] = {}
        self.evictions = 0
        self.beside: dict[str, list[Content]] = {}  # by request, what it used beside its pages of the first table
        self._names = 0

    @property
    def free(self) -> int:
        return self.num_pages - len(self.holders)

    def room(self, name: str) -> int:
        """Tokens that the request's pages hold."""
        return len(self.requests[name].pages) * self.page_size

    def content(self, tokens: list[int], named: Named, page: int) -> Content:
        end = (page + 1) * self.page_size
        return (named[0], tuple(sorted(key for key in named[1] if key[0] < end)), *tokens[:end])

    def reserve(self, name: str, tokens: list[int], named: Named, start: int, active: int, steps: int) -> int | None:
        """The new start, or None where it does not fit. A request without pages has computed nothing."""
        held = self.requests[name]
        looks = active - start > 1 or not held.pages
        start = start if held.pages else 0
        needed = -(-(len(tokens) + steps - 1) // self.page_size)
        hits: list[int] = []
        if looks:
            if self.host:
                self.host.drop({name}, arrived=True)
            hits = self.found(name, tokens, named)
        first, end = held.committed, held.committed + len(hits)
        begin = max(end, start // self.page_size)
        restored = self.in_host(tokens, named, begin) if looks else []
        if hits or restored:
            most = self.most_pages(name, tokens, named, first, begin + len(restored) if restored else end)
            hits, restored = hits[: most - first], restored[: max(0, most - begin)]
            end = first + len(hits)
        cached = end if not restored else begin + len(restored)
        if cached * self.page_size <= start:
            hits, restored, end, cached = [], [], first, 0
        dropped = held.pages[first:end]
        fresh = max(0, needed - max(len(held.pages), end))
        available = self.free - sum(page not in self.holders for page in hits)
        read = [page for at, page in enumerate(dropped, first) if held.leases and at * self.page_size < held.cached]
        available += sum(self.holders[page] == 1 for page in dropped if page not in read)
        if fresh > available:
            return None
        if restored and self.host:
            self.host.hold(name, restored)
        start = max(start, cached * self.page_size)
        for page in hits:
            self._hold(page)
        self._keep(held, [page for at, page in enumerate(dropped, first) if at * self.page_size < held.cached])
        for page in reversed(dropped):
            self._drop(page)
        held.pages[first:end] = hits
        held.committed = end
        held.pages += [self._take() for _ in range(fresh)]
        return start

    def most_pages(self, name: str, tokens: list[int], named: Named, first: int, end: int) -> int:  # noqa: ARG002 - of states
        """Of the pages up to `end`, found from `first` on, how many the request can go on after."""
        return end

    def found(self, name: str, tokens: list[int], named: Named) -> list[int]:
        """The published pages that the request can go on with."""
        hits: list[int] = []
        for page in range(self.requests[name].committed, (len(tokens) - 1) // self.page_size):
            found = self.page_of.get(self.content(tokens, named, page))
            if found is None:
                break
            hits.append(found)
        return hits

    def in_host(self, tokens: list[int], named: Named, first: int) -> list[Content]:
        """The contents from page `first` on that the host has, without a gap."""
        found: list[Content] = []
        for page in range(first, (len(tokens) - 1) // self.page_size if self.host else 0):
            content = self.content(tokens, named, page)
            if not self.host or not self.host.has(content):
                break
            found.append(content)
        return found

    def step(self, name: str, tokens: list[int], named: Named, start: int) -> tuple[int, list[int]]:
        """Publish the full pages; returns how many are shared instead, and the pages that are published."""
        held = self.requests[name]
        told, held.cached = held.cached, start
        duplicates, new = [], []
        for page in range(held.committed, start // self.page_size):
            content, mine = self.content(tokens, named, page), held.pages[page]
            kept = self.page_of.setdefault(content, mine)
            if kept == mine:
                self.content_of[mine] = content
                new.append(mine)
            else:
                self._hold(kept)
                held.pages[page] = kept
                self._keep(held, [mine] if page * self.page_size < told else [])
                duplicates.append(mine)
            held.committed = page + 1
        for page in reversed(duplicates):
            self._drop(page)
        return len(duplicates), new

    def queue(self, pages: list[int]) -> None:
        """These pages were published together."""
        waiting = {page for step in self.waiting for page in step if isinstance(page, int)}
        if self.host and (pages := [page for page in pages if page not in waiting]):
            self.waiting.append(pages)

    def store(self, page: int | None = None) -> None:
        """Copy what waits to the host, step by step; with `page` only until that is copied."""
        while self.host and self.waiting and (page is None or any(page in step for step in self.waiting)):
            step = self.waiting.pop(0)
            if isinstance(step[0], int):
                self.host.store([self.content_of[waiting] for waiting in step])
            else:
                self.host.touch(step)
        while self.host and self.waiting and not isinstance(self.waiting[0][0], int):
            self.host.touch(self.waiting.pop(0))

    def fork(self, parent: str, child: str, computed: int, length: int) -> bool:
        full, needed = computed // self.page_size, -(-length // self.page_size)
        if needed - full > self.free:
            return False
        held, shared = self.requests[parent], self.requests[parent].pages[:full]
        for page in shared:
            self._hold(page)
        self.requests[child] = Held(
            shared + [self._take() for _ in range(needed - full)], min(full, held.committed), computed
        )
        return True

    def release(self, name: str) -> None:
        held = self.requests.pop(name)
        if self.host:
            self.host.drop({name}, arrived=False)
            used = [self.content_of[page] for page in held.pages[: held.committed]] + self.beside.pop(name, [])
            if used and self.waiting:
                self.waiting.append(used)
            else:
                self.host.touch(used)
        self._keep(held, held.pages[: max(held.committed, -(-held.cached // self.page_size))])
        for page in reversed(held.pages):
            self._drop(page)

    def lease(self, name: str) -> ModelLease:
        lease = ModelLease()
        self.requests[name].leases.append(lease)
        return lease

    def end_lease(self, lease: ModelLease) -> None:
        for held in self.requests.values():
            held.leases = [other for other in held.leases if other is not lease]
        for pages in lease.parts:
            for page in reversed(pages):
                self._drop(page)
        lease.parts.clear()

    def _keep(self, held: Held, pages: list[int]) -> None:
        """These pages leave the request: its leases hold them."""
        for lease in held.leases if pages else []:
            for page in pages:
                self._hold(page)
            lease.parts.append(pages)

    def reset(self) -> None:
        for page in self.idle:
            del self.page_of[self.content_of.pop(page)]
        self.idle.clear()
        self.waiting.clear()

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
            self._evict(self.idle.pop(0))
        self._names += 1
        self.holders[self._names] = 1
        return self._names

    def _evict(self, victim: int) -> None:
        self.store(victim)
        del self.page_of[self.content_of.pop(victim)]
        self.evictions += 1
