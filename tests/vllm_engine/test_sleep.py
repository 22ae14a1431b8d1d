"""vLLM's sleep takes the memory of the caches, and gives it back at the same addresses. The memory is zeroed here."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scheduler_adapters.vllm import config
from tests.vllm_engine.engine import (
    Engine,
    Shape,
    expected_tokens,
    make_cache_config,
    make_config,
    model_dir,
    run_until,
)
from tests.vllm_engine.test_engine import PROMPT, assert_empty, prefilled, served
from tests.vllm_engine.test_peer_blocks import EXTRA, asked, found, lend, pair, source_of
from tests.vllm_engine.test_weights import reload
from transfer.errors import InvalidEngineError

Make = Callable[..., Engine]


def sleep(engine: Engine) -> None:
    """Does what vLLM does when an engine falls asleep, in the same order."""
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    for worker, caches in zip(engine.workers, engine.caches, strict=True):
        worker.unregister_kv_caches()
        worker.unregister_kv_caches()
        for cache in caches.values():
            cache.zero_()


def wake(engine: Engine) -> None:
    for worker in engine.workers:
        worker.restore_kv_caches()
        worker.restore_kv_caches()
    ranks = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(engine.workers)}
    engine.connector.set_xfer_handshake_metadata_pp_aware(ranks)


@pytest.mark.parametrize("sides", ["prefill", "decode", "both"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_after_a_sleep_of_either_side_requests_are_handed_over(make: Make, sides: str, tp_size: int) -> None:
    prefill, decode = make("kv_producer", Shape(tp_size=tp_size)), make("kv_consumer")
    for at in range(3):
        params = prefilled(prefill, f"p{at}", PROMPT)
        tokens = served([prefill, decode], f"d{at}", PROMPT, 3, params)
        assert tokens == expected_tokens(PROMPT, 3, decode.shape)
        assert decode.scheduled[-3] == {f"d{at}": 1}, "the prompt was loaded"
        assert_empty(prefill, decode)
        slept = [prefill, decode] if sides == "both" else [{"prefill": prefill, "decode": decode}[sides]]
        for engine in slept:
            sleep(engine)
            engine.step()  # vLLM may run steps without requests
        for engine in slept:
            wake(engine)
        decode.scheduler.reset_prefix_cache()


def test_a_source_that_sleeps_lends_nothing_and_lends_again_when_it_is_awake(make: Make) -> None:
    source, reader = pair(make, extra={"ask_timeout": 5.0})
    asked([source, reader], "r", PROMPT, [source_of(source)])
    assert found(reader) == 96
    sleep(source)
    reader.scheduler.reset_prefix_cache()
    assert asked([source, reader], "r2", PROMPT, [source_of(source)]) == expected_tokens(PROMPT, 3, reader.shape)
    assert found(reader) == 96
    wake(source)
    reader.scheduler.reset_prefix_cache()
    served([source], "s2", PROMPT, 1, None)
    assert asked([source, reader], "r3", PROMPT, [source_of(source)]) == expected_tokens(PROMPT, 3, reader.shape)
    assert found(reader) == 96 * 2
    assert_empty(source, reader)


def test_an_engine_does_not_sleep_while_it_lends(make: Make) -> None:
    source, reader = pair(make)
    lend(source, reader)
    with pytest.raises(RuntimeError):
        sleep(source)
    run_until([source, reader], lambda: reader.finish_reason("r"))
    sleep(source)


@pytest.mark.parametrize("when", ["before", "asleep"])
def test_weights_that_were_changed_by_then_are_known_and_need_no_further_reset(
    make: Make, tmp_path: Path, when: str
) -> None:
    source, reader = (make("kv_both", Shape(extra=EXTRA)) for _ in range(2))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    for engine in (source, reader):
        served([engine], "before", [1, 2, 3], 1, None)
        if when == "before":
            reload(engine, tmp_path)
            served([engine], "step", [1, 2, 3], 1, None)
        sleep(engine)
        if when == "asleep":
            reload(engine, tmp_path)
        wake(engine)
    served([source], "s", PROMPT, 1, None)
    asked([source, reader], "r", PROMPT, [source_of(source)])
    assert found(reader) == 96
    (tmp_path / "model.safetensors").write_bytes(b"other")
    reload(reader, tmp_path)
    reader.scheduler.reset_prefix_cache()
    time.sleep(1.1)
    asked([source, reader], "r2", PROMPT, [source_of(source)])
    assert found(reader) == 96, "the reader has other weights"


def test_versions_that_tell_nothing_of_a_sleep_refuse_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "TELLS_OF_SLEEP", False)
    given: Any = make_config(model_dir(tmp_path, 4), "kv_both", "e", Shape(), 0)
    given.model_config.enable_sleep_mode = True
    with pytest.raises(InvalidEngineError, match="enable_sleep_mode is on"):
        config.worker_config(given, make_cache_config(Shape()))
