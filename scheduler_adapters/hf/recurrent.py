"""State shapes of hybrid `transformers` models (attention and recurrent layers), and a cache object over state pages.

A hybrid's recurrent layers take their state from the cache object that is passed to the model. `PagedStates` is such an
object: it reads the states of a batch from state pages, passes them to the layers, and writes them back after the pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvcache.layer_groups import LayerGroup, LayerKind
from kvcache.params import SSM_KIND, StateForm, StateShape
from kvcache.states.state_pages import StatePages
from scheduler_adapters.errors import UnsupportedModelError
from scheduler_adapters.hf.paged_attention import PagedBatch, PagedLatents

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
_BOTH_KINDS = {"hybrid"}  # layers that have attention and a recurrent part side by side
_RECURRENT_KINDS = {"linear_attention", "conv"}
_STATELESS_KINDS = {"mlp", "moe"}
# The model types whose recurrent layers are known, and the form of their state.
STATE_FORMS: dict[str, StateForm] = {
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"), "mamba2"),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), "gated_delta"),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), "gated_delta"),
    "jamba": "mamba1",
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), "short_conv"),
    "minimax": "linear",
}
# Model types that do not name the kinds of their layers and give all of them one `sliding_window`, if any.
_ALL_WINDOWS = {"mistral", "mixtral", "phi3", "qwen3_moe", "starcoder2"}
_NO_ATTENTION = "no layer attends, so there is nothing to keep in pages"
# Model types that are not served, each with the reason.
_UNSERVED: dict[str, str] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _NO_ATTENTION),
    "recurrent_gemma": "its recurrent layers keep their state in themselves, not in the given cache",
    "zamba": "its Mamba-1 layers divide their channels into heads, each with a projection of its own",
    "zaya": "its attention layers also keep the last token's values, and the inputs of two convolutions",
    **dict.fromkeys(("inkling_text", "inkling2_text"), "each of its layers keeps the inputs of several convolutions"),
    **dict.fromkeys(("glm5_next_text", "qwen4_exp_text"), "its attention layers also keep the keys of an indexer"),
}
# Model types whose attention layers pass latents to the cache object. The layers expand the latents that the cache
# object returns (`expand_kv`).
LATENT_MODEL_TYPES = {"deepseek_v3", "kimi_linear", "bailing_hybrid"}
# Layers use a mask only for padding, and nothing is padded here. A model call that receives this dict builds no masks.
NO_MASKS = {"full_attention": None, "sliding_attention": None, "linear_attention": None, "conv": None}


def text_config_of(config: Any) -> Any:
    """Returns the configuration of a model's text layers; its fields depend on the model."""
    return config.get_text_config()


def kv_layers_of(config: PretrainedConfig) -> list[int]:
    """Returns the numbers of the layers that keep keys and values, in order."""
    kinds = _kinds_of(config)
    if kinds is None:
        return list(range(int(text_config_of(config).num_hidden_layers)))
    return [layer for layer, kind in enumerate(kinds) if kind in ATTENTION_KINDS | _BOTH_KINDS]


def recurrent_layers_of(config: PretrainedConfig) -> list[int]:
    """Returns the numbers of the layers that keep a recurrent state, in order. The result may be empty."""
    kinds = _kinds_of(config) or ()
    return [layer for layer, kind in enumerate(kinds) if kind in _RECURRENT_KINDS | _BOTH_KINDS]


def groups_of(config: PretrainedConfig) -> tuple[LayerGroup, ...]:
    """Returns the layer groups of the attention layers. Empty if all attention layers keep every token.

    A group names its layers by their index in the cache.
    """
    text, layers = text_config_of(config), kv_layers_of(config)
    kinds, window = _kinds_of(config) or (), getattr(text, "sliding_window", None)
    alike = "sliding_attention" if window and text.model_type in _ALL_WINDOWS else "full_attention"
    named = [kinds[layer] if kinds else alike for layer in layers]
    of_kinds: tuple[tuple[str, LayerKind, int | None], ...] = (
        ("full_attention", "full", 0),
        ("sliding_attention", "window", window),
        ("chunked_attention", "chunked", getattr(text, "attention_chunk_size", None)),
    )
    groups: list[LayerGroup] = []
    for name, kind, tokens in of_kinds:
        indices = tuple(index for index, other in enumerate(named) if other == name)
        if indices and tokens is not None:
            groups.append(LayerGroup(kind, indices, tokens))
    every_layer = sum(len(group.layers) for group in groups) == len(layers)
    return tuple(groups) if every_layer and any(not group.keeps_all for group in groups) else ()


def latent_elements_of(config: PretrainedConfig) -> int:
    """Returns how many elements a layer of multi-head latent attention keeps for each token; 0 for other models."""
    text = text_config_of(config)
    known = text.model_type in LATENT_MODEL_TYPES
    return int(text.kv_lora_rank) + int(text.qk_rope_head_dim) if known else 0


def check_supported(config: PretrainedConfig) -> None:
    """Raises `UnsupportedModelError` if a layer keeps more than keys and values or a known state."""
    known, text = ATTENTION_KINDS, text_config_of(config)
    if text.model_type in _UNSERVED:
        raise UnsupportedModelError(f"{config.model_type}: not supported over pages: {_UNSERVED[text.model_type]}")
    if text.model_type in STATE_FORMS:
        known = known | _BOTH_KINDS | _RECURRENT_KINDS | _STATELESS_KINDS
    for layer, kind in enumerate(_kinds_of(config) or ()):
        if kind not in known:
            raise UnsupportedModelError(f"{config.model_type}: layer {layer} is {kind!r}: not supported over pages")
    if not kv_layers_of(config):
        raise UnsupportedModelError(f"{config.model_type}: not supported over pages: {_NO_ATTENTION}")
    # Temperature tuning computes positions from the index of a token in its row, which is not its position in a packed
    # batch.
    for name in ("kv_lora_rank", "num_kv_shared_layers", "attn_temperature_tuning"):
        if getattr(text, name, None) and not (name == "kv_lora_rank" and latent_elements_of(config)):
            raise UnsupportedModelError(f"{config.model_type}: {name} is set: not supported over pages")


def check_states_known(model: PreTrainedModel) -> None:
    """Raises `UnsupportedModelError` if a model declares itself stateful but its type is not known here.

    Such a model would run, but between two chunks it would lose a state that its configuration does not mention.
    """
    kind = text_config_of(model.config).model_type
    if getattr(model, "_is_stateful", False) and kind not in STATE_FORMS:
        raise UnsupportedModelError(f"{kind}: the model keeps a state for each request, whose form is not known here")


def state_shape_of(model: PreTrainedModel) -> StateShape:
    """Returns the shapes of a hybrid's recurrent states, as read from its recurrent layers, which must all be alike."""
    layers = recurrent_layers_of(model.config)
    named = "slope_rate" if STATE_FORMS[text_config_of(model.config).model_type] == "linear" else "conv_kernel_size"
    found: list[Any] = [module for module in model.modules() if hasattr(module, named)]
    mixers: dict[int, Any] = {mixer.layer_idx: mixer for mixer in found}
    if not layers or sorted(mixers) != layers:
        raise UnsupportedModelError(
            f"{model.config.model_type}: layers {layers} are recurrent, but the mixers are in layers {sorted(mixers)}"
        )
    form = STATE_FORMS[text_config_of(model.config).model_type]
    shapes = {_shape_of(mixer, form, len(layers)) for mixer in mixers.values()}
    if len(shapes) != 1:
        raise UnsupportedModelError(f"{model.config.model_type}: its recurrent layers differ in shape: {shapes}")
    return shapes.pop()


def _shape_of(mixer: Any, form: StateForm, layers: int) -> StateShape:
    if form == "linear":  # each head keeps a decayed sum of keys and values, in the layers' compute dtype
        sizes, dtype = (mixer.num_attention_heads, mixer.head_dim) * 2, mixer.qkv_proj.weight.dtype
        return StateShape(layers, *sizes, kernel=1, conv_dtype=dtype, ssm_dtype=dtype, form=form)
    conv = mixer.conv if form == "short_conv" else mixer.conv1d
    dtype = conv.weight.dtype
    if form == "mamba2":
        sizes = (mixer.num_heads, mixer.head_dim, mixer.n_groups, mixer.ssm_state_size)
    # Kimi's delta attention, which has a decay for each key channel, and keys and values of equal shape
    elif hasattr(mixer, "forget_gate"):
        sizes, dtype = (mixer.num_heads, mixer.head_dim) * 2, mixer.q_proj.weight.dtype
    elif form == "gated_delta":
        sizes = (mixer.num_v_heads, mixer.head_v_dim, mixer.num_k_heads, mixer.head_k_dim)
    else:
        sizes = (conv.in_channels, 1, 1, mixer.ssm_state_size if form == "mamba1" else 1)
    return StateShape(layers, *sizes, kernel=mixer.conv_kernel_size, conv_dtype=dtype, form=form)


def _kinds_of(config: PretrainedConfig) -> Sequence[str] | None:
    return getattr(text_config_of(config), "layer_types", None)


class PagedStates:
    """The cache object of a forward pass in which every request runs the same number of tokens.

    Only `store` writes pages.

    A recurrent layer either changes its state in place, or passes a new state to this object. A pass that fails has
    changed no page and can run again. `indices` maps each recurrent layer's index in the model to its index among the
    recurrent layers. `pages` is int64 `[requests]`, the state page of each request. `written` has the pages for the new
    states, if these differ from `pages`.
    """

    def __init__(
        self, states: StatePages, indices: Mapping[int, int], pages: torch.Tensor, written: torch.Tensor | None = None
    ) -> None:
        self._states = states
        self._indices = indices
        self._pages = pages
        self._written = pages if written is None else written
        self._batch: PagedBatch | None = None
        self._latents: PagedLatents | None = None
        self._conv: dict[int, torch.Tensor] = {}
        self._ssm: dict[int, torch.Tensor] = {}

    def begin(self, batch: PagedBatch, *, latents: bool) -> None:
        """Starts a pass over the tokens of `batch`. `latents` says whether the attention layers keep latents."""
        self._batch, self._latents = batch, PagedLatents(batch) if latents else None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:  # noqa: ARG002  (of the interface)
        """The last inputs of each convolved channel, `[requests, channels, kernel - 1]`."""
        if layer_idx not in self._conv:
            kinds = self._states.shape.conv_kinds
            self._conv[layer_idx] = self._states.read(self._indices[layer_idx], self._pages, kinds)
        return self._conv[layer_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:  # noqa: ARG002
        """The state matrices, `[requests, heads, *StateShape.matrix]`."""
        if layer_idx not in self._ssm:
            self._ssm[layer_idx] = self._states.read(self._indices[layer_idx], self._pages, (SSM_KIND,))
        return self._ssm[layer_idx]

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, **_: Any) -> torch.Tensor:
        """Appends new inputs, `[requests, channels, tokens]`, to the kept ones. Returns the kept and the new inputs."""
        kept = self.get_conv_state(layer_idx)
        whole = torch.cat([kept, conv_states], dim=-1)
        self._conv[layer_idx] = whole[..., -kept.shape[-1] :]
        return whole

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, **_: Any) -> torch.Tensor:
        """Replaces the state matrices of a layer."""
        self._ssm[layer_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """Like `get_recurrent_state`, but returns None if no request has a state yet.

        A layer that is given None runs its tokens in blocks, which is quicker.
        """
        state = self.get_recurrent_state(layer_idx)
        return state if state.any() else None

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Replaces the state matrices of a layer."""
        self._ssm[layer_idx] = linear_cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by attention layers. Writes latents to their pages; paged attention itself writes keys and values."""
        if self._batch is not None:
            self._batch.attending = layer_idx
        if self._latents is not None:
            self._latents.update(key_states, value_states, layer_idx)
        return key_states, value_states

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002  (of the interface)
        """Returns False, because old states are not kept for a rollback."""
        return False

    def store(self, tokens: Sequence[int]) -> None:
        """Writes every layer's state to its pages.

        `tokens` has the number of tokens that each request's state includes.
        """
        shape = self._states.shape
        parts = ((shape.conv_kinds, self._conv), ((SSM_KIND,) if shape.matrix else (), self._ssm))
        kept = [(kinds, states) for kinds, states in parts if kinds]
        used = [layer for layer in self._indices if all(layer in states for _, states in kept)]
        if len(used) != len(self._indices):
            raise UnsupportedModelError(
                f"the forward pass used the states of layers {used}, but layers {sorted(self._indices)} are recurrent"
            )
        for layer, index in self._indices.items():
            for kinds, states in kept:
                self._states.write(index, self._written, kinds, states[layer])
        self._states.advance(self._written, tokens)
