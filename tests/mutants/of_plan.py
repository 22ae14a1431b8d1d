"""Mutations of `pagewire plan`: what a model keeps, what a rank holds, and what a hand-over and a trace ask for."""

from tests.mutants.mutation import Module, Mutation

PLAN: tuple[Module, ...] = (
    Module(
        "scheduler_adapters.plan.layers",
        [],
        [
            Mutation("_attention", 'getattr(own, "kv_lora_rank", None)', "False"),
            Mutation("_attention", ' + _field(file, own, "qk_rope_head_dim")', ""),
            Mutation("AlikeLayers.state_bytes", " // tp", ""),
            Mutation("_state", "1, dtype, dtype, form", "1, dtype, form"),
            Mutation("_times", "replace(one.state, layers=count)", "one.state"),
            Mutation("_state", 'expand * _field(file, own, "hidden_size"), elements', "expand, elements"),
            Mutation("_each_layer", '"short_conv", channels', '"mamba1", channels'),
        ],
    ),
    Module(
        "scheduler_adapters.plan.memory",
        [],
        [
            Mutation("choice", "< page + state:", "< page:"),
            Mutation("_room", "laid.requests(length) * dp", "laid.requests(length)"),
            Mutation("_room", " - least.of_request(length)", ""),
            Mutation("_longest", "of_request(middle) <= memory", "of_request(middle) < memory"),
        ],
    ),
    Module(
        "scheduler_adapters.plan.ways",
        ["tests/scheduler_adapters/plan/test_memory.py", "tests/scheduler_adapters/plan/test_blocks.py"],
        [
            Mutation("laid_ways", "asked.memory - model.state_bytes(tp)", "asked.memory"),
            Mutation("laid_ways", "len(set(every)) == 1", "True"),
            Mutation("laid_ways", "len(model.paged) > 1 and ", ""),
            Mutation("laid_ways", "not states and any(", "any("),
            Mutation("laid_ways", " and any(not one.window for one in model.paged)", ""),
            Mutation("laid_ways", "if len(states) == 1:", "if states:"),
            Mutation("laid_ways", "not states and (blocks", "(blocks"),
            Mutation("LaidWay.requests", "min(fit, self.most)", "fit"),
            Mutation("_with_groups", "count * page, group", "count * page, None"),
            Mutation("_with_groups", " // params.n_devices", ""),
            Mutation("_with_groups", "partial(_pages, size, count * page", "partial(_pages, size, page"),
            Mutation("_with_slabs", "> 0:", ">= 0:"),
            Mutation("_with_slabs", "slab * page)", "recurrent.state_bytes(tp))"),
            Mutation("_groups", '"window" if one.window else "full"', '"full"'),
            Mutation("_of_vllm", "if len(parts) == 1:", "if False:"),
        ],
    ),
    Module(
        "scheduler_adapters.plan.tables",
        ["tests/scheduler_adapters/plan/test_command.py"],
        [
            Mutation("table_of_parts", "/ room.request_bytes[length]", "/ 1"),
            Mutation("table_of_parts", "part.tables or ''", "part.layers"),
        ],
    ),
    Module(
        "scheduler_adapters.plan.blocks",
        [],
        [
            Mutation("VllmBlocks._blocks", "// of.block_size) + 1", "// of.block_size)"),
            Mutation("VllmBlocks._blocks", "min(window - 1 + self.step_tokens, length)", "min(window, length)"),
            Mutation("vllm_blocks", "most if most < fewest * _MUCH_LARGER else fewest", "fewest"),
            Mutation("vllm_blocks", "page // size if page % size == 0 else 1", "page // size"),
        ],
    ),
    Module(
        "scheduler_adapters.plan.link",
        [],
        [
            Mutation("pulls", "max(1 / ahead, part / left)", "1 / ahead"),
            Mutation("pulls", "max(1 / ahead, part / left)", "part / left"),
            Mutation("pulls", "pages * of_page + states", "pages * of_page"),
        ],
    ),
    Module(
        "scheduler_adapters.plan.trace",
        [],
        [
            Mutation("_blocks", "memory // page // (question", "memory // (page * question.page_size) * (question"),
            Mutation("_point", "_blocks(question, memory) * replicas", "_blocks(question, memory)"),
            Mutation("_point", "optimum_hits(trace, blocks + below)", "optimum_hits(trace, blocks)"),
            Mutation("sweep", "(found.hit_pct - now.hit_pct)", "(found.hit_pct)"),
        ],
    ),
    Module(
        "scheduler_adapters.plots",
        [],
        [
            Mutation("save", "inches * _CHARACTERS_AN_INCH", "1000"),
            Mutation("_round_ticks", "_powers_of_two(low, high, most) if twos else _decades(low, high, most)", "some"),
        ],
    ),
)
