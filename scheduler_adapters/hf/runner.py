"""Runs Hugging Face `transformers` causal language models on our pages, through its attention interface.

No model code is copied: the model's own layers run, and call `paged_attention_forward` to attend. Hybrid models
(attention and recurrent layers) keep their states in state pages; see `scheduler_adapters.hf.recurrent`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch

from kvcache.layer_groups import layer_tables
from kvcache.manager import PagedKVCacheManager
from kvcache.params import KVCacheParams, KVCacheQuantizationConfig
from kvcache.states.state_memory import page_bytes, state_layouts
from kvcache.states.state_pages import StatePages
from kvcache.types import RaggedKVCacheInputs
from scheduler_adapters.base import RunTokens
from scheduler_adapters.errors import MissingExtraError, ModelInUseError, ModelLoadError, UnsupportedModelError
from scheduler_adapters.hf.paged_attention import PagedBatch, PagedLatents, no_attention_mask, paged_attention_forward
from scheduler_adapters.hf.recurrent import (
    NO_MASKS,
    STATE_FORMS,
    PagedStates,
    check_states_known,
    check_supported,
    groups_of,
    kv_layers_of,
    latent_elements_of,
    recurrent_layers_of,
    state_shape_of,
    text_config_of,
)
from scheduler_adapters.hf.tiny import VOCAB_SIZE, ByteTokenizer, tiny_llama

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION = "pagewire"
_TIE = 1e-3
# for each model, the id of the thread whose call has switched the model's attention
_switched: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_switching = Lock()


class Tokenizer(Protocol):
    """The part of a tokenizer that the demo and the frontend use."""

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of `text`."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of tokens; an incomplete character becomes U+FFFD."""
        ...


class HFRunner:
    """Computes greedy next tokens of a batch whose keys and values lie in pages.

    The model may be any causal model of `transformers` that uses the library's attention interface. The model attends
    over pages only during a call to the runner, so its own `generate` works between calls. Switching takes about 0.15
    ms per call. If the model has no other use, call `attend_over_pages` once to save this time. A hybrid model needs
    the `states` of its manager, for all replicas.

    Runners in several threads, such as those of two overlapped loops, may share a model only after `attend_over_pages`.
    Otherwise one thread would switch the attention during another thread's call, which then raises `ModelInUseError`.

    Raises:
        UnsupportedModelError: a layer keeps data that fits neither KV pages nor state pages, or the model ignores the
            attention interface.
        ModelInUseError: another thread's call has switched the model's attention.
    """

    def __init__(self, model: PreTrainedModel, states: Sequence[StatePages] = ()) -> None:
        _register()
        check_supported(model.config)
        check_states_known(model)
        self.model = model
        self.eos_token_ids = eos_token_ids_of(model)
        embeddings: Any = model.get_input_embeddings()
        self.vocab_size = int(embeddings.weight.shape[0])
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._cache_argument = cache_argument_of(model)
        # For each number of block tables: a dict from each attention layer to its block table and its index in that
        # table.
        layers = kv_layers_of(model.config)
        self._layers: dict[int, dict[int, tuple[int, int]]] = {}
        for groups in ((), groups_of(model.config)):
            tables = layer_tables(groups, len(layers))
            self._layers[len(tables.tables)] = {layers[at]: position for at, position in tables.positions.items()}
        self._has_latents = latent_elements_of(model.config) > 0
        self._recurrent = {layer: index for index, layer in enumerate(recurrent_layers_of(model.config))}
        if self._recurrent and not states:
            raise UnsupportedModelError(
                f"{model.config.model_type}: layer {min(self._recurrent)} is recurrent: pass the manager's state pages"
            )
        self._states: Sequence[StatePages] = states if self._recurrent else ()
        # In transformers, Mamba-1 layers continue from a state only if they are given a single token; with more tokens
        # they start over.
        self._one_by_one = STATE_FORMS.get(text_config_of(model.config).model_type) == "mamba1"
        with paged_attention(model):  # entering this block raises an error if the model ignores the interface
            pass

    def run(self, batch: Sequence[RunTokens], inputs: Sequence[RaggedKVCacheInputs]) -> list[int]:
        """Runs tokens `[start_idx, active_idx)` of each request, and returns the greedy token that follows.

        `inputs` are the inputs of one replica, fetched for this batch, with one entry per shard. If a request has
        `active_idx < end_idx`, this was not its last chunk: ignore its token.
        """
        return self.logits(batch, inputs).argmax(-1).cpu().numpy().tolist()

    def draft(self, request_id: str) -> bool:
        """Returns whether the request's next run may end with drafted tokens.

        A request with a recurrent state needs a second state page for drafts. Returns False if no such page is free.
        """
        return not self._states or self._states_of(request_id).draft(request_id)

    def verify(
        self, batch: Sequence[RunTokens], inputs: Sequence[RaggedKVCacheInputs], drafted: Sequence[int]
    ) -> list[list[int]]:
        """Like `run`, for requests whose last active tokens are guesses.

        `drafted` has the number of guesses of each request.

        Returns `drafted + 1` greedy tokens for each request: one for the position of each guess, and one after the last
        guess. All guesses before the first difference from the greedy tokens are right. The next token is the greedy
        token at the first difference, or after the last guess if there is no difference.
        """
        found: list[int] = self.logits(batch, inputs, drafted).argmax(-1).cpu().numpy().tolist()
        ends = np.cumsum([count + 1 for count in drafted]).tolist()
        return [found[end - count - 1 : end] for end, count in zip(ends, drafted, strict=True)]

    @torch.inference_mode()
    def logits(
        self, batch: Sequence[RunTokens], inputs: Sequence[RaggedKVCacheInputs], drafted: Sequence[int] = ()
    ) -> torch.Tensor:
        """Returns the logits after the last active token of each request, `[batch, vocabulary]`, in the model's dtype.

        With `drafted`, the result also has the logits before each of the last `drafted` tokens of a request. Its shape
        is then `[sum(drafted) + batch, vocabulary]`.
        """
        with paged_attention(self.model):
            return self._logits(batch, inputs, drafted or [0] * len(batch))

    def _logits(
        self, batch: Sequence[RunTokens], inputs: Sequence[RaggedKVCacheInputs], before: Sequence[int]
    ) -> torch.Tensor:
        elsewhere = [shard.blocks.device for shard in inputs if shard.blocks.device != self.model.device]
        if elsewhere:
            raise UnsupportedModelError(
                f"the model is on {self.model.device}, but some of its pages are on {elsewhere[0]}"
            )
        if not self._states:
            return self._forward(batch, inputs, [(context.start_idx, context.active_idx) for context in batch], before)
        states = self._states_of(batch[0].request_id)
        # Recurrent layers need rows of equal length, so requests with equally many tokens run together, one row each.
        kinds = [
            (context.active_length, count, self._one_by_one and context.start_idx > 0)
            for context, count in zip(batch, before, strict=True)
        ]
        parts: dict[int, torch.Tensor] = {}
        for kind in set(kinds):
            indices = [index for index, other in enumerate(kinds) if other == kind]
            rows = [shard._replace(lookup_table=shard.lookup_table[..., indices, :]) for shard in inputs]
            mine = [batch[index] for index in indices]
            parts |= zip(indices, self._forward_rows(mine, rows, states, *kind), strict=True)
        return torch.cat([parts[index] for index in range(len(batch))])

    def _states_of(self, request_id: str) -> StatePages:
        """Returns the state pages of the request's replica."""
        return next((states for states in self._states if states.holds(request_id)), self._states[0])

    def _forward_rows(
        self,
        batch: Sequence[RunTokens],
        inputs: Sequence[RaggedKVCacheInputs],
        states: StatePages,
        length: int,
        before: int,
        one_by_one: bool,
    ) -> torch.Tensor:
        """Runs `length` tokens of each request, each request in a separate row.

        All tokens of a row run in one pass. With `one_by_one`, each token runs in a separate pass. Returns the logits
        after each of the last `before + 1` tokens of a row: `[batch, before + 1, vocabulary]`.
        """
        starts, names = [context.start_idx for context in batch], [context.request_id for context in batch]
        pages = states.pages_at(names, starts)
        cache = PagedStates(states, self._recurrent, pages, states.written(names, pages))
        step = 1 if one_by_one else length
        wanted = [0 if one_by_one else before] * len(batch)
        passes = [
            self._forward(batch, inputs, [(start + done, start + done + step) for start in starts], wanted, cache)
            for done in range(0, length, step)
        ]
        cache.store([context.active_idx for context in batch])
        last = [logits.view(len(batch), -1, logits.shape[-1]) for logits in passes[-1 - before :]]
        return torch.cat(last, dim=1)

    def _forward(
        self,
        batch: Sequence[RunTokens],
        inputs: Sequence[RaggedKVCacheInputs],
        spans: Sequence[tuple[int, int]],
        before: Sequence[int],
        cache: PagedStates | None = None,
    ) -> torch.Tensor:
        """Runs spans of the requests' tokens as one packed row.

        With a `cache` of states, each request gets its own row.

        Returns the logits after each of the last `before + 1` tokens of each request. With a `cache`, `before` is the
        same for all requests.
        """
        count = inputs[0].lookup_table.shape[0] if inputs[0].lookup_table.ndim == 3 else 1
        if count not in self._layers:
            raise UnsupportedModelError(
                f"the pages have {count} block tables, but the model's layers use {max(self._layers)}"
            )
        paged = PagedBatch(
            inputs, [start for start, _ in spans], [end - start for start, end in spans], self._layers[count]
        )
        tokens = np.concatenate([context.tokens[slice(*span)] for context, span in zip(batch, spans, strict=True)])
        rows = 1 if cache is None else len(batch)
        keep = paged.last_rows if cache is None else torch.tensor([-1], device=self.model.device)
        if any(before):
            ends: list[int] = keep.cpu().numpy().tolist()
            indices = [range(end - count, end + 1) for end, count in zip(ends, before, strict=False)]
            keep = torch.tensor([*chain(*indices)], device=self.model.device)
        past = PagedLatents(paged) if self._has_latents else None
        if cache is not None:
            cache.begin(paged, latents=self._has_latents)
            past = cache
        output = self.model(
            input_ids=torch.as_tensor(tokens, dtype=torch.int64, device=self.model.device).view(rows, -1),
            position_ids=paged.positions.view(rows, -1),
            use_cache=False,
            paged_batch=paged,
            **({} if past is None else {self._cache_argument: past}),
            **({} if cache is None else {"attention_mask": NO_MASKS}),
            **({"logits_to_keep": keep} if self._keeps_logits else {}),
        )
        return (output.logits if self._keeps_logits else output.logits[:, keep]).flatten(0, 1)


def cache_argument_of(model: PreTrainedModel) -> str:
    """The name of the model's cache argument: `past_key_values` before transformers 5.24, `cache` since then."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def load_model(path: str | Path | None, seed: int = 0, device: str = "cpu") -> PreTrainedModel:
    """Returns the model that `save_pretrained` wrote to a directory, in float32; for None, the small Llama of `seed`.

    The function downloads nothing. It drops the generation settings that change greedy decoding (a repetition penalty
    and the like) and keeps the end-of-sequence tokens. Raises `MissingExtraError` if `transformers` is not installed.
    Raises `ModelLoadError` if the directory or the device does not exist, the directory has no model, or weights are
    missing or have another shape.
    """
    transformers = _transformers()
    model: Any = tiny_llama(seed) if path is None else _load_directory(Path(path))
    eos = sorted(eos_token_ids_of(model))
    pad = model.generation_config.pad_token_id
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, eos_token_id=eos or None, pad_token_id=eos[0] if pad is None and eos else pad
    )
    try:
        return model.eval().to(device)
    except (RuntimeError, AssertionError) as error:  # torch raises these errors for an unknown or absent device
        raise ModelLoadError(f"the model cannot be put on device {device!r}: {_line(error)}") from error


def load_tokenizer(path: str | Path | None, vocab_size: int) -> Tokenizer:
    """Returns the tokenizer saved beside a model, or the byte tokenizer if there is none."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if path is None or not any((Path(path) / name).is_file() for name in names):
        return ByteTokenizer(vocab_size)
    transformers = _transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise ModelLoadError(f"model directory {str(path)!r}: its tokenizer cannot be read: {_line(error)}") from error


def vocab_size_of(path: str | Path | None) -> int:
    """Returns the vocabulary size of a directory's model without loading its weights. Raises as `load_model`."""
    if path is None:
        return VOCAB_SIZE
    _check_directory(Path(path))
    try:
        return text_config_of(_transformers().AutoConfig.from_pretrained(path, local_files_only=True)).vocab_size
    except Exception as error:
        raise ModelLoadError(
            f"model directory {str(path)!r}: its configuration cannot be read: {_line(error)}"
        ) from error


def kv_params_of(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    page_size: int | None = None,
    enable_prefix_caching: bool | None = None,
    n_devices: int = 1,
    data_parallel_degree: int = 1,
    group_layers: bool = False,
    kvcache_quant_config: KVCacheQuantizationConfig | None = None,
) -> KVCacheParams:
    """Returns cache parameters for a model; `num_layers_of` gives the manager's layer count.

    With `group_layers`, layers that see only a window or a chunk get block tables of their own. These tables give back
    pages that no later query sees. The pages of such a cache can be handed over only to processes with the same block
    tables. Without `group_layers`, every page is kept until its request ends. `dtype` and `kvcache_quant_config` may
    choose 8-bit pages with a scale for each token and head, whatever the model's dtype. If `enable_prefix_caching` is
    None, caching is on, except for models with recurrent layers, because their cached states take memory that pages
    could use.

    Raises:
        UnsupportedModelError: the model cannot run over pages.
        InvalidParamsError: the heads cannot be split over the devices.
    """
    check_supported(config)
    recurrent = recurrent_layers_of(config)
    text = text_config_of(config)
    heads, latent = text.num_attention_heads, latent_elements_of(config)
    return KVCacheParams(
        dtype=dtype,
        n_kv_heads=1 if latent else getattr(text, "num_key_value_heads", None) or heads,
        head_dim=latent or getattr(text, "head_dim", None) or text.hidden_size // heads,
        is_mla=latent > 0,
        enable_prefix_caching=not recurrent if enable_prefix_caching is None else enable_prefix_caching,
        page_size=page_size,
        n_devices=n_devices,
        data_parallel_degree=data_parallel_degree,
        groups=groups_of(config) if group_layers else (),
        kvcache_quant_config=kvcache_quant_config,
    )


def num_layers_of(config: PretrainedConfig) -> int:
    """Returns the number of layers that keep keys and values."""
    return len(kv_layers_of(config))


def manager_for(
    model: PreTrainedModel,
    params: KVCacheParams,
    max_batch_size: int,
    max_seq_len: int,
    devices: Sequence[torch.device | str],
    **kwargs: Any,
) -> PagedKVCacheManager:
    """Returns a manager that fits a model. It adds the states of the model's recurrent layers to `params`, if any."""
    layers = num_layers_of(model.config)
    if recurrent_layers_of(model.config):
        params = dataclasses.replace(params, states=state_shape_of(model))
    return PagedKVCacheManager(params, max_batch_size, max_seq_len, layers, devices, **kwargs)


def state_bytes_of(model: PreTrainedModel, shards: int, pages: int) -> int:
    """Returns how many bytes of a manager's budget `pages` state pages take, over all shards; 0 without states.

    If `params.share_state_memory` is False, each replica has one page for each request that may run, plus
    `state_copies`.
    """
    if not recurrent_layers_of(model.config):
        return 0
    return (pages + 1) * page_bytes(state_layouts(state_shape_of(model), shards))


def eos_token_ids_of(model: PreTrainedModel) -> frozenset[int]:
    """Returns the tokens at which the model's own `generate` stops."""
    settings: Any = model.generation_config
    eos: int | list[int] | None = settings.eos_token_id
    return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])


def own_attention(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """A `with` block in which the model uses its own attention (SDPA if possible).

    The previous attention is restored afterwards.
    """
    return _attention(model, "sdpa" if getattr(model, "_supports_sdpa", True) else "eager")


@contextmanager
def paged_attention(model: PreTrainedModel) -> Generator[Any]:
    """A `with` block in which the model attends over pages, in evaluation mode.

    Both settings are restored afterwards.
    """
    if _attention_of(model) == ATTENTION:
        _refuse_shared(model)
        yield model
        return
    _register()
    training = [module for module in model.modules() if module.training]
    with _attention(model, ATTENTION):
        try:
            for module in training:
                module.training = False
            yield model
        finally:
            for module in training:
                module.training = True


def attend_over_pages(model: PreTrainedModel) -> None:
    """Makes the model attend over pages, in evaluation mode, from now on. `own_attention` undoes this for a block."""
    _register()
    _set_attention(model.eval(), ATTENTION)


@contextmanager
def _attention(model: Any, name: str) -> Generator[Any]:
    with _switching:
        is_outermost = _refuse_shared(model)
        before = _attention_of(model)
        _switched[model] = get_ident()
    try:
        _set_attention(model, name)
        yield model
    finally:
        try:
            _set_attention(model, before)
        finally:
            if is_outermost:
                del _switched[model]


def _refuse_shared(model: Any) -> bool:
    """Raises `ModelInUseError` if another thread has switched the attention.

    Returns whether no thread has switched it.
    """
    owner = _switched.get(model)
    if owner not in {None, get_ident()}:
        raise ModelInUseError(
            f"{type(model).__name__}: a call of another thread has switched its attention and will switch it back: "
            "give each thread a model of its own, or call attend_over_pages(model) once"
        )
    return owner is None


@torch.inference_mode()
def reference_tokens(model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Returns the tokens that the model's own `generate(do_sample=False)` appends to `prompt`, with the end token."""
    ids = torch.tensor([list(prompt)], device=model.device)
    with own_attention(model) as own:
        # Without an explicit mask, `generate` guesses one from the pad token, which may be a real token of the prompt.
        mask = torch.ones_like(ids)
        output = own.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens)
    return output[0, len(prompt) :].tolist()


@torch.inference_mode()
def is_rounding_tie(model: PreTrainedModel, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether rounding explains the first difference between two outputs.

    Returns True if the model's own logits for the two tokens differ by less than 1e-3 of the spread of all logits at
    that position.
    """
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if same is None:
        return False  # the outputs are equal, or one is a prefix of the other, so no two tokens differ
    ids = torch.tensor([[*prompt, *theirs[:same]]], device=model.device)
    with own_attention(model) as own:
        logits = own(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, -1]
    gap = (logits[ours[same]] - logits[theirs[same]]).abs()
    return bool(gap < _TIE * (logits.max() - logits.min()))


def _transformers() -> Any:
    """Returns the `transformers` module, which has few types."""
    try:
        import transformers  # noqa: PLC0415  (heavy, and of an optional extra)
    except ImportError as error:
        raise MissingExtraError(f"a model needs the extra 'serve' (pip install 'pagewire[serve]'): {error}") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _register() -> None:
    transformers = _transformers()
    transformers.AttentionInterface.register(ATTENTION, paged_attention_forward)
    transformers.AttentionMaskInterface.register(ATTENTION, no_attention_mask)


def _attention_of(model: Any) -> str | None:
    return model.config._attn_implementation  # noqa: SLF001  (the library has no public getter)


def _set_attention(model: Any, name: str | None) -> None:
    model.set_attn_implementation(name)
    if _attention_of(model) != name:  # set_attn_implementation only logs a refusal
        raise UnsupportedModelError(f"{type(model).__name__} does not use the attention interface of transformers")


def _check_directory(path: Path) -> None:
    if not (path / "config.json").is_file():
        state = "has no config.json" if path.exists() else "does not exist"
        raise ModelLoadError(f"model directory {str(path)!r} {state}")


def _load_directory(path: Path) -> PreTrainedModel:
    transformers = _transformers()
    _check_directory(path)
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except Exception as error:
        raise ModelLoadError(f"model directory {str(path)!r} cannot be loaded: {_line(error)}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"model directory {str(path)!r} lacks {len(missing)} weights ({missing[0]!r} is the first)"
        )
    return model


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
