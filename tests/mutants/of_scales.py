"""Mutations of pages with scales: where they lie, what copies them, and how a transfer divides them."""

from tests.mutants.mutation import Module, Mutation

_PAGES = ["tests/kvcache/test_quantization.py"]
_PLANS = ["tests/transfer/plan/test_scales.py"]
_PULLS = ["tests/transfer/pull/test_scales.py"]
_MODELS = ["tests/scheduler_adapters/hf/test_quantized.py"]

SCALES: tuple[Module, ...] = (
    Module(
        "kvcache.layout",
        _PAGES,
        [
            Mutation("PageLayout.scales_offset", "_aligned(values)", "0"),
            Mutation("PageLayout.page_bytes", "_aligned(self.scales.page_bytes)", "self.scales.page_bytes"),
            Mutation("shard_layout", "0 if of_all_heads else heads.start", "heads.start"),
            Mutation("shard_layout", "1 if of_all_heads else len(heads)", "len(heads)"),
            Mutation("shard_layout", "1 if of_page else page_size", "page_size"),
            Mutation("shard_layout", "params.head_dim // quantised.quantization_granularity", "params.head_dim"),
            Mutation("scales_kind", "layouts[-1]", "layouts[0]"),
            Mutation("scales_of", "words.stride(0), *", "scales.page_elements, *"),
        ],
    ),
    Module("kvcache.copies", _PAGES, [Mutation("page_rows", "blocks.stride(0)", "blocks[0].numel()")]),
    Module(
        "kvcache.quantization",
        _PAGES,
        [
            Mutation("KVCacheQuantizationConfig.check", "dtype.itemsize != 1", "False"),
            Mutation("KVCacheQuantizationConfig.check", "head_dim % self.quantization_granularity", "False"),
        ],
    ),
    Module(
        "transfer.plan.shapes",
        _PLANS,
        [
            Mutation("dense", "offset=layout.scales_offset", "offset=0"),
            Mutation(
                "dense", "_box_of(layout.scales, layout.page_bytes", "_box_of(layout.scales, layout.scales.page_bytes"
            ),
            Mutation("dense", "layout.scales.page_size != layout.page_size", "False"),
        ],
    ),
    Module(
        "transfer.plan.intersection",
        _PLANS,
        [
            Mutation("Stack.tokens", "and any(self.token)", ""),
            Mutation("_table", "and not box.of_page", ""),
        ],
    ),
    Module(
        "transfer.plan.boxes",
        _PLANS,
        [Mutation("sub_box", "of_page=box.of_page", "of_page=False")],
    ),
    Module(
        "transfer.plan.plan",
        _PLANS,
        [
            Mutation("_check_of_page", "and local.page_size == remote.page_size", ""),
            Mutation("_check_of_page", "ours[kind] == theirs[kind] and", ""),
        ],
    ),
    Module(
        "transfer.pull.exchange",
        [],
        [Mutation("PageExchange.__init__", '{"scales": shared} if', "{} if", _PULLS)],
    ),
    Module(
        "scheduler_adapters.hf.quantized",
        _MODELS,
        [
            Mutation("quantized", ".amax(-1, keepdim=True)", ".amax().expand(*groups.shape[:-1], 1)"),
            Mutation("quantized", "values if dtype.is_floating_point else values.round()", "values"),
            Mutation("dequantized", "* scales.float()[..., None]", ""),
        ],
    ),
)
