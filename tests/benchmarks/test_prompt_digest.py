from __future__ import annotations

import gc

from benchmarks import prompt_digest


def test_each_step_from_the_tokens_to_the_checked_answer_is_measured() -> None:
    try:
        rows = prompt_digest.rows((100,), 2)
        assert [row["operation"] for row in rows] == [
            "digest of a list",
            "digest of an array",
            "list to array",
            "answer",
            "ask",
        ]
        assert all(row["us_min"] > 0 and row["tokens"] == 100 for row in rows)
    finally:
        gc.unfreeze()
