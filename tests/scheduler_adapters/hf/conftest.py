"""Chooses the models and combinations that run in `make test`, only in CI (`make test-ci`), and in `make long`.

The tests of this folder run with several models, which together have every form of recurrent state.

In `make test`, each test runs once for each form, and the combinations of its other parameters are divided among the
forms. CI runs all combinations for each form, and one combination for each further model of a form. Serving is tested
with every model.
"""

from collections import defaultdict
from pathlib import Path

import pytest

FORMS = {
    "bamba": "Mamba 2",
    "jamba": "Mamba 1",
    "qwen3_next": "gated delta nets",
    "lfm2": "short convolutions",
    "minimax": "linear attention",
    "kimi_linear": "gated delta nets beside latents",
}
EACH_MODEL_AT_HOME = {"test_tokens_are_the_models_own"}
ONE_FORM_AT_HOME = {
    "test_a_host_tier_finds_what_a_device_with_room_for_all_does",
    "test_another_machine_continues_from_an_object_store",
    "test_conversations_that_the_device_has_no_room_for_come_back_from_the_host",
    "test_tokens_equal_when_requests_of_both_replicas_are_preempted",
}
"""In `make test` these tests run with one form of cache, and in CI also with the others. Another test already brings
each form back from files through host memory, so the other forms show little more here.
"""
_RECURRENT = {
    *("test_hybrid", "test_kept_states", "test_states_below", "test_one_budget"),
    *("test_state_replicas", "test_speculation"),
}


@pytest.hookimpl(tryfirst=True)  # The hook must run before pytest selects tests by their marks.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    families: dict[str, dict[str, list[pytest.Function]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if isinstance(item, pytest.Function) and Path(__file__).parent in item.path.parents:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            kind = params.get("each_model", params.get("model"))
            if isinstance(kind, str):
                families[f"{item.path}::{item.originalname}"][kind].append(item)
    for name, kinds in families.items():
        path, _, function = name.partition("::")
        every = function in EACH_MODEL_AT_HOME or Path(path).stem not in _RECURRENT
        at_home = [kind for kind in kinds if every or kind in FORMS]
        if function in ONE_FORM_AT_HOME:
            del at_home[1:]
        for kind, combinations in kinds.items():
            combinations.sort(key=lambda item: item.nodeid)
            place = sorted(at_home if kind in at_home else kinds).index(kind) % len(combinations)
            another = kind not in FORMS and Path(path).stem in _RECURRENT
            for at, item in enumerate(combinations):
                if at != place or kind not in at_home:
                    item.add_marker(pytest.mark.long if another and at != place else pytest.mark.ci)
