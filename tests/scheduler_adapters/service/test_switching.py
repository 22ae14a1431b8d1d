"""A prefill and a decode process change their weights. Each of them finishes its requests first, whatever their phase,
and refuses those that come meanwhile.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler_adapters.hf.runner import load_model
from scheduler_adapters.hf.tiny import tiny_llama
from scheduler_adapters.hf.weights import ModelWeights, model_name
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.weights import WeightsSwitch
from tests.scheduler_adapters.service.processes import NEW, Service, Side
from tests.scheduler_adapters.serving import own_tokens

PROMPT = [*range(60, 140), *range(60, 220), *range(14, 200)]  # of many chunks, so that each phase lasts


class Switched:
    """A service whose processes have models of their own, which get other weights."""

    def __init__(self, folder: Path, prefills: int = 1) -> None:
        self.models = [load_model(None, seed) for seed in (0, 1)]
        tiny_llama(1).save_pretrained(folder / "1")
        self.model, self.names = str(folder / "1"), [model_name(model) for model in self.models]
        side = {"params": {"enable_prefix_caching": True}, "replaced": {"weights": bytes.fromhex(self.names[0])}}
        self.service = Service(self.models[0], folder, Side(count=prefills, budget=32, **side), Side(**side))
        self.switches: dict[str, WeightsSwitch] = {}
        for name, loop in self.service.loops.items():
            loop.runner.model = copy.deepcopy(self.models[0])
            scheduler: Any = {**self.service.prefills, **self.service.decodes}[name]
            scheduler.resume(self.names[0])
            weights = ModelWeights(loop.runner.model, self.names[0])
            self.switches[name] = WeightsSwitch(name, weights, loop.manager, scheduler)
        self.service.until(lambda: all(one.serves(self.names[0]) for one in self.service.decode.connections), "them")

    def load(self, model: str = "") -> list[msg.Loaded]:
        answers: list[msg.Loaded] = []
        for switch in self.switches.values():
            switch.load(model or self.model)

        def loaded() -> bool:
            answers.extend(filter(None, (switch.take_loaded() for switch in self.switches.values())))
            return len(answers) == len(self.switches)

        self.service.until(loaded, "the weights")
        return answers

    def poll(self) -> None:
        for switch in self.switches.values():
            switch.attend()
        self.service.poll()

    def until(self, condition: Any, what: str) -> None:
        self.service.until(condition, what, poll=self.poll)

    def close(self) -> None:
        for switch in self.switches.values():
            switch.close()
        self.service.close()


@pytest.fixture
def switched(tmp_path: Path) -> Iterator[Switched]:
    made = Switched(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("side", "phase"),
    [("p0", "leasing"), ("p0", "offered"), ("p0", "held"), ("d0", "pulling"), ("d0", "decoding")],
)
def test_a_request_that_has_begun_ends_with_its_own_weights(switched: Switched, side: str, phase: str) -> None:
    service, (old, new) = switched.service, switched.names
    assert [answer.weights for answer in switched.load()] == [new, new]
    service.submit_one("r0", PROMPT)
    of_side: Any = {"p0": service.prefill, "d0": service.decode}[side]
    service.until(lambda: phase in {one.phase for one in of_side._requests.values()}, phase)
    for switch in switched.switches.values():
        switch.switch(new)
        assert switch.name == old, "not while the request runs"
        switch.load("other")  # a frontend that was restarted does not know of the switch
        told = switch.take_loaded()
        assert told is not None
        assert (told.model, told.error) == ("other", f"the process is about to change its weights to {new}")
    service._submit("r1", PROMPT, NEW, service.decode)
    switched.until(lambda: len(service.ended) == 2, "the end of both")
    assert service.ended["r1"].elsewhere
    assert "is about to change its weights" in service.ended["r1"].error
    assert service.ended["r0"].weights == old
    assert service.tokens["r0"] == own_tokens(switched.models[0], PROMPT, NEW)
    switched.until(lambda: {one.name for one in switched.switches.values()} == {new}, "the switch")
    switched.until(lambda: service.decode.connections[0].serves(new), "the news of it")
    for number in range(2):  # the second one finds the pages of the first
        service.submit_one(f"after {number}", PROMPT)
        switched.until(lambda number=number: f"after {number}" in service.ended, "the answer")
        assert service.ended[f"after {number}"].weights == new
        assert service.tokens[f"after {number}"] == own_tokens(switched.models[1], PROMPT, NEW)
    assert service.prefill.stats().cached_tokens > 300
    service.assert_nothing_held()


def test_prefill_and_decode_of_other_weights_do_not_serve_a_request_together(switched: Switched) -> None:
    service, (old, new) = switched.service, switched.names
    switched.load()
    switched.switches["p0"].switch(new)
    switched.until(lambda: service.decode.connections[0].welcome.weights == new, "the switch")  # type: ignore[union-attr]
    request = service.submit_one("r0", PROMPT)
    for _ in range(20):
        switched.poll()
    assert request.phase == "waiting"
    # even if decode knows nothing of it
    message = msg.Prefill(request_id="r9", attempt=9, prompt=(1, 2), within_s=9.0, weights=old)
    assert service.decode.connections[0].send(message)
    failed: list[str] = []
    service.decode._on_message = lambda _, one: failed.append(getattr(one, "reason", ""))  # type: ignore[method-assign]
    switched.until(lambda: failed, "the refusal")
    assert failed == [f"prefill process 'p0' has the weights {new}, but the request has {old}"]


def test_a_request_that_nobody_can_begin_is_handed_back_before_the_switch(switched: Switched) -> None:
    service, (_, new) = switched.service, switched.names
    switched.load()
    switched.switches["p0"].switch(new)
    switched.until(lambda: service.decode.connections[0].welcome.weights == new, "the switch")  # type: ignore[union-attr]
    request = service.submit_one("r0", PROMPT)
    switched.poll()
    assert request.phase == "waiting", "a prefill process of its weights may still come"
    switched.switches["d0"].switch(new)
    for _ in range(20):
        switched.poll()
    assert service.ended["r0"].elsewhere
    assert (
        "no prefill process has the weights that decode process 'd0' has until its change" in service.ended["r0"].error
    )
    assert service.decode.stats().failed == 0
    assert switched.switches["d0"].name == new
    service.assert_nothing_held()


def test_refusals_do_not_count_as_attempts(tmp_path: Path) -> None:
    switched = Switched(tmp_path, prefills=5)
    try:
        service = switched.service
        request = service.submit_one("r0", PROMPT[:40])
        for number in range(4):
            service.decode.poll()  # asks
            assert request.prefill is not None
            scheduler = service.prefills[request.prefill.name]
            scheduler._is_paused = True  # decode does not know it yet
            service.until(lambda number=number: request.refusals == number + 1, "the refusal")
        switched.until(lambda: service.ended, "the answer of the last one")
        assert service.tokens["r0"] == own_tokens(switched.models[0], PROMPT[:40], NEW)
        assert service.ended["r0"].weights == switched.names[0]
    finally:
        switched.close()


def test_a_directory_that_cannot_be_loaded_is_told_and_a_switch_without_weights_does_nothing(
    switched: Switched, tmp_path: Path
) -> None:
    for answer in switched.load(str(tmp_path / "nothing")):
        assert "does not exist" in answer.error
        assert answer.weights == ""
    switched.load()
    for switch in switched.switches.values():
        switch.load("")  # drops what was loaded
        switch.switch(switched.names[1])
        assert not switch.attend()
    switched.service.serve([PROMPT])
    assert switched.service.tokens["r0"] == own_tokens(switched.models[0], PROMPT, NEW)
