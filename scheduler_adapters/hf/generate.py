"""`PagedGenerator`: greedy generation for a batch of prompts over a manager's pages, as one call."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcache.errors import InvalidParamsError
from kvcache.manager import PagedKVCacheManager
from kvcache.weights import Running, check_running
from scheduler_adapters.errors import GenerationError, UnsupportedModelError
from scheduler_adapters.hf.recurrent import groups_of
from scheduler_adapters.hf.runner import HFRunner, kv_params_of, num_layers_of, paged_attention
from scheduler_adapters.hf.weights import ModelWeights
from scheduler_adapters.loop import Request, ServingLoop

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Generation settings that can change the result of greedy decoding, each with the values besides None that do not.
_CHANGES_GREEDY: tuple[tuple[tuple[object, ...], tuple[str, ...]], ...] = (
    ((0,), ("no_repeat_ngram_size", "min_length", "min_new_tokens")),
    ((1,), ("repetition_penalty", "guidance_scale", "num_beams")),
    (([],), ("suppress_tokens", "begin_suppress_tokens")),
    ((), ("bad_words_ids", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id", "stop_strings")),
    ((), ("exponential_decay_length_penalty", "watermarking_config")),
)


class PagedGenerator:
    """Generates tokens for batches of prompts over a manager's pages, with continuous batching and chunked prefill.

    Except for rounding, the output for each prompt equals the output of the model's own `generate(do_sample=False)`. If
    the manager caches prefixes, a call reuses the pages of earlier calls. Between calls the model is unchanged, so its
    own `generate` works. The manager may have other users at the same time. `hf.manager_for` builds a manager that fits
    a model. A step runs at most `token_budget` tokens, but at least one for each request that decodes.

    Raises `InvalidParamsError` if the manager's pages are for other layers, heads or element types. Raises
    `UnsupportedModelError` if the model cannot run over pages, or if its generation settings change greedy decoding in
    a way that this class does not compute. Both are ValueErrors.
    """

    def __init__(self, model: PreTrainedModel, manager: PagedKVCacheManager, token_budget: int = 512) -> None:
        _check_settings(model)
        _check_pages(model, manager)
        runner = HFRunner(model, manager.states)
        self._model = model
        self._manager = manager
        self._loop = ServingLoop(manager, runner, token_budget)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 32, cache_salt: str | None = None
    ) -> list[list[int]]:
        """Returns the tokens that follow each prompt: at most `max_new_tokens`, including the end token if it occurs.

        Calls share cached pages only if they have the same `cache_salt`. No page is held after the call, even if it
        raises.

        Raises:
            InvalidRequestError: (a ValueError) a prompt is empty, or has a token that the model does not know.
            PromptTooLongError: (a RuntimeError) a prompt and its new tokens can never fit.
            GenerationError: (a RuntimeError) other users hold so many pages or rows of the manager that no prompt can
                run.
        """
        call = uuid.uuid4().hex[:8]  # the manager may have other users
        requests = [
            Request(f"{call}/prompt-{number}", prompt, max_new_tokens, cache_salt=cache_salt)
            for number, prompt in enumerate(prompts)
        ]
        for request in requests:
            self._loop.context_for(request)  # refuses a request before any other is queued
        try:
            with paged_attention(self._model):
                return self._run(requests)
        finally:
            for request in requests:
                self._loop.abort(request.request_id)
                if self._manager.contains(request.request_id):
                    self._manager.release(request.request_id)

    def load_weights(self, path: str | Path, running: Running = "finish") -> str:
        """Gives the model the weights of a directory of the same architecture, and tells the manager their name.

        No later call meets pages of the weights of before, and if these are loaded again, their pages are found again.
        Call this between two calls of `generate`. `running` says what other users' running requests do, as in
        `PagedKVCacheManager.set_weights`. If the manager was made with `weights=bytes.fromhex(model_name(model))`, the
        pages of the first weights are found again, too.

        Returns:
            The `model_name` of the weights.

        Raises:
            ModelLoadError: (a ValueError) the directory does not fit, or there is too little memory for both weights.
                Nothing has changed.
            InvalidRequestError: (a ValueError) `running` is invalid.
        """
        check_running(running)
        weights = ModelWeights(self._model)
        weights.put(weights.load(path))
        self._manager.set_weights(bytes.fromhex(weights.name), running)
        return weights.name

    def _run(self, requests: Sequence[Request]) -> list[list[int]]:
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            self._loop.add(request)
        while self._loop.has_work:
            outputs = self._loop.step()
            if self._loop.fetching and not self._loop.num_running:
                time.sleep(0.001)
            elif not outputs and not self._loop.num_running:
                manager = self._manager
                held = manager.total_num_pages - manager.num_free_blocks
                raise GenerationError(
                    f"{self._loop.num_waiting} prompts wait, but no request runs: other users of the manager hold "
                    f"{held} of {manager.total_num_pages} pages, or all rows"
                )
            for output in outputs:
                if output.token is None:
                    raise GenerationError(output.error)
                tokens[output.request_id].append(output.token)
        return list(tokens.values())


def _check_pages(model: PreTrainedModel, manager: PagedKVCacheManager) -> None:
    wanted, given = kv_params_of(model.config, dtype=model.dtype), manager.params
    pairs = [(name, getattr(given, name), getattr(wanted, name)) for name in ("n_kv_heads", "head_dim", "dtype")]
    for name, has, needs in [("num_layers", manager.num_layers, num_layers_of(model.config)), *pairs]:
        if has != needs:
            raise InvalidParamsError(
                f"{name} of the manager's pages is {has}, but {type(model).__name__} needs {needs}"
            )
    if given.groups and given.groups != groups_of(model.config):
        raise InvalidParamsError(f"groups of the manager are not those of {type(model).__name__}")


def _check_settings(model: PreTrainedModel) -> None:
    for name, neutral in ((name, neutral) for neutral, names in _CHANGES_GREEDY for name in names):
        value = getattr(model.generation_config, name, None)
        if value is not None and value not in neutral:
            raise UnsupportedModelError(
                f"generation_config.{name} is {value!r}: only plain greedy decoding is supported; set it to None"
            )
