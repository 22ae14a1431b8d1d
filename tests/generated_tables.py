"""Writes the tables of `docs/` that are generated from the code or measured: `python -m tests.generated_tables`.

A table stands between two comments, the first of which names it. The pages are committed with their tables, so that
they are complete outside the site too. `tests/test_docs.py` compares them with the code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from tests import deploy_page, metrics_page, vllm_features
from tests.scheduler_adapters.front import routers

PAGES = (
    deploy_page.PAGE,
    metrics_page.PAGE,
    *(deploy_page.ROOT / "docs" / page for page in ("guides/routers.md", "engines/vllm.md")),
)
TABLES: dict[str, Callable[[], str]] = {name: partial(deploy_page.table, name) for name in deploy_page.OPTIONS}
TABLES |= {"metrics": metrics_page.table, "routers": routers.table, "features": vllm_features.table}
_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end of generated -->)", re.DOTALL)


def tables_in(page: str) -> list[str]:
    """Returns the names of the tables of a page."""
    return [name for _, name, _ in _BLOCK.findall(page)]


def with_tables(page: str) -> str:
    """Returns the page with its tables made from the current code."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]().strip()}\n\n{found[3]}", page)


def without_tables(page: str) -> str:
    """Returns what somebody has written: the page without its tables."""
    return _BLOCK.sub("", page)


def main() -> None:
    """Writes the pages."""
    for path in PAGES:
        path.write_text(with_tables(path.read_text()))


if __name__ == "__main__":
    main()
