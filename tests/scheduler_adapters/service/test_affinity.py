import pytest

from scheduler_adapters.service import affinity
from scheduler_adapters.service.affinity import CHUNK, AskedFor, chunks_of

PROMPT = list(range(5 * CHUNK + 7))


def test_a_chunk_is_named_by_all_before_it_and_by_its_tenant() -> None:
    chunks = chunks_of(PROMPT, None)
    assert len(chunks) == 5
    assert chunks_of(PROMPT[: 3 * CHUNK], None) == chunks[:3]
    assert chunks_of(PROMPT[CHUNK:], None)[0] not in chunks
    assert not set(chunks_of(PROMPT, "tenant")) & set(chunks)
    assert chunks_of(PROMPT[: CHUNK - 1], None) == []


def test_tokens_count_from_the_first_on_up_to_the_first_that_was_not_asked_for() -> None:
    asked_for = AskedFor()
    asked_for.add(chunks_of(PROMPT[: 3 * CHUNK], None))
    assert asked_for.tokens_of(chunks_of(PROMPT, None)) == 3 * CHUNK
    assert asked_for.tokens_of(chunks_of([*PROMPT[:CHUNK], 1, *PROMPT[CHUNK:]], None)) == CHUNK
    assert asked_for.tokens_of(chunks_of([1, *PROMPT], None)) == 0
    asked_for.clear()
    assert asked_for.tokens_of(chunks_of(PROMPT, None)) == 0


def test_it_forgets_the_oldest_and_the_ends_of_prompts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "_MOST", 6)
    asked_for, other = AskedFor(), [-token for token in PROMPT]
    asked_for.add(chunks_of(PROMPT, None))
    asked_for.add(chunks_of(other[: 4 * CHUNK], None))
    assert len(asked_for) == 6
    assert asked_for.tokens_of(chunks_of(PROMPT, None)) == 2 * CHUNK
    assert asked_for.tokens_of(chunks_of(other, None)) == 4 * CHUNK
