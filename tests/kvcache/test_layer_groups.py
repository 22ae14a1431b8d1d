"""Groups of layers share pages of one size. Groups that cannot share such pages are refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvcache import InvalidParamsError, LayerGroup
from kvcache.layer_groups import MOST_LOST, LayerTables, layer_tables
from tests.kvcache.build import manager_of


def pattern(layers: int, full: range, window: int) -> tuple[LayerGroup, ...]:
    rest = tuple(layer for layer in range(layers) if layer not in full)
    return LayerGroup("full", tuple(full)), LayerGroup("window", rest, window)


def lost(tables: LayerTables, tokens: int) -> float:
    """Returns the fraction of a request's pages that no layer uses, counted page by page."""
    used = sum(len(table.layers) * table.group.most_pages(tokens, 1) for table in tables.tables)
    return 1 - used / (tables.layers_per_page * tables.most_pages(tokens, 1))


@pytest.mark.parametrize(
    ("layers", "full", "window", "per_page", "count"),
    [
        (62, range(5, 62, 6), 1024, 5, 13),  # Gemma 3 27B has 10 full layers and 52 layers with a window.
        (36, range(1, 36, 2), 128, 18, 2),  # gpt-oss 120B
        (48, range(3, 48, 4), 8192, 12, 4),  # Llama 4 Scout
        (34, range(5, 34, 6), 1024, 5, 7),  # Gemma 3 4B
    ],
)
def test_the_tables_of_known_models(layers: int, full: range, window: int, per_page: int, count: int) -> None:
    groups = pattern(layers, full, window)
    tables = layer_tables(groups, layers)
    assert (tables.layers_per_page, len(tables.tables)) == (per_page, count)
    assert all(lost(tables, tokens) <= MOST_LOST for tokens in (1, 128, 1024, 8192, 65536, 1 << 20))


def test_each_layer_has_one_place_and_little_is_lost() -> None:
    choose = random.Random(1)
    for _ in range(300):
        sizes = [choose.randint(1, 20) for _ in range(choose.randint(1, 4))]
        numbers = choose.sample(range(sum(sizes)), sum(sizes))
        groups: list[LayerGroup] = []
        for size in sizes:
            mine, numbers = tuple(numbers[:size]), numbers[size:]
            window = choose.randint(1, 3000)
            groups.append(LayerGroup("window", mine, window) if groups else LayerGroup("full", mine))
        choose.shuffle(groups)
        tables = layer_tables(tuple(groups), sum(sizes))
        assert tables.tables[0].group.kind == "full"
        assert sorted(tables.positions) == list(range(sum(sizes)))
        for layer, (table, position) in tables.positions.items():
            assert tables.tables[table].layers[position] == layer
            assert position < tables.layers_per_page
        assert {group for group, _ in tables.groups} == set(groups)
        assert sum(one.num_tables for one in tables.groups) == len(tables.tables)
        for group, at in tables.groups:  # The tables of a group are consecutive. They have the group's layers in order.
            assert [layer for table in tables.tables[at] for layer in table.layers] == list(group.layers)
        assert all(lost(tables, tokens) <= MOST_LOST for tokens in (1, 50, 1000, 1 << 20))


def test_without_groups_there_is_one_table_of_all_layers() -> None:
    tables = layer_tables((), 7)
    assert (tables.layers_per_page, len(tables.tables)) == (7, 1)
    assert tables.positions == {layer: (0, layer) for layer in range(7)}


@pytest.mark.parametrize("kind", ["full", "window", "chunked"])
def test_a_query_sees_the_tokens_that_the_kind_of_attention_defines(kind: Any) -> None:
    for tokens in (1, 2, 5, 8):
        group = LayerGroup(kind, (0,), 0 if kind == "full" else tokens)
        assert group.keeps_all == (kind == "full")
        most = dict.fromkeys((1, 3, 4), 0)
        for position in range(40):
            seen = {
                "full": range(position + 1),
                "window": [key for key in range(position + 1) if position - key < tokens],
                "chunked": [key for key in range(position + 1) if key // tokens == position // tokens],
            }
            first = int(group.first_seen(np.array(position)))
            assert first == seen[kind][0]
            for size in most:
                most[size] = max(most[size], position // size - first // size + 1)
                assert most[size] <= group.most_pages(position + 1, size)
        # A chunk begins only at few offsets in a page, so `most_pages` is only an upper limit for chunks.
        if kind != "chunked":
            assert most == {size: group.most_pages(40, size) for size in most}


def test_layers_that_are_missing_or_named_twice_are_refused() -> None:
    for groups, odd in (
        ((LayerGroup("full", (0,)),), "layer 1 0 times"),
        ((LayerGroup("full", (0, 1)), LayerGroup("window", (1,), 4)), "layer 1 2 times"),
        ((LayerGroup("full", (0, 1, 2)),), "layer 2 1 times: each of the 2 layers"),
    ):
        with pytest.raises(InvalidParamsError, match=odd):
            manager_of(layers=2, params={"groups": groups})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("full", (0,), 5), "window is 5"),
        (("window", (0,)), "window is 0"),
        (("window", (0,), True), "window is True"),
        (("chunked", (0,), -1), "window is -1"),
        (("wide", (0,)), "kind is 'wide'"),
        (("full", ()), "layers is"),
        (("full", "01"), "layers is '01'"),
        (("full", (0, -1)), "layers is -1"),
    ],
)
def test_impossible_layer_groups_are_refused(arguments: Any, said: str) -> None:
    with pytest.raises(InvalidParamsError, match=said):
        LayerGroup(*arguments)


def test_no_group_has_to_be_of_full_attention() -> None:
    groups = (LayerGroup("window", (0,), 4), LayerGroup("chunked", (1,), 6))
    assert manager_of(layers=2, params={"groups": groups}).layer_tables.kinds == ("chunked 6", "window 4")
    assert manager_of(params={"groups": groups[:1]}).layer_tables.kinds == ("window 4",)


def test_tables_are_named_by_kind_and_window_and_a_block_table_leaves_out_full_attention() -> None:
    window, chunked, full = LayerGroup("window", (1,), 4), LayerGroup("chunked", (2,), 8), LayerGroup("full", (0,))
    tables = layer_tables((window, chunked, full), 3)
    assert tables.kinds == ("full", "chunked 8", "window 4")
    assert tables.kinds_named == ("chunked 8", "window 4")
    assert layer_tables((LayerGroup("window", (0,), 4),), 1).kinds_named == ("window 4",)
    assert layer_tables((), 3).kinds_named == ()
    assert tables.most_pages(1000, 2) == 500 + 4 + 3


def test_groups_are_a_tuple_of_groups() -> None:
    for wrong in ((1,), LayerGroup("full", (0,)), "full", None):
        with pytest.raises(InvalidParamsError, match="groups is"):
            manager_of(params={"groups": wrong})


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 6, 16])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 6, 9, 16, 33])
@pytest.mark.parametrize("kind", ["window", "chunked"])
def test_the_most_pages_are_those_of_the_worst_step(kind: Any, window: int, page_size: int) -> None:
    group = LayerGroup(kind, (0,), window)
    for step_tokens in (1, 2, 3, 7, 16, 40):
        pages = [
            -(-(start + step_tokens) // page_size) - group.first_seen(start) // page_size
            for start in range(3 * window * page_size)
        ]
        assert group.most_pages(10**6, page_size, step_tokens) == max(pages)
        assert group.most_pages(5, page_size, step_tokens) == min(-(-5 // page_size), max(pages))
