"""The versions of vLLM with which the connector starts: those that have what it uses."""

from __future__ import annotations

import ast
from abc import abstractmethod
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

import scheduler_adapters.vllm as adapter
from scheduler_adapters.vllm import VLLM, PagewireConnector, versions
from scheduler_adapters.vllm.versions import NAMES, check_methods, check_names
from transfer.errors import InvalidEngineError


def imports_at_start() -> dict[str, set[str]]:
    """Returns what the modules of the connector import from vLLM at their top, apart from types.

    Modules of tiers are left out. vLLM's own `OffloadingConnector` loads them, and `PagewireTiers` checks the version.
    """
    found: dict[str, set[str]] = {}
    for path in Path(adapter.__file__).parent.glob("*.py"):
        if path.stem.startswith("tier"):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
                found.setdefault(node.module, set()).update(one.name for one in node.names)
    return found


def test_every_import_from_vllm_is_checked_by_name() -> None:
    assert {module: set(names.split()) for module, names in NAMES.items()} == imports_at_start()


def test_the_version_that_runs_has_everything() -> None:
    assert check_names() == VLLM == version("vllm")
    check_methods(PagewireConnector, KVConnectorBase_V1)


def test_everything_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    request: Any = import_module("vllm.v1.request")
    monkeypatch.delattr(request, "RequestStatus")
    monkeypatch.setattr(request, "Request", type("Request", (), {"__init__": lambda self: None}))
    monkeypatch.setattr(
        import_module("vllm.v1.kv_cache_interface"), "KVCacheConfig", SimpleNamespace(transfer_groups=1)
    )
    monkeypatch.setitem(versions.NAMES, "vllm.v1.gone", "Something")
    with pytest.raises(InvalidEngineError) as error:
        check_names()
    text = str(error.value)
    assert text.startswith(f"this is vLLM {VLLM} (tested: 0.30, 0.31, 0.32, 0.33), unfit for PagewireConnector: ")
    assert "; there is no vllm.v1.gone; " in text
    assert "vllm.v1.request has no RequestStatus" in text
    assert "vllm.v1.request.Request has no abort_immediately, all_token_ids" in text
    assert "KVCacheConfig has no transfer_group_ids, transfer_group_index_by_layer, select_transfer_block_ids" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "theirs", "told"),
    [
        ("on_new_request", None, "it does not call on_new_request"),
        ("on_new_request", lambda self, request, more: None, "it calls on_new_request with other arguments: more"),
        ("request_finished", lambda self, request: None, "it calls request_finished with other arguments: block_ids"),
        ("get_finished", lambda self, done: None, "it calls get_finished with other arguments: done, finished_req_ids"),
        ("supports_sleep_mode", None, ""),
    ],
)
def test_methods_are_compared_with_vllms(name: str, theirs: Any, told: str) -> None:
    given = {key: getattr(KVConnectorBase_V1, key) for key in dir(KVConnectorBase_V1) if not key.startswith("_")}
    given = {key: value for key, value in (given | {name: theirs}).items() if value is not None}
    other = type("KVConnectorBase_V1", (), given)
    if not told:
        check_methods(PagewireConnector, other)
        return
    with pytest.raises(InvalidEngineError) as error:
        check_methods(PagewireConnector, other)
    assert str(error.value).endswith(f"unfit for PagewireConnector: {told}")


def test_a_new_abstract_method_is_named() -> None:
    base = type("Base", (KVConnectorBase_V1,), {"wait_for_a_miracle": abstractmethod(lambda self: None)})
    with pytest.raises(InvalidEngineError, match="its connectors need a method wait_for_a_miracle"):
        check_methods(PagewireConnector, base)
