"""Mutations of `pagewire plan`: what a model keeps, what a rank holds, and what a hand-over and a trace ask for."""

from tests.mutants.mutation import Module, Mutation

PLAN: tuple[Module, ...] = (
    Module(
        "scheduler_adapters.plan.layers",
        [],
        [
            Mutation("_attention", 'getattr(own, "kv_lora_rank", None)', "False"),
            Mutation("_attention", ' + _field(file, own, "qk_rope_head_dim")', ""),
            Mutation("AlikeLayers.state_bytes", "-(-self.conv_bytes // tp)", "self.conv_bytes"),
            Mutation("_times", "conv_bytes=one.conv_bytes * count", "conv_bytes=one.conv_bytes"),
            Mutation("_each_layer", " - 1\n                itemsize", "\n                itemsize"),
        ],
    ),
    Module(
        "scheduler_adapters.plan.memory",
        [],
        [
            Mutation("choice", "* page + state\n", "* page\n"),
            Mutation("_kept", "-(-(one.window - 1) // size) + 1", "-(-one.window // size)"),
            Mutation("_room", "memory // of_request(length) * dp", "memory // of_request(length)"),
            Mutation("_longest", "of_request(middle) <= memory", "of_request(middle) < memory"),
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
