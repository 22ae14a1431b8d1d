"""The results of `pagewire plan` for a model and an amount of memory. `--json` writes these fields."""

from __future__ import annotations

import msgspec

from pagewire.plan.layers import CachedModel
from pagewire.plan.link import LinkLoad, Target, pulls
from pagewire.plan.memory import Choice, choice, choices
from pagewire.plan.options import PlanOptions
from pagewire.plan.trace import TracePlan
from pagewire.plan.ways import MemoryAsked


class KindOfLayer(msgspec.Struct, frozen=True):
    """One kind of layer in the whole model, with the bytes of its caches per token and per request."""

    kind: str
    layers: int
    heads: int
    key_elements: int  # elements of a key per head; for a latent, elements of the token, which stand for key and value
    value_elements: int  # elements of a value per head; 0 for a latent
    window: int
    token_bytes: int
    request_bytes: int


class MemoryPlan(msgspec.Struct, frozen=True):
    """The results of `pagewire plan`.

    Bytes of tokens and pages are counted on one rank, unless a field says otherwise.
    """

    model: str
    max_len: int | None
    kv_dtype: str
    memory: int
    page_size: int
    kinds: list[KindOfLayer]
    choices: list[Choice]
    chosen: Choice
    prefill_tp: int
    pulls: list[LinkLoad]
    # GB/s of keys and values that a busy prefill replica computes. Reading from a source is faster than computing only
    # if the source delivers more than this.
    made_gbps: float
    trace: TracePlan | None = None


def plan_memory(options: PlanOptions, model: CachedModel) -> MemoryPlan:
    """Returns how much fits into the memory, and the data that a hand-over moves.

    Lengths beyond the model's limit are replaced by the limit. Raises `PlanError` if `--tp` does not fit the model.
    """
    tp, most = options.tp or options.devices, model.max_len or max(options.lengths)
    lengths = sorted({min(length, most) for length in options.lengths})
    asked = MemoryAsked(options.memory, options.page_size, options.step_tokens, lengths)
    every = list(choices(model, options.devices, asked))
    if options.tp is None and every:
        tp = every[0].tp  # the largest number of ranks that the heads allow
    prefill_tp = options.prefill_tp or tp
    chosen = choice(model, tp, options.devices // tp, asked)
    target = Target(options.first_token, options.prefill_speed, options.step_tokens)
    kinds = [
        KindOfLayer(
            kind=one.kind,
            layers=one.layers,
            heads=one.heads,
            key_elements=one.width - one.values,
            value_elements=one.values,
            window=one.window,
            token_bytes=one.layers * one.heads * one.width * model.dtype.itemsize,
            request_bytes=one.state_bytes(1),
        )
        for one in model.each
    ]
    return MemoryPlan(
        model=model.name,
        max_len=model.max_len,
        kv_dtype=str(model.dtype).removeprefix("torch."),
        memory=options.memory,
        page_size=options.page_size,
        kinds=kinds,
        choices=every,
        chosen=chosen,
        prefill_tp=prefill_tp,
        pulls=list(pulls(model, (prefill_tp, tp), options.page_size, lengths, target)),
        made_gbps=sum(kind.token_bytes for kind in kinds) * options.prefill_speed / 1e9,
    )
