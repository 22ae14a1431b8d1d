"""Reads from a model's `config.json` which caches its layers have. Uses `transformers`."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from kvcache import InvalidParamsError, PageLayout
from kvcache.params import StateForm, StateShape
from kvcache.states.state_memory import page_bytes, state_layouts
from scheduler_adapters.errors import MissingExtraError, PlanError

CacheKind = Literal["full", "window", "chunked", "latent", "state", "conv"]

# The caches of each kind of layer in transformers. Some caches keep data for each token, and others keep a state for
# each request.
_KEEPS: dict[str, tuple[CacheKind, ...]] = {
    "full_attention": ("full",),
    "sliding_attention": ("window",),
    "chunked_attention": ("chunked",),
    "linear_attention": ("state",),
    "conv": ("conv",),
    "hybrid": ("full", "state"),
    "hybrid_sliding": ("window", "state"),
    "dummy": (),  # such a layer has no attention, or reads the cache of another layer
}
_WINDOW_FIELDS = {"window": "sliding_window", "chunked": "attention_chunk_size"}
# Four config fields for each family of models: the number of heads, channels of a head, number of groups of heads that
# share one B and one C (queries and keys), and channels of B and C. `_KERNEL_FIELDS` has the field for the kernel. The
# families, in order: gated delta networks; Mamba-2 in Bamba, Granite 4 and Falcon-H1; Mamba-2 in Nemotron-H; Mamba-2 in
# Zamba2; and Kimi Linear, whose values, queries and keys have equal shapes.
_STATE_FIELDS = (
    *[("linear_num_value_heads", "linear_value_head_dim", "linear_num_key_heads", "linear_key_head_dim")],
    *[("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state")],
    *[("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")],
    *[("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state")],
    *[("linear_num_heads", "linear_head_dim", "linear_num_heads", "linear_head_dim")],
)
_KERNEL_FIELDS = ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim")
_MAMBA1_FIELDS = ("mamba_expand", "mamba_d_state", "mamba_d_conv")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.float8_e4m3fn}
_MOST = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class AlikeLayers:
    """Layers with equal caches. A cache keeps data for each token, or a state for each request."""

    kind: CacheKind
    layers: int
    heads: int = 0  # KV heads of the whole model; 1 for a latent, 0 for states
    width: int = 0  # elements of a token per head: key and value together, or the latent
    window: int = 0  # tokens that a layer looks back; 0 for all
    state: StateShape | None = None  # the states of all these layers together
    # how many of the `width` elements belong to the value; None means half of them, or 0 for a latent
    value_width: int | None = None

    @property
    def values(self) -> int:
        """The elements of a token's value per head; 0 for a latent."""
        if self.value_width is not None:
            return self.value_width
        return 0 if self.kind == "latent" else self.width // 2

    def state_bytes(self, tp: int) -> int:
        """Returns the bytes of a request's state on each of `tp` ranks. Raises as `state_layouts` does."""
        return page_bytes(self.state_layouts(tp)) // tp

    def state_layouts(self, tp: int) -> list[Mapping[str, PageLayout]]:
        """Returns the layout of a state on each of `tp` ranks. Raises `PlanError` if the ranks cannot split it."""
        try:
            return state_layouts(self.state, tp)
        except InvalidParamsError as error:
            raise PlanError(f"tensor parallelism {tp}: {error}") from error


@dataclass(frozen=True, slots=True)
class CachedModel:
    """The caches of all layers of a model."""

    name: str
    max_len: int | None  # the most positions of the model
    dtype: torch.dtype  # dtype of keys and values
    each: tuple[AlikeLayers, ...]

    @property
    def paged(self) -> tuple[AlikeLayers, ...]:
        """The layers that keep data for each token."""
        return tuple(one for one in self.each if one.heads)

    def state_bytes(self, tp: int) -> int:
        """Returns the bytes of a request's states on each of `tp` ranks."""
        return sum(one.state_bytes(tp) for one in self.each)


def read_model(folder: Path, kv_dtype: str = "auto") -> CachedModel:
    """Reads the caches of the model in this folder.

    Raises `PlanError` with the file, the field and the allowed values. Raises `MissingExtraError` if transformers is
    not installed.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise PlanError(f"{folder}: there is no config.json")
    config = _load(file)
    text = config.get_text_config()
    if getattr(text, "is_encoder_decoder", False):
        raise PlanError(f"{file}: is_encoder_decoder is true: only decoder-only models are supported")
    if getattr(text, "multi_query", False):
        raise PlanError(f"{file}: multi_query is true: give num_key_value_heads instead")
    dtype = _kv_dtype(file, config) if kv_dtype == "auto" else _DTYPES[kv_dtype]
    counts = Counter(_each_layer(file, config))
    each = tuple(_times(one, count) for one, count in counts.items())
    if not any(one.heads for one in each):
        raise PlanError(f"{file}: layer_types has no attention: there are no pages to plan for")
    return CachedModel(folder.resolve().name, getattr(text, "max_position_embeddings", None), dtype, each)


def _load(file: Path) -> Any:
    try:
        import transformers  # noqa: PLC0415 - takes seconds, and is of an extra
    except ImportError as error:
        raise MissingExtraError(
            f"reading a config.json needs transformers: pip install 'pagewire[plan]' ({error})"
        ) from error
    try:
        with warnings.catch_warnings():  # the warnings of transformers matter only for a model that runs
            warnings.simplefilter("ignore")
            transformers.logging.set_verbosity_error()
            auto: Any = transformers.AutoConfig
            return auto.from_pretrained(file.parent, local_files_only=True)
    except KeyError as error:
        raise PlanError(f"{file}: field {error} is missing") from error
    except Exception as error:
        text = " ".join(str(error).split())
        raise PlanError(f"{file}: transformers {transformers.__version__} cannot read it: {text[:400]}") from error


def _each_layer(file: Path, config: Any) -> Iterator[AlikeLayers]:
    """Yields the cache of each layer; a layer with two caches occurs twice."""
    from transformers import cache_utils  # noqa: PLC0415 - as above

    text, library = config.get_text_config(), cast("Any", cache_utils)
    try:
        kinds, _ = library.get_layer_types_and_kwargs(text)
    except AttributeError as error:
        raise PlanError(f"{file}: {error.name} is missing, and the kinds in layer_types need it") from error
    for number, (kind, own) in enumerate(zip(kinds, text.per_layer_config, strict=True)):
        if kind not in _KEEPS:
            raise PlanError(f"{file}: layer_types[{number}] is {kind!r}: one of {', '.join(_KEEPS)} is needed")
        for kept in _KEEPS[kind]:
            if kept == "state":
                yield AlikeLayers("state", 1, state=_state(file, own, number, config))
            elif kept == "conv":
                channels, kernel = _field(file, own, "hidden_size"), _field(file, own, "conv_L_cache")
                yield AlikeLayers("conv", 1, state=_of_channels(file, config, "short_conv", channels, 1, kernel))
            else:
                yield _attention(file, own, kept)


def _attention(file: Path, own: Any, kind: CacheKind) -> AlikeLayers:
    window = _field(file, own, _WINDOW_FIELDS[kind]) if kind in _WINDOW_FIELDS else 0
    if getattr(own, "kv_lora_rank", None):
        width = _field(file, own, "kv_lora_rank") + _field(file, own, "qk_rope_head_dim")
        return AlikeLayers("latent", 1, heads=1, width=width, window=window)
    queries = _field(file, own, "num_attention_heads")
    heads = _field(file, own, "num_key_value_heads", queries)
    wide = _field(file, own, "head_dim", _field(file, own, "hidden_size", queries) // queries)
    values = _field(file, own, "v_head_dim", wide)
    if (wide + values) % 2:
        raise PlanError(f"{file}: head_dim is {wide} and v_head_dim {values}: an even sum is needed")
    return AlikeLayers(kind, 1, heads=heads, width=wide + values, window=window, value_width=values)


def _state(file: Path, own: Any, number: int, config: Any) -> StateShape:
    dtype = _config_dtype(file, config)
    # MiniMax's lightning attention has as many heads as its softmax attention
    if hasattr(own, "linear_attn_alpha_factor"):
        heads = _field(file, own, "num_attention_heads")
        width = _field(file, own, "head_dim", _field(file, own, "hidden_size", heads) // heads)
        return StateShape(1, heads, width, heads, width, 1, dtype, dtype, form="linear")
    for names, kernel in zip(_STATE_FIELDS, _KERNEL_FIELDS, strict=True):
        if all(hasattr(own, name) for name in (*names, kernel)):
            try:
                return StateShape(1, *(_field(file, own, name) for name in (*names, kernel)), conv_dtype=dtype)
            except InvalidParamsError as error:
                raise PlanError(f"{file}: {', '.join((*names, kernel))}: {error}") from error
    if all(hasattr(own, name) for name in _MAMBA1_FIELDS):
        expand, elements, kernel = (_field(file, own, name) for name in _MAMBA1_FIELDS)
        return _of_channels(file, config, "mamba1", expand * _field(file, own, "hidden_size"), elements, kernel)
    several = [(*names, kernel) for names, kernel in zip(_STATE_FIELDS, _KERNEL_FIELDS, strict=True)]
    known = "; or ".join(", ".join(names) for names in [*several, _MAMBA1_FIELDS])
    raise PlanError(
        f"{file}: layer_types[{number}] is recurrent, but its shape cannot be read: the fields {known} are needed"
    )


def _of_channels(file: Path, config: Any, form: StateForm, channels: int, elements: int, kernel: int) -> StateShape:
    """Returns the state of a layer in which each channel counts as a head with a matrix of `elements` elements."""
    try:
        return StateShape(1, channels, 1, 1, elements, kernel, _config_dtype(file, config), form=form)
    except InvalidParamsError as error:
        raise PlanError(f"{file}: {error}") from error


def _times(one: AlikeLayers, count: int) -> AlikeLayers:
    return replace(one, layers=count, state=None if one.state is None else replace(one.state, layers=count))


def _field(file: Path, config: Any, name: str, default: int | None = None) -> int:
    """Returns a positive whole number from a config. Returns the default if the config does not have the field."""
    value = getattr(config, name, None)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MOST:
        raise PlanError(f"{file}: {name} is {str(value)[:100]!r}: a whole number from 1 to {_MOST:,} is needed")
    return value


def _kv_dtype(file: Path, config: Any) -> torch.dtype:
    """Returns the dtype of keys and values: that of the checkpoint's KV quantisation, or else the model's own."""
    text = config.get_text_config()
    found: Any = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None) or {}
    told = cast("dict[str, Any]", found if isinstance(found, dict) else found.to_dict())
    scheme: Any = told.get("kv_cache_scheme")
    algorithm: Any = told.get("kv_cache_quant_algo")
    if scheme is None and algorithm is None:
        return _config_dtype(file, config)
    of_scheme = cast("dict[str, Any]", scheme if isinstance(scheme, dict) else {})
    if algorithm == "FP8" or (of_scheme.get("num_bits"), of_scheme.get("type")) == (8, "float"):
        return torch.float8_e4m3fn
    name, value = (
        ("kv_cache_scheme", told.get("kv_cache_scheme")) if algorithm is None else ("kv_cache_quant_algo", algorithm)
    )
    raise PlanError(
        f"{file}: quantization_config.{name} is {str(value)[:100]!r}: only 8-bit floats are supported; "
        "give the type of keys and values with --kv-dtype"
    )


def _config_dtype(file: Path, config: Any) -> torch.dtype:
    dtype = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise PlanError(
            f"{file}: dtype is {str(dtype)!r}: bfloat16, float16 or float32 is needed; --kv-dtype overrides it"
        )
    return dtype
