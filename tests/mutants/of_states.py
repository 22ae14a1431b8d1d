"""Mutations of the prefix cache of recurrent states: which are kept, who goes on from them, and which go first."""

from tests.mutants.mutation import Module, Mutation

_MOVES = ["tests/scheduler_adapters/hf/test_state_moves.py"]
_KEPT = ["tests/scheduler_adapters/hf/test_kept_states.py"]

STATES: tuple[Module, ...] = (
    Module(
        "scheduler_adapters.hf.kept_states",
        _MOVES,
        [
            Mutation("KeptStates.longest", "return 0", "pass"),
            Mutation(
                "KeptStates.reserved", "self._pages.resume(request_id, self.digest_at(request_id, cached))", "pass"
            ),
            Mutation("KeptStates.reserved", "if request_id not in self._ends:", "if True:"),
            Mutation("KeptStates.reserved", "context.current_length - 1", "context.current_length"),
            Mutation("KeptStates.reserved", "self._shared.get(request_id, 0)", "0"),
            Mutation("KeptStates.reserved", " + self._spacing if self._spacing else 0", " if self._spacing else 0"),
            Mutation("KeptStates.reserved", "end < active", "end <= active + 1"),
            Mutation("KeptStates.reserved", "start < end", "0 < end"),
            Mutation("KeptStates.reserved", "min(later)", "max(later)"),
            Mutation("KeptStates.computed", "gathered.starts % size == 0", "gathered.starts % size == 1"),
            Mutation("KeptStates.computed", "tokens in self._ends.get(request_id, ()) or ", ""),
            Mutation("KeptStates.computed", " or (self._spacing and tokens % self._spacing == 0)", ""),
            Mutation("KeptStates.computed", "passing=not stays", "passing=False"),
            Mutation("KeptStates.digest_at", "self._replica.page_size - 1", "self._replica.page_size - 2"),
            Mutation("KeptStates.leave", "self._shared.pop(request_id, None)", "pass"),
            Mutation("KeptStates.leave", "self._ends.pop(request_id, None)", "pass"),
            Mutation("KeptStates.check", "self._shared.keys() | ", ""),
        ],
    ),
    Module(
        "scheduler_adapters.hf.state_pages",
        [*_KEPT, *_MOVES],
        [
            Mutation("StatePages.longest", "int(there[-1]) + 1", "int(there[0]) + 1"),
            Mutation("StatePages.keep", "self._tokens[page] != tokens", "False"),
            Mutation("StatePages.keep", "self._forget(before)", "pass"),
            Mutation("StatePages.keep", "self._found(digest) or ", ""),
            Mutation("StatePages.keep", " or not pool.free_count", ""),
            Mutation("StatePages.keep", "self._copy(page, copy)", "pass"),
            Mutation("StatePages.keep", "pool.release(_one(copy))", "pass"),
            Mutation("StatePages.resume", "self._copy(copy, page)", "pass"),
            Mutation("StatePages.release", "self._passing.pop(request_id, None)", "pass"),
            Mutation("StatePages.forget_copies", "self._pool.forget_idle()", "pass"),
            Mutation("StatePages.forget_copies", "self._passing.clear()", "pass"),
            Mutation("StatePages.begin_import", "self._before[page] = copy", "pass"),
            Mutation("StatePages.begin_import", "self._pool.hold(_one(copy))", "pass"),
            Mutation("StatePages.cancel_import", "self._copy(copy, page)", "self._reset(page)"),
            Mutation("StatePages._end_import", "self._pool.release(_one(copy))", "pass"),
            Mutation("StatePages.is_promised", "self._tokens[page] == self._told[page]", "self._tokens[page]"),
            Mutation("StatePages._found", "self._pool.release(_one(copy))", "pass"),
            Mutation("StatePages._forget", "self._pool.index.withdraw_one(copy)", "pass"),
            Mutation("StatePages.check", ", *self._before.values()", ""),
        ],
    ),
    Module(
        "scheduler_adapters.hf.hybrid",
        [*_KEPT, *_MOVES],
        [
            Mutation("HybridKVCacheManager.__init__", "2 * max_batch_size * caching", "max_batch_size"),
            Mutation("HybridKVCacheManager.__init__", "not caching and (copies or every)", "False"),
            Mutation("HybridKVCacheManager.__init__", "self._kept if caching else None", "None"),
            Mutation("HybridKVCacheManager.release", "self._kept.leave(request_id)", "pass"),
            Mutation("HybridKVCacheManager.admission", "if self.states.num_free else", "if True else"),
            Mutation("HybridKVCacheManager.step", "self._kept.computed(gathered)", "pass"),
            Mutation("HybridKVCacheManager.reset_prefix_cache", "self.states.forget_copies()", "pass"),
            Mutation("HybridKVCacheManager.import_block_table", "if had else None", "if False else None"),
            Mutation("HybridKVCacheManager.check", "self._kept.check()", "pass"),
            Mutation("_check_params", "if getattr(params, name):", "if False:"),
        ],
    ),
    Module(
        "scheduler_adapters.hf.state_layout",
        ["tests/scheduler_adapters/hf/test_state_layout.py"],
        [
            Mutation("_CONVOLVED", '("conv.B", "conv.C", "conv.x")', '("conv.x", "conv.B", "conv.C")'),
            Mutation("StateShape.matrix", "return (self.d_state,)", "return (self.head_dim,)"),
            Mutation("StateShape.matrix", '"gated_delta" else', '"mamba2" else'),
            Mutation("state_layouts", "if kind in shape.conv_kinds", ""),
            Mutation("state_layouts", "if shape.matrix:", "if True:"),
        ],
    ),
    Module(
        "scheduler_adapters.hf.runner",
        _KEPT,
        [
            Mutation("HFRunner.logits", "self._one_by_one and context.start_idx > 0", "False"),
            Mutation("HFRunner._forward_rows", "1 if one_by_one else length", "length"),
        ],
    ),
    Module(
        "scheduler_adapters.hf.recurrent",
        ["tests/scheduler_adapters/hf/test_hybrid.py"],
        [
            Mutation("PagedStates.store", "shape.matrix and self._ssm.keys() != wanted", "False"),
            Mutation("PagedStates.store", "self._conv.keys() != wanted", "False"),
            Mutation("_shape_of", "mixer.head_v_dim, mixer.num_k_heads", "mixer.head_v_dim, mixer.num_v_heads"),
        ],
    ),
    Module(
        "kvcache.replica.replica",
        _MOVES,
        [
            Mutation("Replica.match", "pages[: self.states.longest(request_id, of_pages)]", "pages"),
            Mutation("Replica.act", "self.states.reserved(context, plan.cached)", "pass"),
        ],
    ),
)
