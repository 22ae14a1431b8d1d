"""Makes the tables of metrics in `docs/guides/metrics.md`."""

from __future__ import annotations

from pathlib import Path

from kvcache.endpoints import prometheus as cache
from kvcache.endpoints.families import Family
from scheduler_adapters.front import prometheus as front
from scheduler_adapters.service import prometheus as service
from transfer import prometheus as transfer

PAGE = Path(__file__).parents[1] / "docs/guides/metrics.md"
FAMILIES: dict[str, tuple[Family, ...]] = {
    "`ManagerCollector` of `kvcache.endpoints.prometheus`": cache.FAMILIES,
    "`TransferCollector` of `transfer.prometheus`": (*transfer.FAMILIES, *transfer.OF_EXCHANGE),
    "`ServiceCollector` of `scheduler_adapters.service.prometheus`": service.FAMILIES,
    "`FrontCollector` of `scheduler_adapters.front.prometheus`": front.FAMILIES,
}


def table() -> str:
    """Returns the table of all metric families, in Markdown."""
    rows: list[str] = []
    for title, families in FAMILIES.items():
        rows += [f"\n{title}:\n", "| metric | type | labels | what it is |", "|---|---|---|---|"]
        rows += [
            f"| `{one.name}` | {one.kind} | {', '.join(f'`{label}`' for label in one.labels)} | {one.text} |"
            for one in families
        ]
    return "\n".join(rows)
