"""`TopView`: everything that `pagewire top` shows, without the drawing: processes, filter, pool, zoom, and rates."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvcache.endpoints.follower import Followed
from kvcache.errors import WatchError
from kvcache.watch.messages import Cells, Look, PageState, PoolLook, ages_of, owners_of, request_digest, states_of
from pagewire.top.pagemap import Span, span_of
from pagewire.top.sources import Heard

_SILENT_S = 3.0  # in seconds: a process counts as gone if it has been silent for this time
ANSWER_S = 5.0  # in seconds: how long an address may take to answer for the first time
_KEPT = 240  # number of snapshots from which rates are computed
_MOST_ZOOM = 24


@dataclass(slots=True)
class WatchedProcess:
    """One process, as of its latest snapshot."""

    address: str
    followed: Followed = field(default_factory=Followed)
    heard_at: float = 0.0  # 0: never
    error: str = ""
    # The time of each snapshot, and the process's totals at that time.
    totals: deque[tuple[float, dict[str, float]]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    @property
    def name(self) -> str:
        """The process's name. Before its first snapshot, its address."""
        return self.followed.look.name if self.followed.look else self.address

    def take(self, heard: Heard) -> None:
        """Applies a snapshot.

        A snapshot may contain only the changes since an earlier snapshot. If the earlier snapshot was not received, the
        new snapshot is dropped, and the next query asks for the whole state.
        """
        self.heard_at = heard.at
        try:
            look = self.followed.apply(heard.frames)
        except WatchError as error:
            self.error, self.followed = str(error), Followed()
            return
        self.error = ""
        if self.totals and self.totals[-1][1].get("prompt_tokens", 0) > look.figures.get("prompt_tokens", 0):
            self.totals.clear()  # the process has restarted
        if not self.totals or look.at > self.totals[-1][0]:
            self.totals.append((look.at, look.figures))

    def rates(self, name: str) -> list[float]:
        """Returns the growth per second of a total, for each snapshot except the first."""
        pairs = zip(self.totals, list(self.totals)[1:], strict=False)
        return [
            max(0.0, now.get(name, 0) - was.get(name, 0)) / max(1e-3, at - then) for (then, was), (at, now) in pairs
        ]


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects the requests, tenants, replicas and processes to show; an empty string selects all.

    A string matches every request, tenant or process whose name contains it, but only the replica with exactly this
    name.
    """

    request: str = ""
    tenant: str = ""
    replica: str = ""
    process: str = ""

    @classmethod
    def parse(cls, text: str) -> Filter:
        """Parses `tenant=a replica=0 process=decode chat-1`. A word without `=` filters requests.

        Raises `WatchError` for an unknown name.
        """
        found: dict[str, str] = {}
        for word in text.split():
            name, equals, value = word.partition("=")
            if equals and name not in cls.__slots__:
                raise WatchError(f"{name!r} is not a filter; the filters are {', '.join(cls.__slots__)}")
            found[name if equals else "request"] = value if equals else word
        return cls(**found)

    def has_owner(self, request_id: str, tenant: str) -> bool:
        """Whether a request is shown."""
        is_asked = self.request in request_id
        # An id that begins with # is a digest: the process does not reveal ids to this viewer. The user may know the
        # id, and can then filter by it in full.
        if not is_asked and request_id.startswith("#"):
            is_asked = request_id == request_digest(self.request)
        return is_asked and self.tenant in tenant

    def has_pool(self, process: str, pool: str) -> bool:
        """Whether a pool is shown."""
        return self.process in process and self.replica in ("", pool)


def nobody_answers(addresses: list[str]) -> str:
    """Returns the message to show if no process answers at these addresses. It lists what to check."""
    return (
        f"no process answers at {', '.join(addresses)}. Check that the process runs and is watched (`pagewire serve "
        "--watch` logs the addresses), and that the keys are the fleet's (--secret or --keyring)"
    )


class TopView:
    """The state that `pagewire top` draws."""

    def __init__(self, addresses: list[str], *, light: bool = False) -> None:
        self.light = light
        self.processes = {address: WatchedProcess(address) for address in addresses}
        self.filter = Filter()
        self.paused = False
        self.pool = ""  # the selected pool, as `address/pool`; empty for all
        self.zoom = 0
        self.centre = 0.5  # centre of the view, as a share of the pool
        self.began = time.monotonic()
        self.now = 0.0

    @property
    def followed(self) -> dict[str, Followed]:
        """What is known of the process at each address."""
        return {address: process.followed for address, process in self.processes.items()}

    def take(self, heard: list[Heard], now: float | None = None) -> None:
        """Applies snapshots that have arrived."""
        for one in heard:
            self.processes.setdefault(one.address, WatchedProcess(one.address)).take(one)
        self.now = time.time() if now is None else now

    def forget(self) -> None:
        """Forgets all snapshots, because a recording moves back."""
        self.processes = {address: WatchedProcess(address) for address in self.processes}

    def is_gone(self, process: WatchedProcess) -> bool:
        """Whether a process has been silent for so long that it counts as gone."""
        return self.now - process.heard_at > _SILENT_S

    def unanswered(self) -> list[str]:
        """Returns the addresses that have never answered. Empty during the first seconds."""
        if time.monotonic() - self.began < ANSWER_S:
            return []
        return [address for address, process in self.processes.items() if not process.heard_at]

    # ---- pools

    def pools(self) -> list[tuple[str, WatchedProcess, PoolLook, Cells]]:
        """Returns the pools that pass the filter, each with its key, process and cells."""
        return [
            (f"{process.address}/{pool.name}", process, pool, process.followed.cells[pool.name])
            for process in self.processes.values()
            if process.followed.look is not None
            for pool in process.followed.look.pools
            if self.filter.has_pool(process.name, pool.name)
        ]

    def shown(self) -> list[tuple[str, WatchedProcess, PoolLook, Cells]]:
        """Returns the pools on the screen: the selected one, or all."""
        every = self.pools()
        return [one for one in every if one[0] == self.pool] or every

    def next_pool(self, step: int = 1) -> None:
        """Moves the selection on by `step` pools. After the last pool, all pools are selected."""
        keys = ["", *(key for key, *_ in self.pools())]
        at = keys.index(self.pool) if self.pool in keys else 0
        self.pool, self.zoom, self.centre = keys[(at + step) % len(keys)], 0, 0.5

    def zoom_by(self, step: int) -> None:
        """Zooms in or out. Zooming in on several pools selects the first of them."""
        if step > 0 and not self.pool and (pools := self.pools()):
            self.pool = pools[0][0]
        self.zoom = min(_MOST_ZOOM, max(0, self.zoom + step))

    def pan(self, share: float) -> None:
        """Moves the view along the pool. `share` is the distance as a fraction of the visible part."""
        half = 0.5 / 2**self.zoom
        self.centre = min(1 - half, max(half, self.centre + share / 2**self.zoom))

    def span(self, pool: PoolLook, squares: int) -> Span:
        """Returns the pages of a pool that a map with `squares` squares shows."""
        return span_of(pool.num_pages, squares, self.zoom, self.centre)

    def lit(self, process: WatchedProcess, pool: str) -> NDArray[np.bool_] | None:
        """Returns a bool array: whether the filter shows the pages of each owner, by owner number.

        Returns None if requests and tenants are not filtered.
        """
        look = process.followed.look
        if look is None or not (self.filter.request or self.filter.tenant):
            return None
        owners = look.owners
        lit = np.zeros(max(map(int, owners_of(process.followed.cells[pool]).max(keepdims=True))) + 1, np.bool_)
        columns = zip(owners.numbers, owners.request_ids, owners.tenants, owners.pools, strict=True)
        for number, request_id, tenant, where in columns:
            if where == pool and 0 < number < len(lit) and self.filter.has_owner(request_id, tenant):
                lit[number] = True
        return lit

    def told(self, process: WatchedProcess, pool: PoolLook, first: int, count: int) -> str:
        """Describes some pages: how many are in each state, who owns them, and how soon the idle ones are evicted."""
        cells = process.followed.cells[pool.name][first : first + count]
        states = np.bincount(states_of(cells), minlength=len(PageState))
        parts = [f"{states[state]:,} {state.name.lower()}" for state in PageState if states[state]]
        idle = ages_of(cells[states_of(cells) == PageState.IDLE])
        if idle.size:
            parts.append(f"eviction order {idle.min() + 1}–{idle.max() + 1} of 8")
        if names := self._names(process.followed.look, pool.name, cells):
            parts.append("of " + ", ".join(names))
        pages = f"page {first}" if count == 1 else f"pages {first:,}–{first + len(cells) - 1:,}"
        return f"{process.name}/{pool.name} {pages}: " + ", ".join(parts)

    def _names(self, look: Look | None, pool: str, cells: Cells) -> list[str]:
        """Returns the requests that own most of the pages in `cells`, at most five of them."""
        if look is None:
            return []
        owners = look.owners
        of_number = {
            number: name
            for number, name, where in zip(owners.numbers, owners.request_ids, owners.pools, strict=True)
            if where == pool and number
        }
        numbers, counts = np.unique(owners_of(cells), return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return [of_number[number] for number in numbers[order].tolist() if number in of_number][:5]
