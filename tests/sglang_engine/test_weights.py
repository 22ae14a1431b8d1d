"""SGLang's real scheduler changes its weights over our cache: no page of one version is used for another."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.errors import KVCacheError
from tests.sglang_engine.test_engine import NEW, PROMPTS

PROMPT = PROMPTS[0]
CHUNKED = PROMPTS[2]


class Updated:
    """The engine, and SGLang's calls that change its weights."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def call(self, request: Any) -> Any:
        """Does what SGLang does when the request arrives from its tokenizer process."""
        return self.engine.scheduler._request_dispatcher(request)

    def from_disk(self, folder: Path, version: str | None = None, *, flush: bool = False) -> Any:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        return self.call(
            UpdateWeightFromDiskReqInput(
                model_path=str(folder), load_format="auto", weight_version=version, flush_cache=flush
            )
        )

    def begin(self) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        assert self.call(BeginWeightUpdateReqInput()).success

    def end(self) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        assert self.call(EndWeightUpdateReqInput()).success

    def tensors(self, folder: Path, part: slice = slice(None), version: str | None = None) -> None:
        """Updates some of the parameters from memory."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer
        from torch.multiprocessing import reductions

        from scheduler_adapters.hf.runner import load_model

        named = [(name, tensor.data.clone()) for name, tensor in load_model(folder).named_parameters()][part]
        # An update replaces torch's function by one that cannot serialize tensors of a CPU in the same process.
        ForkingPickler.register(torch.Tensor, getattr(reductions, "_reduce_tensor_original", reductions.reduce_tensor))
        data = MultiprocessingSerializer.serialize(named)
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[data], weight_version=version, flush_cache=False
        )
        assert self.call(request).success

    def from_memory(self, folder: Path, version: str | None = None) -> None:
        self.begin()
        self.tensors(folder, version=version)
        self.end()

    def ask(self, prompt: list[int], new: int = NEW) -> tuple[list[int], int]:
        """Returns the answer to a prompt, and how many of its tokens were found cached."""
        self.engine.submit("asked", prompt, new)
        request = self.engine.requests["asked"]
        return self.engine.run()["asked"], int(request.cached_tokens)


@pytest.fixture
def updated(engine: Any, model_dir: Path) -> Iterator[Updated]:
    """The engine. It has its first weights again after the test."""
    made = Updated(engine)
    yield made
    engine.run()
    assert made.from_disk(model_dir, flush=True).success


@pytest.fixture
def hit(page_size: int) -> int:
    """How many tokens of `PROMPT` are found when it comes for the second time."""
    return (len(PROMPT) - 1) // page_size * page_size


@pytest.mark.parametrize("how", ["from_disk", "from_memory"])
@pytest.mark.parametrize("version", [None, "step 2"])
def test_answers_after_an_update_are_those_of_a_fresh_engine(
    updated: Updated,
    reference: Any,
    other_reference: Any,
    other_model_dir: Path,
    hit: int,
    how: str,
    version: str | None,
) -> None:
    first, second = reference(PROMPT, NEW), other_reference(PROMPT, NEW)
    assert first != second
    assert updated.ask(PROMPT) == (first, 0)
    assert updated.ask(PROMPT) == (first, hit)
    getattr(updated, how)(other_model_dir, None if version is None else f"{version} {how}")
    assert updated.ask(PROMPT) == (second, 0)
    assert updated.ask(PROMPT) == (second, hit)


def test_a_rollback_finds_its_pages_again(
    updated: Updated, reference: Any, other_reference: Any, model_dir: Path, other_model_dir: Path, hit: int
) -> None:
    assert updated.from_disk(model_dir).success
    assert updated.ask(PROMPT) == (reference(PROMPT, NEW), 0)
    assert updated.from_disk(other_model_dir).success
    assert updated.ask(PROMPT) == (other_reference(PROMPT, NEW), 0)
    assert updated.from_disk(model_dir).success
    assert updated.ask(PROMPT) == (reference(PROMPT, NEW), hit)
    updated.from_memory(other_model_dir, "named")
    assert updated.ask(PROMPT)[1] == 0
    updated.from_memory(model_dir, "another")
    updated.from_memory(other_model_dir, "named")
    assert updated.ask(PROMPT) == (other_reference(PROMPT, NEW), hit)


def test_a_name_that_stays_the_same_does_not_stand_for_other_weights(
    updated: Updated, reference: Any, other_reference: Any, model_dir: Path, other_model_dir: Path
) -> None:
    updated.from_memory(model_dir, "latest")
    assert updated.ask(PROMPT) == (reference(PROMPT, NEW), 0)
    updated.from_memory(other_model_dir, "latest")
    assert updated.ask(PROMPT) == (other_reference(PROMPT, NEW), 0)


def test_what_is_computed_during_an_update_is_found_by_no_one(
    updated: Updated, other_reference: Any, other_model_dir: Path
) -> None:
    updated.begin()
    assert updated.ask(PROMPT)[1] == 0
    updated.tensors(other_model_dir, slice(0, 10), "half")
    assert updated.ask(PROMPT)[1] == 0
    updated.tensors(other_model_dir, slice(10, None), "half")
    assert updated.ask(PROMPT)[1] == 0
    updated.end()
    assert updated.ask(PROMPT) == (other_reference(PROMPT, NEW), 0)


def test_a_failed_update_counts_as_a_change(updated: Updated, tmp_path: Path) -> None:
    updated.ask(PROMPT)
    assert not updated.from_disk(tmp_path).success
    assert updated.ask(PROMPT)[1] == 0


def test_a_running_request_goes_on_and_no_other_finds_what_it_publishes(
    updated: Updated, other_reference: Any, other_model_dir: Path, page_size: int
) -> None:
    engine = updated.engine
    engine.submit("across", PROMPT, 40)
    request = engine.requests["across"]
    while len(request.output_ids) < 5:
        engine.step()
    assert updated.from_disk(other_model_dir).success
    before = list(request.output_ids)
    answer = engine.run()["across"]
    assert len(answer) == 40
    assert answer[: len(before)] == before
    turn = [*PROMPT, *answer]
    assert updated.ask(turn) == (other_reference(turn, NEW), 0)
    assert updated.ask(turn)[1] == (len(turn) - 1) // page_size * page_size


def test_a_prompt_whose_chunks_are_of_two_versions_is_found_by_no_one(
    updated: Updated, reference: Any, other_reference: Any, model_dir: Path, other_model_dir: Path
) -> None:
    engine = updated.engine
    assert updated.from_disk(model_dir).success
    engine.submit("long", CHUNKED, NEW)
    for _ in range(2):
        engine.step()
    assert engine.scheduler.chunked_req is not None
    published = engine.cache.protected_size()
    assert published
    assert updated.from_disk(other_model_dir).success
    engine.run()
    assert updated.ask(CHUNKED) == (other_reference(CHUNKED, NEW), 0)
    assert updated.from_disk(model_dir).success
    assert updated.ask(CHUNKED) == (reference(CHUNKED, NEW), published), "pages of before the change keep their names"


def test_a_retracted_request_begins_anew_with_the_current_weights(
    updated: Updated, other_reference: Any, other_model_dir: Path, hit: int
) -> None:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    engine = updated.engine
    engine.submit("paused", PROMPT, 30)
    request = engine.requests["paused"]
    while len(request.output_ids) < 5:
        engine.step()
    updated.call(PauseGenerationReqInput(mode="retract"))
    before = list(request.output_ids)
    assert updated.from_disk(other_model_dir).success
    updated.call(ContinueGenerationReqInput(torch_empty_cache=False))
    answer = engine.run()["paused"]
    assert answer[: len(before)] == before
    assert answer[len(before) :] == other_reference([*PROMPT, *before], 30 - len(before))
    assert updated.ask(PROMPT) == (other_reference(PROMPT, NEW), hit)


def test_released_weights_identify_nothing(updated: Updated) -> None:
    from sglang.srt.managers.scheduler_components import weight_updater

    updated.ask(PROMPT)
    weight_updater._export_static_state(torch.nn.Linear(1, 1))  # what `release_memory_occupation` calls
    assert updated.ask(PROMPT)[1] == 0


def test_a_flush_still_forgets_everything(updated: Updated, other_model_dir: Path) -> None:
    updated.ask(PROMPT)
    assert updated.from_disk(other_model_dir, flush=True).success
    assert updated.engine.cache.total_size() == 0


def test_subscribers_are_told_only_of_pages_that_can_be_found(updated: Updated, other_model_dir: Path) -> None:
    from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockStored

    engine = updated.engine
    engine.submit("across", PROMPT, 40)
    request = engine.requests["across"]
    while len(request.output_ids) < 5:
        engine.step()
    engine.cache.kv_events.take()
    assert updated.from_disk(other_model_dir).success
    assert any(isinstance(event, AllBlocksCleared) for event in engine.cache.kv_events.take())
    told: list[Any] = []
    while engine.scheduler.running_batch.reqs or engine.step():
        engine.step()
        told += engine.cache.kv_events.take()
    engine.requests = {}
    assert not [event for event in told if isinstance(event, BlockStored)]


def test_a_version_that_lacks_a_method_is_refused(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    from scheduler_adapters.sglang.weights import served_weights

    monkeypatch.delattr(WeightUpdater, "end_weight_update")
    with pytest.raises(KVCacheError, match=r"WeightUpdater\.end_weight_update"):
        served_weights()
