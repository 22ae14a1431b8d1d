"""The examples in docstrings run, and print what they say. Each public data structure has one."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from kvcache import Batch, LayerGroup, LruOrder, PagedKVCacheManager, PageLayout, PageLease, Retention, TextContext
from kvcache.policies.hinted_order import HintedOrder
from kvcache.policies.quotas import QuotaOrder
from kvcache.pool.index import PrefixIndex
from kvcache.pool.journal import PageReader
from kvcache.pool.pages import PagePool
from kvcache.pool.slabs import SlabPool
from kvcache.replica.hashing import PrefixHasher
from kvcache.replica.tables import RowTables
from transfer.plan.runs import Runs
from transfer.pull.lease import LeaseWords
from transfer.wire.allowed_peers import AllowedPeers

ROOT = Path(__file__).parents[1]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("kvcache", "transfer")
    for path in sorted((ROOT / package).rglob("*.py"))
    if "    >>> " in path.read_text()
]
SHOWN = [
    *(Batch, LayerGroup, LruOrder, PagedKVCacheManager, PageLayout, PageLease, Retention, TextContext),
    *(AllowedPeers, HintedOrder, LeaseWords, PagePool, PageReader, PrefixHasher, PrefixIndex, QuotaOrder, RowTables),
    *(Runs, SlabPool),
]


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_module_print_what_they_say(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize("shown", SHOWN)
def test_a_data_structure_is_shown_by_an_example(shown: type) -> None:
    assert ">>> " in (shown.__doc__ or "")
