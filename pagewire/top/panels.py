"""Turns each `Look`, a snapshot of a manager, into rows of text for the tables of `pagewire top`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvcache.watch.messages import Look, PageState
from pagewire.top.view import TopView, WatchedProcess

TableRows = list[tuple[str, ...]]
_MOST_ROWS = 200
_LONGEST_ID, _HEAD, _TAIL = 20, 11, 8
_BARS = "▁▂▃▄▅▆▇█"


def _looks(view: TopView) -> Iterator[tuple[WatchedProcess, Look]]:
    for process in view.processes.values():
        if process.followed.look is not None and view.filter.process in process.name:
            yield process, process.followed.look


def requests(view: TopView) -> TableRows:
    """Returns a row for each request, the request with the most pages first."""
    found: list[tuple[int, tuple[str, ...]]] = []
    for process, look in _looks(view):
        own = look.owners
        columns = zip(
            own.request_ids, own.tenants, own.phases, own.pools, own.pages, own.tokens, own.prompts, strict=True
        )
        for name, tenant, phase, pool, pages, tokens, prompt in columns:
            if view.filter.has_owner(name, tenant) and view.filter.replica in ("", pool):
                shown = f"{tokens:,}" + (f" of {prompt:,}" if tokens < prompt else "")
                where = f"{process.name}/{pool}" if pool else process.name
                found.append((pages, (name, tenant, phase, where, f"{pages:,}", shown)))
    return [row for _, row in sorted(found, key=lambda one: -one[0])[:_MOST_ROWS]]


def phases(view: TopView) -> str:
    """Returns the number of requests in each phase, for each process."""
    parts: list[str] = []
    for process, look in _looks(view):
        counts = Counter(look.owners.phases)
        told = " ".join(f"{phase} {count}" for phase, count in sorted(counts.items()))
        parts.append(f"{process.name}: {told or 'no requests'}")
    return "   ".join(parts)


def totals(view: TopView) -> str:
    """Returns one line about all processes: held pages, hit rate, pulled bytes per second, and waiting requests."""
    held = pages = cached = prompt = waiting = 0
    pulled = 0.0
    for process, look in _looks(view):
        for pool in look.pools:
            pages += pool.num_pages
            held += sum(pool.counts[state] for state in PageState if state >= PageState.HELD)
        cached += int(look.figures.get("cache_tokens", 0))
        prompt += int(look.figures.get("cache_tokens", 0) + look.figures.get("input_tokens", 0))
        pulled += (process.rates("bytes_pulled") or [0.0])[-1]
        waiting += _waiting(look)
    rate = f"{cached / prompt:.1%}" if prompt else "none yet"
    share = f" ({held / pages:.1%})" if pages else ""
    return (
        f"held {held:,} of {pages:,} pages{share}   hit rate {rate}   pulls {_giga(pulled)} GB/s   waiting {waiting:,}"
    )


def _waiting(look: Look) -> int:
    return sum(phase in ("waiting", "queued", "asked") for phase in look.owners.phases)


def short_ids(names: Sequence[str]) -> list[str]:
    """Shortens ids for the screen by leaving out the middle of a long id.

    If two ids would then look the same, both keep their full length.
    """
    cut = [name if len(name) <= _LONGEST_ID else f"{name[:_HEAD]}…{name[-_TAIL:]}" for name in names]
    alike = Counter(dict(zip(names, cut, strict=True)).values())
    return [short if alike[short] == 1 else name for name, short in zip(names, cut, strict=True)]


def transfers(view: TopView) -> TableRows:
    """Returns the leases and the pulls in flight, nearest deadline first."""
    found: list[tuple[float, tuple[str, ...]]] = []
    for process, look in _looks(view):
        pages = dict(zip(look.owners.request_ids, look.owners.pages, strict=True))
        for one in look.leases:
            if view.filter.has_owner(one.request_id, "") and view.filter.replica in ("", one.pool):
                size = f"{pages.get(one.request_id, 0) * look.page_bytes:,}"
                left = "runs" if one.left_s is None else f"{one.left_s:.1f}"
                row = ("lease", one.request_id, f"{process.name}/{one.pool}", one.heard, f"{one.age_s:.1f}", left, size)
                found.append((1e9 if one.left_s is None else one.left_s, row))
        for one in look.pulls:
            if view.filter.has_owner(one.key, "") and view.filter.replica in ("", one.pool):
                age = "" if one.age_s is None else f"{one.age_s:.1f}"
                what = f"{one.stage} from {one.source}"
                row = ("pull", one.key, f"{process.name}/{one.pool}", what, age, f"{one.left_s:.1f}")
                found.append((one.left_s, (*row, f"{one.num_bytes:,}")))
    return [row for _, row in sorted(found, key=lambda one: one[0])[:_MOST_ROWS]]


def tree(view: TopView) -> TableRows:
    """Returns the prefix tree: rows of shared prefixes, each below the prefix that it continues."""
    found: TableRows = []
    for process, look in _looks(view):
        below: dict[tuple[str, int], list[int]] = {}
        parts = [one for one in look.tree if view.filter.replica in ("", one.pool)]
        known = {(one.pool, one.page) for one in parts}
        for at, one in enumerate(parts):
            below.setdefault((one.pool, one.parent if (one.pool, one.parent) in known else 0), []).append(at)
        pending = [(at, 0) for key, each in below.items() if key[1] == 0 for at in each][::-1]
        while pending:
            at, depth = pending.pop()
            one = parts[at]
            share = f"{one.below * look.page_size:,}"
            label = f"{'  ' * depth}{'└ ' if depth else ''}page {one.page}"
            found.append(
                (label, f"{process.name}/{one.pool}", f"{one.pages:,}", f"{one.below:,}", share, f"{one.hits:,}")
            )
            pending += [(further, depth + 1) for further in below.get((one.pool, one.page), ())[::-1]]
    return found[:_MOST_ROWS]


def evictions(view: TopView) -> TableRows:
    """Returns the number and cost of evictions by reason, followed by the latest evictions."""
    found: list[tuple[float, tuple[str, ...]]] = []
    sums: TableRows = []
    for process, look in _looks(view):
        for reason, (pages, again) in sorted(look.evicted.items()):
            cost = f"{again * look.page_size:,} tokens recomputed"
            sums.append(("all", f"{process.name}", reason, f"{pages:,}", f"{again:,}", cost))
        for one in look.evictions:
            if view.filter.replica in ("", one.pool):
                cost = f"{one.again * look.page_size:,}" if one.again else ""
                row = (f"{one.age_s:.1f} s ago", f"{process.name}/{one.pool}", one.reason, f"{one.pages:,}")
                found.append((one.age_s, (*row, f"{one.again:,}", cost)))
    return sums + [row for _, row in sorted(found, key=lambda one: one[0])[:_MOST_ROWS]]


def rates(view: TopView) -> TableRows:
    """Returns each process's rates, now and over time: hits, tokens, pulled bytes, evictions, and the queue."""
    found: TableRows = []
    for process, look in _looks(view):
        ran, cached = process.rates("input_tokens"), process.rates("cache_tokens")
        hits = [c / (r + c) if r + c else 0.0 for r, c in zip(ran, cached, strict=True)]
        totals = look.figures
        all_tokens = totals.get("input_tokens", 0) + totals.get("cache_tokens", 0)
        rate = totals.get("cache_tokens", 0) / all_tokens if all_tokens else 0.0
        lines: list[tuple[str, str, list[float], Callable[[float], str]]] = [
            ("hit rate", f"{rate:.1%} in all", hits, lambda value: f"{value:.1%}"),
            ("prompt tokens/s", f"{all_tokens:,.0f} in all", list(map(sum, zip(ran, cached, strict=True))), _short),
            ("pulled GB/s", f"{totals.get('bytes_pulled', 0) / 1e9:,.3f} GB", process.rates("bytes_pulled"), _giga),
            ("evictions/s", f"{totals.get('evictions', 0):,.0f} in all", process.rates("evictions"), _short),
        ]
        for name, in_all, values, form in lines:
            found.append((process.name, name, form(values[-1] if values else 0.0), in_all, _bars(values)))
        found.append((process.name, "queue", f"{_waiting(look)}", "", ""))
        for name, value in totals.items():
            if name.startswith("optimum"):  # only a replay reports an optimum
                found.append((process.name, name.replace("_", " "), f"{value:.1%}", "", ""))
        found.append((process.name, "cost of a snapshot", f"{look.cost_s * 1e3:.1f} ms", "", ""))
    return found


def processes(view: TopView) -> TableRows:
    """Returns a row for each process: whether it answers, its pages by state, and the result of its last check."""
    found: TableRows = []
    for process in view.processes.values():
        look = process.followed.look
        since = view.now - process.heard_at
        state = (
            "never heard" if not process.heard_at else f"GONE for {since:.0f} s" if view.is_gone(process) else "there"
        )
        if look is None:
            found.append((process.name, process.error or state, "", "", "", ""))
            continue
        for pool in look.pools:
            counts = " ".join(
                f"{state.name.lower()} {pool.counts[state]:,}" for state in PageState if pool.counts[state]
            )
            counts += f" (of older weights {pool.older:,})" if pool.older else ""
            found.append((process.name, state, pool.name, f"{pool.num_pages:,}", counts, recount(look)))
    return found


def recount(look: Look) -> str:
    """Returns the result of the last `check`."""
    check = look.check
    if check is None:
        return "no recount yet"
    return f"{check.error or 'all counts agree'}, {check.age_s:.0f} s ago, in {check.seconds * 1e3:.0f} ms"


def _bars(values: list[float]) -> str:
    last = values[-40:]
    top = max(last, default=0.0)
    return "".join(_BARS[int(value / top * (len(_BARS) - 1))] for value in last) if top else ""


def _short(value: float) -> str:
    return f"{value:,.0f}"


def _giga(value: float) -> str:
    return f"{value / 1e9:.3f}"


HEADINGS: dict[str, tuple[Callable[[TopView], TableRows], tuple[str, ...]]] = {
    "requests": (requests, ("request", "tenant", "phase", "where", "pages", "tokens")),
    "transfers": (transfers, ("what", "request", "where", "state", "age s", "left s", "bytes")),
    "tree": (tree, ("prefix", "where", "pages", "with below", "tokens", "hits")),
    "evictions": (evictions, ("when", "where", "reason", "pages", "asked again", "recomputed")),
    "rates": (rates, ("process", "rate", "now", "in all", "last looks")),
    "processes": (processes, ("process", "state", "pool", "pages", "by state", "last recount")),
}
"""For each panel: the function that builds its rows, and the headings of its columns."""
