"""Helpers for tests of served models. They make a manager and a loop over it, and run the loop to its end."""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from kvcache.sizing import page_bytes
from scheduler_adapters.hf.runner import (
    HFRunner,
    kv_params_of,
    manager_for,
    num_layers_of,
    reference_tokens,
    state_bytes_of,
)
from scheduler_adapters.hf.tiny import ByteTokenizer
from scheduler_adapters.loop import Output, Request, ServingLoop

HEAD = "Pages are fixed blocks of tokens, and a table says which of them a request owns. " * 2
TEXTS = (HEAD + "Why?", "x", HEAD + "Who frees them, and when?", "Another text altogether: " * 5, HEAD + "Why?")
PROMPTS = [ByteTokenizer().encode(text) for text in TEXTS]

_answers: WeakKeyDictionary[Any, dict[tuple[Any, ...], list[int]]] = WeakKeyDictionary()


def own_tokens(model: Any, prompt: Sequence[int], new: int) -> list[int]:
    """Returns the same answers as `reference_tokens`, and keeps them as long as the model exists. The model's weights
    must not change. Its end-of-sequence token may change.
    """
    key = str(model.generation_config.eos_token_id), tuple(prompt)
    known = _answers.setdefault(model, {})
    answers = known.get((*key, new))
    if answers is None:
        answers = known[*key, new] = reference_tokens(model, prompt, new)
    return list(answers)


class Unwalked(OrderedDict[str, Any]):
    """Requests by id. Code may read the first request and requests with news. An iteration over all requests raises an
    error.
    """

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        yield next(iter(super().items()))
        raise AssertionError("every request is looked at")

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        raise AssertionError("every request is looked at")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("every request is looked at")


def new_manager(
    model: Any,
    pages: int,
    page_size: int = 16,
    rows: int = 8,
    max_seq_len: int = 4096,
    states: dict[str, Any] | None = None,
    **params: Any,
) -> Any:
    """Returns a manager for the model. Each replica has this many token pages, and state pages in separate memory.
    `states` has the params for state copies of a model with recurrent layers.
    """
    cache = kv_params_of(model.config, page_size=page_size, **params)
    memory = pages * page_bytes(cache, num_layers_of(model.config), page_size) * cache.data_parallel_degree
    if state_bytes_of(model, cache.n_devices, 1):
        cache = dataclasses.replace(cache, share_state_memory=False, **(states or {}))
    dp = cache.data_parallel_degree
    memory += dp * state_bytes_of(model, cache.tensor_parallel_degree, rows // dp + (cache.state_copies or 0))
    devices = ["cpu"] * cache.n_devices
    options: dict[str, Any] = {"available_cache_memory": memory, "enable_runtime_checks": True}
    return manager_for(model, cache, rows, max_seq_len, devices, **options)


def new_loop(model: Any, pages: int = 200, budget: int = 64, **manager: Any) -> ServingLoop:
    made = new_manager(model, pages, **manager)
    return loop_of(made, model, budget)


def loop_of(manager: Any, model: Any, budget: int = 64) -> ServingLoop:
    """Returns a loop that runs the model over an existing manager. `budget` is the largest number of tokens of a
    step.
    """
    return ServingLoop(manager, HFRunner(model, manager.states), token_budget=budget)


def serve(loop: ServingLoop, requests: Sequence[Request], limit: int = 2000) -> dict[str, list[Output]]:
    for request in requests:
        loop.add(request)
    outputs: dict[str, list[Output]] = {request.request_id: [] for request in requests}
    for _ in range(limit):
        if not loop.has_work:
            return outputs
        for output in loop.step():
            outputs[output.request_id].append(output)
    raise AssertionError(f"after {limit} steps {loop.num_running} requests run and {loop.num_waiting} wait")


def requests_of(prompts: Sequence[list[int]], new: int, **fields: Any) -> list[Request]:
    return [Request(f"r{i}", prompt, new, **fields) for i, prompt in enumerate(prompts)]


def tokens_of(outputs: dict[str, list[Output]]) -> list[list[int | None]]:
    return [[output.token for output in whole] for whole in outputs.values()]


def assert_nothing_held(manager: Any) -> None:
    manager.check()
    assert manager.num_free_blocks == manager.total_num_pages
    assert not any(group.num_held for group in manager.states)
