"""SGLang's real scheduler and a real model on the CPU, with our cache: tokens, hits, and the pages that are held at the
end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scheduler_adapters.hf.tiny import ByteTokenizer
from tests.sglang_engine.engine import CHUNK, POOL_TOKENS, ROWS

HEAD = "A page has two owners: the request, and whoever still writes into it. " * 2
TEXTS = (HEAD + "Who?", "x", HEAD + "When, and why so late?", "Something else altogether. " * 3, HEAD + "Who?")
PROMPTS = [ByteTokenizer().encode(text) for text in TEXTS]
NEW = 12


def submit_all(engine: Any, prompts: list[list[int]], new: int = NEW, **fields: Any) -> None:
    for place, prompt in enumerate(prompts):
        engine.submit(f"r{place}", prompt, new, **fields)


def test_the_scheduler_uses_our_cache(engine: Any) -> None:
    from scheduler_adapters.sglang.cache import PagewireCache

    assert type(engine.cache) is PagewireCache


def test_admission_every_request_gets_the_models_own_tokens(engine: Any, reference: Any) -> None:
    prompts = [*PROMPTS, *[[number] * 5 for number in range(2 * ROWS)]]  # more than rows
    submit_all(engine, prompts)
    assert list(engine.run().values()) == [reference(prompt, NEW) for prompt in prompts]


def test_a_stop_token_ends_a_request_and_frees_its_pages(engine: Any, reference: Any) -> None:
    stop = reference(PROMPTS[0], NEW)[5]
    expected = [reference(prompt, NEW, stop) for prompt in PROMPTS]
    assert len(expected[0]) < NEW
    submit_all(engine, PROMPTS, stop=stop)
    assert list(engine.run().values()) == expected


def test_a_prompt_in_chunks_gets_the_models_own_tokens(engine: Any, reference: Any) -> None:
    prompt = ByteTokenizer().encode(HEAD * 3)
    assert len(prompt) > 5 * CHUNK
    engine.submit("long", prompt, NEW)
    engine.step()
    assert engine.scheduler.chunked_req is not None
    engine.step()
    assert engine.cache.protected_size() == CHUNK, "the first chunk is not published while the rest is to come"
    assert engine.run() == {"long": reference(prompt, NEW)}


def test_a_hit_covers_the_shared_pages_and_no_more(engine: Any, reference: Any, page_size: int) -> None:
    engine.submit("first", PROMPTS[0], NEW)
    answer = engine.run()["first"]
    differ = next(at for at, (ours, theirs) in enumerate(zip(*PROMPTS[:3:2], strict=False)) if ours != theirs)
    engine.submit("second", PROMPTS[2], NEW)
    second = engine.requests["second"]
    assert engine.run() == {"second": reference(PROMPTS[2], NEW)}
    assert second.cached_tokens == differ // page_size * page_size
    turn = [*PROMPTS[0], *answer, *ByteTokenizer().encode("And then?")]
    engine.submit("turn", turn, NEW)
    third = engine.requests["turn"]
    assert engine.run() == {"turn": reference(turn, NEW)}
    computed = len(PROMPTS[0]) + NEW - 1  # The last token was never fed back.
    assert third.cached_tokens == computed // page_size * page_size


def test_a_whole_prompt_that_is_cached_still_runs_its_last_token(engine: Any, reference: Any, page_size: int) -> None:
    prompt = PROMPTS[0][: 4 * 16]
    for name in ("first", "again"):
        engine.submit(name, prompt, NEW)
        request = engine.requests[name]
        assert engine.run() == {name: reference(prompt, NEW)}
    assert request.cached_tokens == (len(prompt) - 1) // page_size * page_size


def test_equal_prompts_that_run_together_end_up_on_the_same_pages(engine: Any, reference: Any, page_size: int) -> None:
    prompt = PROMPTS[3][:50]
    for name in ("a", "b"):
        engine.submit(name, prompt, NEW)
    while any(len(engine.requests[name].output_ids) < 3 for name in ("a", "b")):
        engine.step()
    whole = len(prompt) // page_size
    assert engine.pages_of("a")[:whole] == engine.pages_of("b")[:whole]
    assert engine.pages_of("a")[whole:] != engine.pages_of("b")[whole:]
    assert engine.run() == {name: reference(prompt, NEW) for name in ("a", "b")}


def test_salts_and_classes_of_requests_share_nothing(engine: Any) -> None:
    for name, fields in (
        ("plain", {}),
        ("salted", {"cache_salt": "one"}),
        ("other salt", {"cache_salt": "two"}),
        ("class", {"extra_key": "one"}),
    ):
        engine.submit(name, PROMPTS[0], 2, **fields)
        request = engine.requests[name]
        engine.run()
        assert request.cached_tokens == 0, name
        engine.submit(name, PROMPTS[0], 2, **fields)
        request = engine.requests[name]
        engine.run()
        assert request.cached_tokens > 0, name


def test_retracted_requests_give_their_pages_back_and_get_equal_tokens(engine: Any, reference: Any) -> None:
    prompts = [ByteTokenizer().encode(f"{number} waits.") for number in range(ROWS)]
    submit_all(engine, prompts, 120)
    outputs = engine.run()
    assert engine.retracted > 0, "all requests fitted at the same time, so this test has shown nothing"
    assert list(outputs.values()) == [reference(prompt, 120) for prompt in prompts]


def test_a_request_of_more_weight_preempts_and_all_get_equal_tokens(engine: Any, reference: Any) -> None:
    heavy = ByteTokenizer().encode("Out of the way! " * 8)
    prompts = [ByteTokenizer().encode(f"{number} waits.") for number in range(ROWS)]
    # These requests need more rows than there are. They do not need more pages than there are.
    assert sum(map(len, [*prompts, heavy])) + 40 * (ROWS + 1) < POOL_TOKENS
    submit_all(engine, prompts, 40, priority=0)
    while len(engine.scheduler.running_batch.reqs) < ROWS:
        engine.step()
    engine.submit("heavy", heavy, NEW, priority=100)
    outputs = engine.run()
    assert engine.retracted > 0, "nobody was preempted"
    assert outputs.pop("heavy") == reference(heavy, NEW)
    assert list(outputs.values()) == [reference(prompt, 40) for prompt in prompts]


def test_cached_pages_are_evicted_for_new_requests(engine: Any, reference: Any) -> None:
    prompts = [ByteTokenizer().encode(f"{number}: " + "so full a pool. " * 6) for number in range(16)]
    for place, prompt in enumerate(prompts):
        engine.submit(f"r{place}", prompt, NEW)
        assert engine.run() == {f"r{place}": reference(prompt, NEW)}
        assert engine.cache.total_size() <= POOL_TOKENS
    assert sum(map(len, prompts)) > 2 * POOL_TOKENS
    assert engine.cache.total_size() > POOL_TOKENS // 2, "more was evicted than was asked for"


@pytest.mark.parametrize("phase", ["waiting", "chunk", "decode"])
def test_an_aborted_request_leaves_nothing_held_in_any_phase(engine: Any, reference: Any, phase: str) -> None:
    victim = ByteTokenizer().encode(HEAD * 3)
    engine.submit("other", PROMPTS[3], NEW)
    if phase == "waiting":
        engine.step()
    engine.submit("victim", victim, 50)
    request = engine.requests["victim"]
    if phase == "chunk":
        while engine.scheduler.chunked_req is not request:
            engine.step()
        engine.step()
    elif phase == "decode":
        while len(request.output_ids) < 3:
            engine.step()
    engine.abort("victim")
    outputs = engine.run()
    assert len(outputs["victim"]) < 50
    assert outputs["other"] == reference(PROMPTS[3], NEW)
    engine.submit("again", victim, NEW)
    assert engine.run() == {"again": reference(victim, NEW)}


def test_a_flush_forgets_everything(engine: Any) -> None:
    engine.submit("first", PROMPTS[0], 2)
    engine.run()
    assert engine.cache.total_size() > 0
    assert engine.scheduler.flush_cache()
    assert engine.cache.total_size() == 0
    assert engine.allocator.available_size() == engine.allocator.size
    engine.submit("again", PROMPTS[0], 2)
    request = engine.requests["again"]
    engine.run()
    assert request.cached_tokens == 0


def test_hits_are_those_of_sglangs_own_tree(engine: Any, model_dir: Path, page_size: int) -> None:
    requests = {f"r{place}": prompt for place, prompt in enumerate([*PROMPTS, *[p[:50] for p in PROMPTS], *PROMPTS])}
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang_engine.engine", str(model_dir), "--page-size", str(page_size)],
        input=json.dumps([requests, NEW]),
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert engine.cached_tokens(requests, NEW) == theirs
    assert sum(theirs) > 0
