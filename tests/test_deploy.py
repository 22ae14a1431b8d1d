"""`docs/guides/operations.md` has every error and every counter, and the site has every option with its default."""

from __future__ import annotations

import ast
import re

import pytest

from tests.deploy_page import OPTIONS, ROOT, class_of, constant, fields_of, options_of, source

TEXT = (ROOT / "docs/guides/operations.md").read_text()


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def names_in(title: str) -> list[str]:
    """Returns the names in backticks before the colons in a section's list."""
    names = re.findall(r"^- (.*?):\s", section(title), re.MULTILINE | re.DOTALL)
    return [name for each in names for name in re.findall(r"`([\w()]+)`", each)]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_a_meaning(name: str) -> None:
    options = options_of(name)
    assert options
    assert [option.name for option in options if not option.meaning] == []


def test_every_error_is_in_the_list_once() -> None:
    known = [
        node.name
        for path in ("kvcache/errors.py", "transfer/errors.py")
        for node in ast.parse(source(path)).body
        if isinstance(node, ast.ClassDef)
    ]
    assert len(known) > 30
    assert sorted(names_in("Errors")) == sorted(known)


def literals(path: str, name: str) -> list[str]:
    """Returns the values of the `Literal` that a file defines under this name."""
    return re.findall(r'"(\w+)"', next(line for line in source(path).splitlines() if line.startswith(f"{name} = Lit")))


def properties_of(name: str, path: str) -> list[str]:
    found = [node for node in class_of(name, path).body if isinstance(node, ast.FunctionDef)]
    return [node.name for node in found if "property" in map(ast.unparse, node.decorator_list)]


COUNTERS = {
    "metrics": fields_of("KVCacheMetrics", "kvcache/types.py") + properties_of("KVCacheMetrics", "kvcache/types.py"),
    "manager": [
        name
        for name in properties_of("PagedKVCacheManager", "kvcache/manager.py")
        if re.search(r"^num_.*_blocks$|_pct$|^hint_share$|^total_num_pages$", name)
    ],
    "transfer": fields_of("StatsSnapshot", "transfer/stats.py"),
    "vllm": [
        ast.literal_eval(key)
        for name in ("_COUNTS", "_LISTS")
        if isinstance(found := constant(name), ast.Dict)
        for key in found.keys
        if key is not None
    ],
    "service": [
        name for name in fields_of("Stats", "scheduler_adapters/service/messages.py") if name not in {"name", "role"}
    ],
    "handshake": literals("transfer/wire/handshake.py", "QueryOutcome"),
    "notes": literals("transfer/pull/lease.py", "Verdict"),
}


@pytest.mark.parametrize("where", COUNTERS)
def test_every_counter_is_in_the_list(where: str) -> None:
    assert len(COUNTERS[where]) >= 5
    assert set(COUNTERS[where]) - set(names_in("Counters")) == set()
