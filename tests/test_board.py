"""The Grafana board uses only metrics that a scrape has, and its panels do not overlap."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.deploy_page import constant
from tests.metrics_page import FAMILIES

BOARD: dict[str, Any] = json.loads((Path(__file__).parents[1] / "docs/grafana/pagewire.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS: list[str] = [target["expr"] for panel in PANELS for target in panel["targets"]]
UNITS = {"short", "s", "Bps", "percentunit"}


def exposed(name: str, kind: str) -> set[str]:
    return {f"{name}_{of}" for of in ("bucket", "sum", "count")} if kind == "histogram" else {name}


def known() -> set[str]:
    """Returns every metric name that a scrape has: the names of pagewire, and the names of vLLM that the connector
    fills.
    """
    found = {name for families in FAMILIES.values() for one in families for name in exposed(one.name, one.kind)}
    for table, prefix in (("_COUNTS", "pagewire_"), ("_NIXL_COUNTS", ""), ("_LISTS", "pagewire_"), ("_NIXL_LISTS", "")):
        keys = constant(table)
        assert isinstance(keys, ast.Dict)
        for key in keys.keys:
            assert key is not None
            name = f"vllm:{prefix}{ast.literal_eval(key)}"
            found |= {f"{name}_total"} if "COUNTS" in table else exposed(name, "histogram")
    return found


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:pagewire_|vllm:)\w+", expression))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_expression_names_what_a_scrape_yields(expression: str) -> None:
    assert names_in(expression)
    assert names_in(expression) - known() == set()


def test_counters_are_shown_as_rates_and_gauges_are_not() -> None:
    gauges = {one.name for families in FAMILIES.values() for one in families if one.kind == "gauge"}
    for expression in EXPRESSIONS:
        rated = set(re.findall(r"rate\(((?:pagewire_|vllm:)\w+)", expression))
        assert names_in(expression) - rated == names_in(expression) & gauges, expression


def first_asked() -> set[str]:
    page = (Path(__file__).parents[1] / "docs/guides/metrics.md").read_text()
    return names_in(page.split("Where to look first")[1].split("\n## ")[0])


def shown() -> set[str]:
    return {name for expression in EXPRESSIONS for name in names_in(expression)}


def test_every_family_that_matters_first_has_a_panel() -> None:
    assert len(first_asked()) > 8
    assert first_asked() - shown() == set()


@pytest.mark.parametrize("collector", FAMILIES)
def test_every_collector_is_on_the_board_and_among_what_matters_first(collector: str) -> None:
    names = {name for one in FAMILIES[collector] for name in exposed(one.name, one.kind)}
    assert names & first_asked()
    assert len(names & shown()) > 1


def test_variables_and_labels_are_there() -> None:
    variables = {variable["name"] for variable in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", json.dumps(BOARD["panels"]))) | set(
        re.findall(r"\$\{(\w+)\}", json.dumps(BOARD["panels"]))
    )
    assert used - variables == {"__rate_interval"}
    labels = {label for families in FAMILIES.values() for one in families for label in one.labels}
    for panel in PANELS:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert label in labels | {"instance", "role"}
                assert (
                    f"by ({label}" in target["expr"] or f", {label})" in target["expr"] or "sum" not in target["expr"]
                )


def test_panels_have_ids_units_and_room_of_their_own() -> None:
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert 0 <= at["x"] <= 24 - at["w"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["description"].endswith("."), panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
