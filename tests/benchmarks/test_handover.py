"""The benchmark of hand-overs measures prompts of several chunks, in separate processes."""

import pytest

from benchmarks import handover


@pytest.mark.ci
def test_a_prompt_of_several_chunks_is_measured_both_ways() -> None:
    rows = handover.measure("small", [2 * handover.BUDGET + 1], 1)
    assert [(row["pull"], row["n"]) for row in rows] == [("whole", 1), ("chunkwise", 1)]
    assert all(row["prefill_ms_min"] > 0 and row["handover_ms_min"] > 0 for row in rows)
