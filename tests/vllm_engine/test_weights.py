"""Weights and adapters are part of each hand-over: they are identified by the files that vLLM has loaded them from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.gpu_worker import Worker

from scheduler_adapters import checkpoints
from scheduler_adapters.checkpoints import digest_of_checkpoint, digest_of_files
from scheduler_adapters.vllm.weights import LoadedWeights, named_adapter
from tests.vllm_engine.engine import Engine, Shape, expected_tokens, make_request, run_until
from tests.vllm_engine.test_engine import PREFILL, PROMPT, assert_empty, prefilled, served

Make = Callable[..., Engine]
EXTRA = {"host": "127.0.0.1", "port": 0, "kv_lease_duration": 600.0}


def made(folder: Path, content: bytes) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    (folder / "adapter_config.json").write_bytes(b"{}")
    return folder


def reload(engine: Engine, path: Path | None) -> None:
    """Tells each worker that its weights were read from a checkpoint, or, without a path, from memory."""
    for worker in engine.workers:
        worker._working._weights.on_reload(str(path), from_memory=path is None)


@pytest.mark.parametrize("whole", [1 << 20, 100])
def test_a_digest_tells_files_by_name_size_and_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: int
) -> None:
    """Only parts of a large file are read: its beginning, its end, and others in between."""
    monkeypatch.setattr(checkpoints, "_WHOLE_BYTES", whole)
    monkeypatch.setattr(checkpoints, "_PART_BYTES", 8)
    content = bytes(range(256)) * 64
    names = ("a.bin", "b.bin")

    def digest(name: str, *contents: bytes) -> str:
        folder = tmp_path / name
        folder.mkdir()
        for file, one in zip(names, contents, strict=False):
            (folder / file).write_bytes(one)
        return digest_of_files(sorted(folder.iterdir(), reverse=True))

    found = [digest("both", content, content), digest("one", content), digest("short", content[:-1], content)]
    changed = [(at, content[:at] + b"\xff" + content[at + 1 :]) for at in (0, 8004, len(content) - 2)]
    found += [digest(f"changed {at}", one, content) for at, one in changed]
    assert len(set(found)) == len(found)
    assert digest("copied", content, content) == found[0]
    assert digest("none") == ""


def test_an_adapter_is_identified_by_its_name_and_files_wherever_they_are(tmp_path: Path) -> None:
    here, other = made(tmp_path / "here", b"one"), made(tmp_path / "other", b"two")
    there = Path(shutil.copytree(here, tmp_path / "there"))
    same = named_adapter(LoRARequest("poet", 1, str(here)))
    assert same == named_adapter(LoRARequest("poet", 7, str(there)))
    assert same != named_adapter(LoRARequest("poet", 8, str(other)))
    assert same[0] == "adapter 'poet'"
    assert same[1] == named_adapter(LoRARequest("clerk", 9, str(here)))[1]
    (here / "adapter_model.safetensors").write_bytes(b"changed")
    assert named_adapter(LoRARequest("poet", 1, str(here))) == same, "vLLM has not read the files again"
    in_place = named_adapter(LoRARequest("poet", 1, str(here), load_inplace=True))
    assert in_place != same
    (here / "adapter_model.safetensors").write_bytes(b"changed again")
    assert named_adapter(LoRARequest("poet", 1, str(here), load_inplace=True)) not in (same, in_place)
    assert named_adapter(LoRARequest("poet", 11, str(tmp_path / "none"))) == (
        "adapter 'poet'",
        f"unreadable files of {tmp_path / 'none'}",
    )


def test_weights_are_identified_by_their_checkpoint_and_the_updates_since(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first, second = LoadedWeights(), LoadedWeights()
    assert first.named == {}
    first.reloaded(str(tmp_path))
    assert list(first.named) == ["weights"]
    assert first.named != second.named
    second.updated()
    assert second.named == {"weights": "as at the start, then update 1 from memory"}
    second.reloaded(str(tmp_path / "model.safetensors"))
    assert second.named == first.named
    first.updated()
    assert second.named != first.named
    first.reloaded("hub/name")
    assert first.named == {"weights": "reloaded from hub/name"}
    assert first.checkpoint == ""


def test_weights_without_a_name_are_those_of_no_earlier_moment(tmp_path: Path) -> None:
    """After the same checkpoint or name, another update may follow. Leases of the first one are of other weights."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    weights, texts = LoadedWeights(), list[str]()
    for load in 3 * [lambda: weights.reloaded(str(tmp_path)), lambda: weights.versioned("step 1"), lambda: None]:
        load()
        for _ in range(2):
            weights.updated()
            texts.append(weights.named["weights"])
    assert len(set(texts)) == len(texts)


def test_weights_of_a_change_that_has_not_ended_equal_no_others(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first, second = LoadedWeights(), LoadedWeights()
    for weights in (first, second):
        weights.reloaded(str(tmp_path))
        assert weights.checkpoint == digest_of_checkpoint(str(tmp_path))
        weights.changing()
        assert weights.checkpoint == ""
    assert first.named != second.named
    for weights in (first, second):
        weights.updated()
    assert first.named == second.named
    assert first.named["weights"].endswith(", then update 1 from memory")
    first.versioned("step 1")
    assert first.named == {"weights": "version 'step 1'"}


@pytest.mark.parametrize("method", ["reload_weights", "start_weight_update"])
def test_weights_whose_change_fails_or_goes_on_match_nothing(make: Make, method: str) -> None:
    """vLLM's real worker runs. An update that could not begin has changed nothing."""
    engine = make("kv_producer", Shape(extra=EXTRA))
    worker: Any = object.__new__(Worker)
    worker.vllm_config, weights = engine.workers[0]._vllm_config, engine.workers[0]._working._weights.weights
    worker.weight_transfer_engine, worker.model_runner = None, SimpleNamespace(reload_weights=fail)
    with pytest.raises((OSError, RuntimeError)):
        getattr(worker, method)()
    if method == "reload_weights":
        assert "of a change that has not ended or has failed" in weights.named["weights"]
    else:
        assert weights.named == {}
        worker.weight_transfer_engine, worker._weight_update_active = SimpleNamespace(start_weight_update=list), False
        worker.start_weight_update()
        assert "of a change that has not ended or has failed" in weights.named["weights"]


def fail() -> None:
    raise OSError("the file is gone")


def test_a_name_counts_again_after_other_weights_and_never_for_later_ones(make: Make) -> None:
    engine, core = make("kv_producer", Shape(extra=EXTRA)), object.__new__(EngineCore)
    core.model_executor = SimpleNamespace(
        collective_rpc=lambda method, *_: reload(engine, None) if method == "finish_weight_update" else None
    )
    weights = engine.workers[0]._working._weights.weights
    for number in (1, 2):
        core.set_weight_version("step 1")
        engine.step()
        assert weights.named == {"weights": "version 'step 1'"}
        core.collective_rpc("finish_weight_update")
        engine.step()
        assert weights.named == {"weights": f"version 'step 1', then update {number} from memory"}
    core.set_weight_version("step 2")
    core.collective_rpc("another method")
    engine.step()
    assert weights.named == {"weights": "version 'step 2'"}
    core.set_weight_version("step 3")
    core.collective_rpc("finish_weight_update")  # before a step has told the workers the name
    engine.step()
    assert "step 3" not in weights.named["weights"]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize(("left", "right"), [({}, {}), ({}, {"tp_size": 2}), ({"tp_size": 2}, {})], ids=str)
@pytest.mark.parametrize("from_memory", [False, True])
def test_pages_of_other_weights_are_refused_by_name_until_both_sides_have_the_same(
    make: Make, caplog: Any, tmp_path: Path, left: Any, right: Any, policy: str, from_memory: bool
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    path = None if from_memory else tmp_path
    prefill = make("kv_producer", Shape(extra=EXTRA, **left))
    decode = make("kv_consumer", Shape(extra=EXTRA, policy=policy, **right))
    for number, reloads in enumerate(((), (prefill,), (decode,), (decode,), (prefill,))):
        for engine in reloads:
            reload(engine, path if number < 3 else None)
        request_id, prompt, caplog_before = f"r{number}", PROMPT[number:], len(caplog.text)
        decode.add(request_id, prompt, 3, prefilled(prefill, f"p{number}", prompt))
        run_until([prefill, decode], lambda: decode.finish_reason(request_id))  # noqa: B023
        told = "holds pages of another model: weights: " in caplog.text[caplog_before:]
        assert told == (number % 2 == 1), number
        failed = number % 2 == 1 and policy == "fail"
        assert decode.tokens(request_id) == ([] if failed else expected_tokens(prompt, 3, decode.shape))
        assert_empty(prefill, decode)


def test_a_reload_ends_the_leases_that_were_granted_before(make: Make, tmp_path: Path) -> None:
    """One of the requests still runs, so its pages would be computed with both weights."""
    prefill, decode = make("kv_producer", Shape(extra=EXTRA)), make("kv_consumer", Shape(extra=EXTRA))
    params = [prefilled(prefill, "before", PROMPT)]
    prefill.add("during", PROMPT[::-1], 1, dict(PREFILL))
    prefill.step()
    for engine in (prefill, decode):
        reload(engine, tmp_path)
    run_until([prefill], lambda: prefill.finish_reason("during"))
    run_until([prefill], lambda: prefill.free_blocks == prefill.free_at_start)
    for number, one in enumerate(params):
        decode.add(f"d{number}", PROMPT, 3, one)
        run_until([prefill, decode], lambda: decode.finish_reason(f"d{number}"))  # noqa: B023
        assert decode.finish_reason(f"d{number}") == "error"
    decode.add("after", PROMPT[5:], 3, prefilled(prefill, "again", PROMPT[5:]))
    run_until([prefill, decode], lambda: decode.finish_reason("after"))
    assert decode.tokens("after") == expected_tokens(PROMPT[5:], 3, decode.shape)
    assert_empty(prefill, decode)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_an_adapter_with_other_files_at_the_other_side_is_refused_by_name(
    make: Make, caplog: Any, tmp_path: Path, policy: str
) -> None:
    prefill, decode = make("kv_producer", Shape(extra=EXTRA)), make("kv_consumer", Shape(extra=EXTRA, policy=policy))
    here, other = made(tmp_path / "here", b"one"), made(tmp_path / "other", b"two")
    there = Path(shutil.copytree(here, tmp_path / "there"))
    for number, (path, fits) in enumerate(((there, True), (other, False), (here, True))):
        prompt, before = PROMPT[number:], len(caplog.text)
        first = make_request(f"p{number}", prompt, 1, 16, dict(PREFILL))
        first.lora_request = LoRARequest("poet", 100 + number, str(here))
        prefill.scheduler.add_request(first)
        run_until([prefill], lambda: prefill.finish_reason(f"p{number}"))  # noqa: B023
        request = make_request(f"d{number}", prompt, 3, 16, prefill.params(f"p{number}"))
        request.lora_request = LoRARequest("poet", 200 + number, str(path))
        decode.scheduler.add_request(request)
        run_until([prefill, decode], lambda: decode.finish_reason(f"d{number}"))  # noqa: B023
        assert ("holds pages of another model: adapter 'poet': 'files " in caplog.text[before:]) != fits
        failed = not fits and policy == "fail"
        assert decode.tokens(f"d{number}") == ([] if failed else expected_tokens(prompt, 3, decode.shape))
        assert_empty(prefill, decode)


def test_a_request_that_waits_for_blocks_while_the_weights_change_does_not_load_pages_of_before(
    make: Make, tmp_path: Path, caplog: Any
) -> None:
    """The source has answered by then, so its pages were those of the reader's weights."""
    prefill, decode = make("kv_producer", Shape(extra=EXTRA)), make("kv_consumer", Shape(extra=EXTRA))
    params = prefilled(prefill, "p", PROMPT)
    decode.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    decode.add("waits", PROMPT, 3, params)
    (thread,) = decode.workers[0]._working.running.threads
    run_until([prefill, decode], lambda: any(pull.pages for pull in [*thread.replica._pulls.values()]))
    reload(decode, tmp_path)
    decode.scheduler.set_pause_state(PauseState.UNPAUSED)
    run_until([prefill, decode], lambda: decode.finish_reason("waits"))
    assert decode.finish_reason("waits") == "error"
    assert "holds pages of another model, because this engine's weights have changed: weights: " in caplog.text
    assert_empty(prefill, decode)


def change(engine: Engine, told: str) -> None:
    """Gives an engine other weights. `told` says how the connector learns of them."""
    engine.weights += 1
    if told == "named":
        engine.connector._scheduling._versions.named(f"v{engine.weights}")
    else:
        reload(engine, None)


def handed(prefill: Engine, decode: Engine, request_id: str, prompt: list[int]) -> tuple[list[int], bool]:
    """Runs a prompt at prefill and then at decode. Returns decode's tokens, and whether it has computed the prompt."""
    prefill.add(request_id, prompt, 1, dict(PREFILL))
    run_until([prefill], lambda: prefill.finish_reason(request_id))
    found = [one.kv_transfer_params for one in prefill.outputs if one.request_id == request_id]
    decode.add(request_id, prompt, 3, found[-1])
    run_until([prefill, decode], lambda: decode.finish_reason(request_id))
    return decode.tokens(request_id), sum(step.get(request_id, 0) for step in decode.scheduled) > len(prompt)


@pytest.mark.parametrize("told", ["named", "unnamed"])
@pytest.mark.parametrize("shape", [{}, {"tp_size": 2}, {"windows": (0, 40)}, {"max_batched": 16}], ids=str)
def test_blocks_of_a_cache_that_was_not_reset_are_not_handed_over_as_those_of_new_weights(
    make: Make, caplog: Any, shape: Any, told: str
) -> None:
    prefill = make("kv_producer", Shape(extra=EXTRA, **shape))
    decode = make("kv_consumer", Shape(extra=EXTRA, policy="recompute", **shape))
    served([prefill], "s", PROMPT, 1, None)
    for engine in (prefill, decode):
        change(engine, told)
    longer, other = PROMPT[:64] + PROMPT[::-1], PROMPT[::-1]
    for number, (prompt, is_old) in enumerate([(longer, True), (PROMPT, True), (other, False), (PROMPT, False)]):
        assert_empty(prefill, decode)
        assert decode.scheduler.reset_prefix_cache()
        if number == 3:
            assert caplog.text.count("was not reset after the weights had changed") == 1
            assert prefill.scheduler.reset_prefix_cache()
        assert handed(prefill, decode, f"r{number}", prompt) == (expected_tokens(prompt, 3, decode.shape, 1), is_old)
    assert handed(prefill, decode, "last", PROMPT[:90])[1] is False, "what it finds is of the new weights"
    assert_empty(prefill, decode)


def test_a_preempted_request_that_finds_blocks_of_a_cache_that_was_not_reset_loses_its_lease(make: Make) -> None:
    prefill = make("kv_producer", Shape(extra=EXTRA, blocks=12, max_batched=16))
    served([prefill], "s", PROMPT[:17], 1, None)
    change(prefill, "named")
    prefill.add("local", PROMPT[:76], 40)
    run_until([prefill], lambda: prefill.tokens("local"))
    prefill.add("p", PROMPT[::-1][:90], 1, dict(PREFILL))
    prefill.step()
    assert prefill.connector._scheduling._sources == {"p"}
    run_until([prefill], lambda: prefill.finish_reason("p"))
    assert sum(step.get("p", 0) for step in prefill.scheduled) > 90, "it was not preempted"
    assert all(one.kv_transfer_params is None for one in prefill.outputs if one.request_id == "p")
    assert_empty(prefill)


def test_a_cache_that_is_reset_before_the_change_is_not_old_if_idle_steps_come_in_between(make: Make) -> None:
    prefill, decode = make("kv_producer", Shape(extra=EXTRA)), make("kv_consumer", Shape(extra=EXTRA))
    served([prefill], "s", PROMPT, 1, None)
    assert prefill.scheduler.reset_prefix_cache()
    prefill.step()
    for engine in (prefill, decode):
        change(engine, "named")
    prefilled(prefill, "p", PROMPT[:70])
    params = prefilled(prefill, "q", PROMPT)
    assert prefill.scheduled[-1]["q"] <= len(PROMPT) - 64, "it has found a prefix"
    assert served([prefill, decode], "d", PROMPT, 3, params) == expected_tokens(PROMPT, 3, decode.shape, 1)
