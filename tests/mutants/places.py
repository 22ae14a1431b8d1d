"""Finds the tests of a source file: the tests beside it, and tests elsewhere.

The tests beside `kvcache/pool/pages.py` are `tests/kvcache/pool/test_pages.py` and each `test_pages_*.py` there. For
sources whose rules show only through other files, a table names the test files. A source file without a test file
beside it and without an entry in the table is tested by all tests of its folder. The table may name files that do not
exist, so a test can be moved without an edit of the table.
"""

from collections.abc import Iterable
from pathlib import Path

from tests.mutants.mutation import ROOT

PACKAGES = ("kvcache", "transfer", "scheduler_adapters", "pagewire")

# For each source file, the names of the test files that test it. The names lack the package and "test_".
_DOORS: dict[str, dict[str, str]] = {
    "kvcache": {
        "claims": "misuse replicas manager recovery replica/batch replica/fork replica/imports",
        "copies": "quantization layout",
        "errors": "under_way",
        "endpoints/families": "endpoints/prometheus",
        "endpoints/follower": "endpoints/watch",
        "endpoints/reset": "endpoints/reset misuse",
        "events/log": "events/grouped_events events/events",
        "layout": "layout quantization",
        "manager": "manager admission closed interrupts misuse recovery steps_in_flight endpoints/prometheus "
        "endpoints/reset replica/fork replica/imports replica/further_imports replica/leases policies/hints "
        "states/lent_states tiers/host_tier",
        "params": "params quantization states/state_memory",
        "placement": "replicas manager admission tiers/host_tier states/grouped_states_below events/events",
        "policies/baseline": "policies/baseline policies/hints",
        "policies/factory": "eviction_order policies/over_order policies/hints",
        "policies/hint_share": "policies/baseline policies/hints",
        "policies/hinted_order": "eviction_order",
        "policies/hints": "policies/further_hints recovery states/kept_states_hints",
        "policies/quotas": "eviction_order policies/hints states/kept_states_hints",
        "pool/index": "pool/pages",
        "pool/lru_order": "eviction_order",
        "pool/slab_uses": "pool/slabs pool/slabs_books",
        "recovery": "recovery steps_in_flight interrupts",
        "replica/replica": "manager admission million_moves replica/batch policies/hints replica/pages_below "
        "states/cancelled_imports states/lent_states states/grouped_states_below replica/contents tiers/host_tier "
        "tiers/object_tier",
        "replica/block_table": "replica/imports replica/leases replica/further_imports",
        "replica/copier": "handover recovery replica/imports replica/imports_for_nobody replica/further_imports "
        "replica/leases states/cancelled_imports",
        "replica/devices": "devices replica/batch replica/page_moves million_moves states/grouped_states",
        "pool/pages_below": "replica/pages_below tiers/host_tier tiers/object_tables states/grouped_states_below",
        "replica/batch": "replica/batch events/events",
        "replica/contents": "replica/contents replica/imports_for_nobody replica/lent_tables states/lent_states",
        "replica/context": "replica/batch replica/fork steps_in_flight",
        "replica/hashing": "replica/chained",
        "replica/imports": "replica/further_imports handover events/events",
        "replica/inputs": "replica/batch steps_in_flight replica/further_tables",
        "replica/kept": "replica/replica manager states/row_states",
        "replica/kept_pages": "replica/further_tables replica/further_imports million_moves replica/leases",
        "replica/one_table": "manager replica/batch replica/replica replica/imports replica/leases million_moves",
        "replica/recount": "manager mutations million_moves",
        "replica/resume": "replica/further_tables replica/pages_below states/grouped_states replica/lent_tables",
        "replica/rows": "replica/further_tables replica/batch replica/fork handover million_moves",
        "replica/row_states": "million_moves admission states/row_states states/grouped_states "
        "states/grouped_states_below states/kept_states_hints states/cancelled_imports states/lent_states "
        "states/copied_states",
        "replica/tables": "replica/further_tables replica/further_imports policies/further_hints replica/rows manager "
        "million_moves replica/leases",
        "replicas": "replicas manager admission handover steps_in_flight replica/batch replica/fork "
        "events/events tiers/host_tier tiers/file_tier million_moves states/grouped_states_below",
        "router": "replicas_routing admission",
        "sizing": "sizing params devices",
        "states/state_pages": "million_moves states/grouped_states states/kept_states_hints states/lent_states "
        "states/copied_states states/row_states states/state_pages states/passing_copies states/grouped_states_below "
        "tiers/state_tiers",
        "states/state_memory": "million_moves states/grouped_states states/state_pages",
        "tiers/page_folder": "tiers/file_tier tiers/page_files",
        "tiers/object_tier": "tiers/object_tier tiers/object_tables tiers/read_rates",
        "tiers/tiers": "tiers/host_tier tiers/object_tier replica/pages_below replica/lent_tables "
        "tiers/state_tiers states/grouped_states_below",
        "watch/book": "endpoints/watch watch/log",
        "watch/cells": "endpoints/watch",
        "watch/messages": "endpoints/watch watch/log",
        "watch/pools": "endpoints/watch watch/log",
    },
    "transfer": {
        "connector/metadata": "connector/scheduler connector/worker",
        "connector/cache_layout": "connector/cache_layout connector/layer_view",
        "engine/checks": "engine/engine",
        "engine/peers": "engine/notifications engine/engine engine/metadata",
        "engine/tensor_agent": "engine/engine",
        "nixl/object_store": "nixl/object_io",
        "nixl/settings": "nixl/agent",
        "plan/group_plan": "plan/plan plan/plan_properties",
        "plan/intersection": "plan/plan plan/plan_properties plan/scales",
        "plan/plan": "plan/few_runs plan/staging",
        "plan/runs": "plan/plan_properties plan/plan",
        "plan/shapes": "plan/boxes plan/scales plan/recurrent_states",
        "pull/asking": "pull/lending",
        "pull/page_owner": "pull/exchange pull/ownership",
        "pull/pull": "pull/pull pull/small_pulls pull/many_sources",
        "pull/pull_state": "pull/pull",
        "stats": "prometheus pull/rank pull/replica",
        "watch": "pull/exchange",
    },
    "scheduler_adapters": {
        "front/app": "front/observe",
        "front/prometheus": "front/observe",
        "hf/recurrent": "hf/state_models hf/hybrid",
        "service/reserving": "service/service",
        "service/prefill": "service/offers service/service service/faults",
        "service/program": "service/fleet",
        "service/server": "service/service service/fleet",
        "sglang/pulls": "sglang/rooms sglang/leases",
    },
    "pagewire": {
        "arguments": "cli",
        "demo/options": "cli demo/demo",
        "doctor/command": "doctor/findings",
        "doctor/nixl_probe": "doctor/findings",
        "doctor/options": "doctor/findings",
        "extras": "missing_packages",
        "plan/options": "plan/command",
        "plan/plan": "plan/command plan/memory",
        "plan/tables": "plan/command",
        "plan/ways": "plan/memory plan/blocks",
        "replay/command": "replay/replay cli",
        "replay/options": "replay/replay cli",
        "serve/options": "serve/command",
        "top/options": "top/command",
        "top/pagemap": "top/app",
        "top/panels": "top/app",
        "top/sources": "top/app top/command",
        "top/view": "top/app",
        "viewer": "serve/command top/command",
    },
}
# For each package, the tests of its interface. They notice faults of the whole package.
_ELSEWHERE = {
    "kvcache": ("manager", "handover", "million_moves", "misuse", "replicas"),
    "transfer": ("pull/ownership", "pull/exchange", "pull/replica", "connector/worker_pairs"),
    "scheduler_adapters": (),
    "pagewire": ("cli",),
}


def sources() -> list[Path]:
    """Returns the source files of the packages, relative to the root of the repository."""
    return sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def beside(path: Path) -> list[str]:
    """Returns the test files that must notice a fault in a source file. The result is empty if none of them can run
    here.
    """
    package, *_ = path.parts
    folder = ROOT / "tests" / path.parent
    own = [*folder.glob(f"test_{path.stem}.py"), *sorted(folder.glob(f"test_{path.stem}_*.py"))]
    doors = _DOORS[package].get(str(Path(*path.parts[1:]).with_suffix("")), "").split()
    return _names([*own, *_doors(package, doors)]) or _names(sorted(folder.glob("test_*.py")))


def elsewhere(path: Path) -> list[str]:
    """Returns the test files of a file's folder and of the interface of its package. All files of a folder have the
    same result.
    """
    package, *_ = path.parts
    return _names([*sorted((ROOT / "tests" / path.parent).glob("test_*.py")), *_doors(package, _ELSEWHERE[package])])


def _doors(package: str, names: Iterable[str]) -> list[Path]:
    tests = [ROOT / "tests" / package / name for name in names]
    return [test.with_name(f"test_{test.name}.py") for test in tests]


def _names(files: Iterable[Path]) -> list[str]:
    return list(dict.fromkeys(str(file.relative_to(ROOT)) for file in files if file.exists()))
