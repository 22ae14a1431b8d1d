"""SGLang's prefill and decode schedulers change their weights at different moments: no pages of others are used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler_adapters.checkpoints import digest_of_checkpoint
from tests.sglang_engine.pd_pair import NEW, Pair, reason
from tests.sglang_engine.test_engine import PROMPTS

pytestmark = pytest.mark.timeout(300)
PROMPT = PROMPTS[0]
LONG = PROMPTS[3] * 7
"""Takes many chunks."""


@pytest.fixture
def pair(the_pair: Pair, model_dir: Path) -> Iterator[Pair]:
    """The pair of processes, both with the first weights. After the test, neither process may hold pages."""
    for server in (the_pair.prefill, the_pair.decode):
        assert "Succeeded" in server.update(model_dir)
    yield the_pair
    the_pair.prefill.wait_usage()
    the_pair.decode.wait_usage()


def answer(pair: Pair, prompt: list[int]) -> dict[str, Any]:
    """Sends a request to both processes. Returns decode's answer."""
    pair.send("asked", prompt, NEW)
    found = pair.decode.answer("asked")
    pair.prefill.answer("asked")
    return found


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_pages_of_other_weights_are_refused_until_both_sides_have_changed(
    pair: Pair, expected: Any, other_reference: Any, model_dir: Path, other_model_dir: Path, first: str
) -> None:
    assert answer(pair, PROMPT)["tokens"] == expected(PROMPT)
    getattr(pair, first).update(other_model_dir)
    why = reason(answer(pair, PROMPT))
    for folder in (model_dir, other_model_dir):
        assert f"checkpoint {digest_of_checkpoint(str(folder))}" in why
    assert "at the source" in why
    getattr(pair, {"prefill": "decode", "decode": "prefill"}[first]).update(other_model_dir)
    assert answer(pair, PROMPT)["tokens"] == other_reference(PROMPT, NEW)


def test_versions_that_the_user_names_are_compared(pair: Pair, other_reference: Any, other_model_dir: Path) -> None:
    pair.prefill.update(other_model_dir, "step 7")
    pair.decode.update(other_model_dir, "step 8")
    why = reason(answer(pair, PROMPT))
    assert "version 'step 7'" in why
    assert "version 'step 8'" in why
    pair.decode.update(other_model_dir, "step 7")
    assert answer(pair, PROMPT)["tokens"] == other_reference(PROMPT, NEW)


def test_a_lease_from_before_a_change_is_read_in_its_own_version(
    pair: Pair, expected: Any, other_model_dir: Path
) -> None:
    pair.send_held("held", PROMPT)
    assert "not flushed" in pair.prefill.update(other_model_dir), "prefill is not idle while decode reads"
    pair.decode.hold(on=False)
    assert pair.decode.answer("held")["tokens"] == expected(PROMPT)
    pair.prefill.answer("held")


def test_a_change_at_decode_ends_its_reads(
    pair: Pair, other_reference: Any, model_dir: Path, other_model_dir: Path
) -> None:
    pair.send_held("held", PROMPT)
    pair.decode.update(other_model_dir)
    pair.decode.hold(on=False)
    why = reason(pair.decode.answer("held"))
    assert "the weights at decode have changed" in why
    assert f"checkpoint {digest_of_checkpoint(str(model_dir))}" in why
    pair.prefill.answer("held")
    pair.prefill.wait_usage()
    pair.decode.wait_usage()
    pair.prefill.update(other_model_dir)
    pair.decode.flush()
    assert answer(pair, PROMPT)["tokens"] == other_reference(PROMPT, NEW)


def test_a_prompt_that_is_computed_with_two_versions_is_not_handed_over(
    pair: Pair, other_reference: Any, other_model_dir: Path
) -> None:
    assert len(LONG) > 7 * 64
    pair.send("mixed", LONG, NEW)
    pair.prefill.update(other_model_dir, between_chunks=True)
    for server in (pair.decode, pair.prefill):
        assert "the weights changed while the prompt was computed" in reason(server.answer("mixed"))
    pair.prefill.wait_usage()
    pair.prefill.flush()
    pair.decode.update(other_model_dir)
    assert answer(pair, LONG)["tokens"] == other_reference(LONG, NEW)


def test_sglangs_own_cache_is_not_trusted_until_it_is_flushed(
    pair: Pair, other_reference: Any, other_model_dir: Path
) -> None:
    answer(pair, PROMPT)
    pair.decode.update(other_model_dir)
    pair.prefill.update(other_model_dir, flush=False)
    assert "prefix cache that was not flushed" in reason(answer(pair, PROMPT))
    other = [(PROMPT[0] + 1) % 256, *PROMPTS[3]]  # with pages of one token, no page of the first prompt fits
    assert answer(pair, other)["tokens"] == other_reference(other, NEW), "nothing of this prompt was cached"
    pair.prefill.flush()
    assert answer(pair, PROMPT)["tokens"] == other_reference(PROMPT, NEW)
