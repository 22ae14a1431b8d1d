"""The table of `docs/engines/vllm.md`: features of vLLM beside our connector, and the test that tried each."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_TESTS = Path(__file__).parent


class Feature(NamedTuple):
    """A feature of vLLM.

    Attributes:
        name: the feature.
        result: what happens.
        tests: where it was tried, as "folder/file::function". `vllm_serve` has real servers of 0.32, `vllm_engine` real
            schedulers and connectors of 0.33 with a stand-in for the model.
    """

    name: str
    result: str
    tests: tuple[str, ...] = ()


FEATURES = (
    Feature(
        "prefix cache: windows, recurrent states",
        "works on both sides. Not compared with real servers for states: plain 0.32 on a CPU ends in Mamba 2 with it, "
        "and gives LFM2 other tokens in other chunks",
        ("vllm_engine/test_hybrid_cache.py::test_prompts_that_begin_alike_are_answered_right",),
    ),
    Feature(
        "drafts by n-gram; structured output; logprobs",
        "works",
        ("vllm_serve/test_features.py::test_drafts_by_ngram_structured_output_and_logprobs",),
    ),
    Feature(
        "drafts by a model whose KV is one more group",
        "works",
        ("vllm_engine/test_hybrid_cache.py::test_prompts_that_begin_alike_are_answered_right",),
    ),
    Feature(
        "drafts of models with recurrent states",
        "refused: a state would need speculative blocks",
        ("vllm_engine/test_config.py::test_unsupported_settings_are_refused_by_name",),
    ),
    Feature(
        "fp8 pages; data parallel decode",
        "works",
        ("vllm_serve/test_features.py::test_fp8_pages_and_a_decode_of_two_data_parallel_engines",),
    ),
    Feature("`MultiConnector`", "works", ("vllm_serve/test_beside.py::test_tokens_are_those_of_plain_vllm",)),
    Feature(
        "`MultiConnector` with `PagewireTiers`",
        "works in 0.33",
        ("vllm_engine/test_multi.py::test_tokens_are_right_beside_our_tiers",),
    ),
    Feature(
        "`MultiConnector` with vLLM's own offloading",
        "not tried: it refuses CPUs",
        ("vllm_serve/test_beside.py::test_vllms_offloading_refuses_a_cpu",),
    ),
    Feature(
        "`reset_prefix_cache`",
        "works; fails while blocks are handed over or lent (see Resets)",
        ("vllm_engine/test_resets.py::test_a_reset_names_the_hand_overs_for_which_it_fails",),
    ),
    Feature(
        "sleep and wake",
        "works in 0.33, never run on a GPU; older versions are refused",
        ("vllm_engine/test_sleep.py::test_after_a_sleep_of_either_side_requests_are_handed_over",),
    ),
    Feature(
        "preemption at either side",
        "works",
        ("vllm_engine/test_engine.py::test_preempted_requests_of_both_sides_end_right",),
    ),
    Feature(
        "LoRA",
        "works; adapters are compared by their files",
        ("vllm_engine/test_weights.py::test_an_adapter_with_other_files_at_the_other_side_is_refused_by_name",),
    ),
    Feature(
        "`cache_salt`",
        "works; part of each comparison",
        ("vllm_engine/test_peer_blocks.py::test_salts_and_adapters_are_part_of_the_question",),
    ),
    Feature(
        "`n` > 1, several prompts",
        "works; decode loads only the first of several prompts",
        ("vllm_serve/test_several.py::test_every_sample_of_a_prompt_has_the_tokens_of_plain_vllm",),
    ),
    Feature(
        "streams, clients that leave",
        "works",
        ("vllm_serve/test_requests.py::test_a_client_disconnects_during_a_stream",),
    ),
    Feature(
        "`weight_version`",
        "works in 0.32 and 0.33: weights with the same name match",
        ("vllm_engine/test_peer_blocks.py::test_weights_with_the_same_name_are_the_same",),
    ),
    Feature(
        "context parallelism",
        "refused",
        ("vllm_engine/test_config.py::test_unsupported_settings_are_refused_by_name",),
    ),
)


def table() -> str:
    """Returns the table."""
    rows = [
        f"| {feature.name} | {feature.result} | {', '.join(one.split('::')[0] for one in feature.tests)} |"
        for feature in FEATURES
    ]
    return "\n".join(["| feature | result | tried in `tests/` |", "|---|---|---|", *rows])


def missing() -> list[str]:
    """Returns the tests that the table names and that do not exist."""
    named = [one.partition("::") for feature in FEATURES for one in feature.tests]
    return [f"{file}::{test}" for file, _, test in named if f"def {test}(" not in (_TESTS / file).read_text()]
