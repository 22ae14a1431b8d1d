"""Mutations of the prefix cache of recurrent states: which are kept, who goes on from them, and which go first."""

from tests.mutants.mutation import Module, Mutation

_MOVES = ["tests/kvcache/states/test_state_moves.py"]
_SHARED = ["tests/kvcache/states/test_slab_moves.py", "tests/scheduler_adapters/hf/test_one_budget.py"]
_KEPT = ["tests/scheduler_adapters/hf/test_kept_states.py"]
_DRAFTED = ["tests/scheduler_adapters/hf/test_drafted_pages.py"]
_SPECULATION = ["tests/scheduler_adapters/hf/test_speculation.py"]

_PASSING = ["tests/kvcache/states/test_passing_copies.py"]
_HYBRID = ["tests/scheduler_adapters/hf/test_hybrid.py"]
_STATE_MODELS = ["tests/scheduler_adapters/hf/test_state_models.py"]
_REPLICAS = ["tests/scheduler_adapters/hf/test_state_replicas.py"]
_SERVICE = ["tests/scheduler_adapters/service/test_service.py"]
_PARAMS = "tests/kvcache/test_params.py"
_HINTS = ["tests/kvcache/states/test_state_hints.py"]
_PAGES = ["tests/kvcache/states/test_state_pages.py"]
_GROUPED = ["tests/kvcache/states/test_grouped_states.py", "tests/kvcache/states/test_group_state_moves.py"]
_EVENTS = ["tests/kvcache/states/test_state_events.py"]
_BELOW = ["tests/kvcache/states/test_state_tiers.py", "tests/kvcache/states/test_moves_below.py"]
_OBJECTS = ["tests/kvcache/states/test_state_objects.py"]
_BELOW_FILES = ["tests/scheduler_adapters/hf/test_states_below.py"]

STATES: tuple[Module, ...] = (
    Module(
        "kvcache.states.kept_states",
        _MOVES,
        [
            Mutation("KeptStates.ends", "return np.zeros(len(digests), np.bool_)", "pass"),
            Mutation("KeptStates.reserved", "self._pages.resume(request_id, digest, start)", "pass"),
            Mutation("KeptStates.reserved", "request_id not in self._ends and ", ""),
            Mutation("KeptStates.reserved", " and (digest is not None or active - start > 1)", "", _GROUPED),
            Mutation("KeptStates.reserved", "context.current_length - 1", "context.current_length"),
            Mutation("KeptStates.reserved", "self._shared.get(request_id, 0)", "0"),
            Mutation("KeptStates.reserved", " + self._spacing if self._spacing else 0", " if self._spacing else 0"),
            Mutation("KeptStates.reserved", "end < active", "end <= active + 1"),
            Mutation("KeptStates.reserved", "start < end", "0 < end"),
            Mutation("KeptStates.reserved", "min(later)", "max(later)"),
            Mutation("KeptStates.computed", "(computed % size == 0)", "(computed % size == 1)"),
            Mutation("KeptStates.computed", "not any(stay) and ", ""),
            Mutation("KeptStates.computed", "passing=not stay[place]", "passing=False"),
            Mutation("KeptStates._stays", "tokens in self._ends.get(request_id, ()) or ", ""),
            Mutation("KeptStates._stays", " or (self._spacing > 0 and tokens % self._spacing == 0)", ""),
            Mutation("KeptStates.digest_at", "last - 1, last)", "last - 2, last - 1)", _KEPT),
            Mutation("KeptStates.leave", "self._shared.pop(request_id, None)", "pass"),
            Mutation("KeptStates.leave", "self._ends.pop(request_id, None)", "pass"),
            Mutation("KeptStates.check", "self._shared.keys() | ", ""),
        ],
    ),
    Module(
        "kvcache.states.state_pages",
        [*_MOVES, *_KEPT],
        [
            Mutation("StatePages.draft", "not self._has_room(moving=False)", "False", _MOVES),
            Mutation("StatePages.draft", "moving=False", "moving=True", _SHARED),
            Mutation("StatePages.draft", "self.tokens_of(request_id)", "pass", _DRAFTED),
            Mutation("StatePages.draft", "if request_id not in self.drafts.page_of:", "if True:", _DRAFTED),
            Mutation("StatePages.draft", "self._tokens[page] = self._told[page] = 0", "pass", _DRAFTED),
            Mutation("StatePages.settle", "self._tokens[drafted] == start", "True", _DRAFTED),
            Mutation("StatePages.settle", "self._tokens[drafted] == start", "False", _DRAFTED),
            Mutation("StatePages.settle", "self._pool.holders[page] > 1", "False", _DRAFTED),
            Mutation("StatePages.settle", "self._copy(drafted, page)", "pass", _DRAFTED),
            Mutation("StatePages.settle", "self._drop_drafted(request_id)", "pass", _DRAFTED),
            Mutation("StatePages.release", "self._drop_drafted(request_id)", "pass", _DRAFTED),
            Mutation("StatePages.begin_import", "self._drop_drafted(request_id)", "pass", _DRAFTED),
            Mutation("StatePages.resume", "self.drafts.forget_run(request_id)", "pass", _DRAFTED),
            Mutation("StatePages.pages_at", "self.drafts.check_booked(request_id)", "pass", _DRAFTED),
            Mutation("StatePages.check", ", *self.drafts.page_of.values()", "", _DRAFTED),
            Mutation("StatePages.check", "self.drafts.check(self._page_of)", "pass", _DRAFTED),
            Mutation("StatePages.keep_passing", "np.count_nonzero(self._tokens[pages] != tokens)", "False", _PASSING),
            Mutation("StatePages.keep_passing", "self._copy(page, copy)", "pass", _PASSING),
            Mutation("StatePages.keep_passing", "self._used[copies] = self._slabs.pool.clock", "pass", _PASSING),
            Mutation("StatePages._all_run_on", "(has != tokens) | ", "", _PASSING),
            Mutation("StatePages._all_run_on", " | (self._pool.writers[pages] > 0)", "", _PAGES),
            Mutation("StatePages._all_run_on", " | told", "", _PASSING),
            Mutation("StatePages.keep", "self._tokens[page] != tokens", "False"),
            Mutation("StatePages.keep", "self._forget(before)", "pass"),
            Mutation("StatePages.keep", "not (copy := self._found(digest))", "(copy := self._found(digest)) or True"),
            Mutation("StatePages.keep", "not self._has_room(moving=False)", "False"),
            Mutation("StatePages.keep", "if not passing:", "if True:", _BELOW),
            Mutation("StatePages.keep", "self._keep_below(copy, digest)", "pass", _BELOW),
            Mutation("StatePages.keep_passing", "self._spare(copies)", "pass", _BELOW),
            Mutation("StatePages.kept_after", "found |= self.below.in_host(digests)", "pass", _BELOW),
            Mutation("StatePages.bring_newest", "digests[self.longest(digests) :]", "digests", _BELOW),
            Mutation("StatePages.resume", "self._tokens[page] = tokens", "pass", _BELOW),
            Mutation("StatePages.resume", "self.below.used(digest)", "pass", _BELOW),
            Mutation("StatePages.release", "self._keep_below(", "(lambda *_: None)(", _BELOW),
            Mutation("StatePages.keep", "self._copy(page, copy)", "pass"),
            Mutation("StatePages.keep", "self._let_go(copy)", "pass"),
            Mutation("StatePages.resume", "self._copy(copy, page)", "pass"),
            Mutation("StatePages.release", "self._passing.pop(request_id, None)", "self._passing.get(request_id)"),
            Mutation("StatePages.forget_copies", "self._pool.forget_idle()", "pass"),
            Mutation("StatePages.forget_copies", "self._passing.clear()", "pass"),
            Mutation("StatePages.begin_import", "self._before[page] = copy", "pass"),
            Mutation("StatePages.begin_import", "self._pool.hold(one_page(copy))", "pass"),
            Mutation("StatePages.cancel_import", "self._copy(copy, page)", "self._reset(page)"),
            Mutation("StatePages._end_import", "self._let_go(copy)", "pass"),
            Mutation("StatePages.is_promised", "self._tokens[page] == self._told[page]", "self._tokens[page]"),
            Mutation("StatePages.check", ", *self._before.values()", ""),
            Mutation("StatePages.begin_import", "elif digest is not None:", "elif False:", [*_SHARED, *_BELOW_FILES]),
            Mutation("StatePages._end_import", "self._give_back()", "pass", _SHARED),
            Mutation("StatePages.forget_copies", "self._give_back()", "pass", _SHARED),
        ],
    ),
    Module(
        "kvcache.replica.hints",
        [],
        [
            Mutation("ReplicaHints._width", "self._pool.width", "1.0", _HINTS),
            Mutation("ReplicaHints._leave_states", "*of_ranges, ", "", _HINTS),
            Mutation("ReplicaHints._leave_states", "prompt, len(pages)", "len(pages)", _HINTS),
            Mutation("ReplicaHints._order_pages", "self._states.begin(self._quotas)", "pass", _HINTS),
            Mutation("ReplicaHints.follow_states", "states.begin(self._quotas)", "pass", _HINTS),
        ],
    ),
    Module(
        "kvcache.states.state_hints",
        [],
        [
            Mutation("StateHints.begin", "self._quotas = TenantQuotas", "_ = TenantQuotas"),
            Mutation("StateHints.begin", "self._quotas = SlabQuotas", "_ = SlabQuotas"),
            Mutation("StateHints.leave", "self._order.share = share", "pass"),
            Mutation("StateHints.leave", "[::-1]", ""),
            Mutation("StateHints.leave", "self._order.hint(", "(lambda *_: None)("),
            Mutation("StateHints.leave", "self._quotas.own(", "(lambda *_: None)("),
            Mutation("StateHints._said_of", "< NEUTRAL", "< 0"),
            Mutation("StateHints._said_of", "said[newest[newest >= 0]] = True", "said[:] = True"),
            Mutation("StateHints._said_of", "leaving.ends) - 1", "leaving.ends[-1:]) - 1"),
            Mutation("StateHints._owned", "~self._quotas.owned(copies)", "np.ones(len(copies), np.bool_)"),
        ],
    ),
    Module(
        "kvcache.states.state_memory",
        [*_MOVES, *_KEPT],
        [
            Mutation("StateMemory._found", "self._let_go(copy)", "pass"),
            Mutation("StateMemory._forget", "self._pool.index.withdraw_one(copy)", "pass"),
            Mutation("StateMemory.oldest_use", "self._slabs.pool.use_of(order, used)", "1", _SHARED),
            Mutation("StateMemory._found", "self._pool.idle.hint(one_page(copy), None)", "pass", _HINTS),
            Mutation("StateMemory._forget", "order.renew(one_page(copy))", "pass", _HINTS),
            Mutation("StateMemory._forget", "order.forget(one_page(copy))", "pass", _HINTS),
            Mutation("StateMemory._let_go", "self._used[page] = self._slabs.pool.clock", "pass", _SHARED),
            Mutation("StateMemory.num_free", "int(self._slabs.pool.can_take_slab())", "1", _SHARED),
            Mutation(
                "StateMemory._copy",
                "self._tokens[target] = self._tokens[source]",
                "pass",
                ["tests/kvcache/states/test_state_pages.py"],
            ),
            Mutation("StateMemory._forget", "self._spare(one_page(copy))", "pass", _BELOW),
            Mutation("StateMemory._keep_below", " and copy != NO_PAGE", "", _BELOW),
        ],
    ),
    Module(
        "kvcache.states.state_tiers",
        [*_BELOW, *_BELOW_FILES],
        [
            Mutation(
                "StateTier.in_host", "self.host.pool.index.find(digests) != NO_PAGE", "np.zeros(len(digests), np.bool_)"
            ),
            Mutation("StateTier.bring_newest", "np.flatnonzero(there[0])[::-1]", "np.flatnonzero(there[0])", _OBJECTS),
            Mutation("StateTier.bring_newest", "wait=wait", "wait=False", _BELOW_FILES),
            Mutation("StateTier.bring_newest", "if self.in_host(some[0, at : at + 1])[0]:", "if True:", _BELOW_FILES),
            Mutation("StateTier.bring_newest", "range(len(digests), 0, -_LOOKED_AT)", "(len(digests),)", _OBJECTS),
            Mutation("StateTier.bring_newest", "self._ask(some, there) and not wait", "False", _OBJECTS),
            Mutation("StateTier.bring_newest", "first + at + 1", "1", _OBJECTS),
            Mutation("StateTier.bring_newest", "return self._answers != before", "return False", _OBJECTS),
            Mutation("StateTier.ask_newest", " or self._answers != before", "", _OBJECTS),
            Mutation("StateTier._ask", "if there.any() else 0] = False", "if there.any() else 0] = True", _OBJECTS),
            Mutation("StateTier._ask", "lower.has_of(digests, later, perhaps=True)", "later", _OBJECTS),
            Mutation("StateTier._bring", "lower.fetch(digests, there, wait=wait, gain=gain)", "pass"),
            Mutation("StateTier._bring", "if self.in_host(digests[one])[0]:", "if False:", _OBJECTS),
            Mutation("StateTier._bring", "if lower.brings(digests, one):", "if False:", _OBJECTS),
            Mutation("StateTier.used", "self.waiting.append((NO_SLOTS, digest))", "pass"),
            Mutation("StateTier.fill", "self.host.pool.hold(slots)", "pass"),
            Mutation("StateTier.fill", "self.pool.hold(load.pages)", "pass"),
            Mutation("StateTier.fill", "self.poll()", "pass"),
            Mutation("StateTier._end", "self._let_go(int(load.pages[0]))", "self.pool.drop_writer(load.pages)"),
            Mutation("StateTier._end", "self.host.pool.release(load.slots)", "pass"),
            Mutation("StateTiers.tick", "tier.poll()", "pass", _BELOW_FILES),
            Mutation("divide_tiers", "slots < _LEAST_SLOTS", "slots < 0", _BELOW_FILES),
            Mutation("divide_tiers", "space - slots * state_bytes", "space * (1 - share)", _BELOW_FILES),
            Mutation("_bounds", "first + size", "first + size // 2", _BELOW_FILES),
        ],
    ),
    Module(
        "kvcache.replicas",
        [*_BELOW, *_BELOW_FILES],
        [
            Mutation("Replicas.prefetch", "(states := self.each[0].states) is not None", "False"),
            Mutation("Replicas._tick", "self._all_tiers", "(self.tiers,)"),
            Mutation("Replicas._all_tiers", "(self.tiers, self.state_tiers)", "(self.tiers,)"),
            Mutation("Replicas.publish_events", "(len(specs) - 1, self.state_tiers)", "(0, None)", _EVENTS),
        ],
    ),
    Module(
        "kvcache.states.state_objects",
        _OBJECTS,
        [
            Mutation("StateObjects.offer", "self.used(digests)", "pass"),
            Mutation("StateObjects._over", "return pages", "return super()._over(pages)"),
        ],
    ),
    Module(
        "kvcache.states.replica_states",
        _OBJECTS,
        [
            Mutation("ReplicaStates.say_ends", "np.flatnonzero(self.pages.kept_after(digests)) + 1", "np.zeros(0)"),
            Mutation("state_tiers_of", "one.say_ends(objects=params.object_tier_io is not None)", "pass"),
        ],
    ),
    Module(
        "kvcache.tiers.tiers",
        _OBJECTS,
        [
            Mutation("Tiers.prefetch_to_state", "if coming and self._run", "if False and self._run"),
            Mutation("Tiers.prefetch_to_state", "run + self._longest_tail", "run"),
            Mutation("Tiers.prefetch_to_state", "if len(behind) > run and states.ask(behind):", "if False:"),
            Mutation("Tiers.prefetch_to_state", "run = end", "pass"),
            Mutation("Tiers.prefetch_to_state", "coming |= states.bring_newest(", "states.bring_newest("),
            Mutation("Tiers._run", "asked[:, :first] = False", "pass"),
            Mutation(
                "_make_object_tier", "params.states is not None and ", "", ["tests/kvcache/tiers/test_object_tier.py"]
            ),
        ],
    ),
    Module(
        "kvcache.pool.slabs",
        _BELOW,
        [
            Mutation("SlabPool._clear", "self.guard(held)", "pass"),
            Mutation("SlabPool._drop", "self.guard(pages)", "pass"),
        ],
    ),
    Module(
        "kvcache.states.drafted_pages",
        _DRAFTED,
        [
            Mutation("DraftedPages.goes_on_from", "if not after:", "if False:"),
            Mutation("DraftedPages.goes_on_from", "before <= start", "0 <= start"),
            Mutation("DraftedPages.goes_on_from", "start <= after", "True"),
            Mutation("DraftedPages.goes_on_from", "start if start == after else before", "start"),
            Mutation("DraftedPages.goes_on_from", "start if start == after else before", "before"),
            Mutation("DraftedPages.written", "self.page_of.get(request_id, page)", "page"),
            Mutation("DraftedPages.forget_run", "self._tokens[page] = 0", "pass"),
            Mutation("DraftedPages.check_booked", " and self._tokens[page]", ""),
        ],
    ),
    Module(
        "kvcache.states.drafted_steps",
        _DRAFTED,
        [
            Mutation("step_with_states", "any(states.pages.drafts.page_of for states in each)", "False"),
            Mutation("step_with_states", "each[share.replica].stepped", "each[0].stepped", [*_MOVES, *_SHARED]),
            Mutation("_step_drafted", "each[replica_idx].pages", "each[0].pages", [*_MOVES, *_REPLICAS]),
            Mutation("_step_drafted", "context.set_token_indices(start_idx=start)", "pass"),
            Mutation("_step_drafted", "context.set_token_indices(start_idx=at)", "pass"),
            Mutation("_step_drafted", "gathered = gather()", "pass"),
            Mutation("_step_drafted", "pages.settle(context.request_id, at)", "pass"),
        ],
    ),
    Module(
        "kvcache.states.replica_states",
        [*_MOVES, *_KEPT],
        [
            Mutation("ReplicaStates.name_state", "self.pages.drafts.check_booked(request_id)", "pass", _DRAFTED),
            Mutation("ReplicaStates.name_state", "if tokens != table.num_tokens:", "if False:", _HYBRID),
            Mutation("ReplicaStates.refuse_fork", "self.pages.drafts.check_booked(parent_id)", "pass", _DRAFTED),
            Mutation("ReplicaStates.fork", "self.pages.fork(parent_id, child.request_id)", "pass", _HYBRID),
            Mutation(
                "ReplicaStates.fork",
                "child.set_token_indices(start_idx=indices[0], active_idx=indices[1])",
                "pass",
                _REPLICAS,
            ),
            Mutation("ReplicaStates.refuse_other", "if source != before:", "if not source:", _HYBRID),
            Mutation("ReplicaStates.begin_import", "if had else None", "if False else None"),
            Mutation(
                "ReplicaStates.begin_import",
                "pending.on_free = functools.partial(self.pages.cancel_import, page)",
                "pass",
                _HYBRID,
            ),
            Mutation("ReplicaStates.release", "self.kept.leave(request_id)", "pass"),
            Mutation("ReplicaStates.stepped", "self.kept.computed(rows, computed)", "pass"),
            Mutation("ReplicaStates.stepped", "self._moves.stepped(rows)", "pass", _SHARED),
            Mutation("ReplicaStates.fetched", "self._moves.fetched(rows)", "pass", _SHARED),
            Mutation(
                "ReplicaStates.claim", "self._moves.claimed(self._replica.rows.row_of[request_id])", "pass", _SHARED
            ),
            Mutation("ReplicaStates.check", "self.kept.check()", "pass"),
            Mutation("without_state", "len(table.groups) != count + 1 or ", "", [*_HYBRID, *_GROUPED]),
            Mutation("without_state", "groups=table.groups[:-1]", "groups=table.groups[:1]", _GROUPED),
        ],
    ),
    Module(
        "kvcache.manager",
        _REPLICAS,
        [
            Mutation("PagedKVCacheManager.external_claim", "self._claims.release(request_id)", "pass"),
            Mutation("PagedKVCacheManager.release", "states.release(request_id)", "pass"),
            Mutation("PagedKVCacheManager.lease", ".pages.drafts.check_booked(request_id)", ".pages", _DRAFTED),
            Mutation(
                "PagedKVCacheManager.fork", "states.refuse_fork(parent.request_id, child.request_id)", "pass", _DRAFTED
            ),
            Mutation("PagedKVCacheManager.fork", "self._states[replica_idx] if", "self._states[0] if"),
            Mutation(
                "PagedKVCacheManager.commit_import",
                "self._states[replica_idx]",
                "self._states[0]",
                _SERVICE,
            ),
            Mutation(
                "PagedKVCacheManager.import_block_table",
                "self._states[replica_idx]",
                "self._states[0]",
                _SERVICE,
            ),
        ],
    ),
    Module(
        "kvcache.replicas",
        _REPLICAS,
        [
            Mutation("Replicas._fits", "not self.states[replica_idx].has_room", "False"),
            Mutation("Replicas._fits", "not self.states[replica_idx]", "not self.states[0]"),
            Mutation("Replicas._fits", " - replica.pool.beside", "", _SHARED),
            Mutation("Replicas.publish_events", "enumerate(self.states)", "enumerate(self.states[:1])", _EVENTS),
            Mutation("Replicas.forget_idle", "states.pages.forget_copies()", "pass", _MOVES),
            Mutation("Replicas.metrics", "state_evictions=states.pages.evictions", "state_evictions=0", _REPLICAS),
            Mutation("Replicas.fetch", "of_replica.fetched(state.rows)", "pass", _REPLICAS),
            Mutation("Replicas.fetch_one", "self.states[0].fetched([row])", "pass", _SHARED),
        ],
    ),
    Module(
        "kvcache.params",
        [_PARAMS],
        [
            Mutation("KVCacheParams.states_apart", "2 * requests * self.enable_prefix_caching", "requests"),
            Mutation("KVCacheParams._check_states", "not self.enable_prefix_caching and (copies or every)", "False"),
            Mutation("KVCacheParams._check_states", "self.has_states_in_pages and copies is not None", "False"),
            Mutation("KVCacheParams._check_states", "self.partial_reuse_min_tokens == 0,", "True,"),
            Mutation(
                "KVCacheParams._check_states", "not (self.groups and self.enable_kvcache_swapping_to_host)", "True"
            ),
            Mutation("KVCacheParams._check_states", "self.groups and self.enable_kvcache", "self.enable_kvcache"),
            Mutation("KVCacheParams._check_states", "not self.routing.copy_pages", "True"),
        ],
    ),
    Module(
        "kvcache.prometheus",
        _REPLICAS,
        [
            Mutation("_states", "states.pages.num_idle", "states.pages.num_held"),
            Mutation("_of_states", "read(states.pages)", "read(all_of.states[0].pages)"),
        ],
    ),
    Module(
        "kvcache.sizing",
        _HYBRID,
        [
            Mutation("pages_per_replica", "share <= apart", "False"),
            Mutation("pages_per_replica", "share -= apart", "pass"),
        ],
    ),
    Module(
        "kvcache.state_shape",
        ["tests/kvcache/states/test_state_layout.py"],
        [
            Mutation("_CONVOLVED", '("conv.B", "conv.C", "conv.x")', '("conv.x", "conv.B", "conv.C")'),
            Mutation("StateShape.matrix", "return (self.d_state,)", "return (self.head_dim,)"),
            Mutation("StateShape.matrix", '{"gated_delta", "linear"}', '{"mamba2", "linear"}'),
            Mutation("StateShape.__post_init__", "self.kernel < 2:", "self.kernel < 1:"),
            Mutation("StateShape.__post_init__", "self.conv_kinds and ", "", _HYBRID),
        ],
    ),
    Module(
        "scheduler_adapters.hf.runner",
        _KEPT,
        [
            Mutation("HFRunner.logits", "self._one_by_one and context.start_idx > 0", "False"),
            Mutation("HFRunner._forward_rows", "1 if one_by_one else length", "length"),
            Mutation("HFRunner._forward_rows", "0 if one_by_one else before", "before", _SPECULATION),
            Mutation("HFRunner._forward_rows", "-1 - before :", "-1:", _SPECULATION),
            Mutation("HFRunner._forward", "end - count, end + 1", "end - count + 1, end + 1", _SPECULATION),
            Mutation("HFRunner.verify", "end - count - 1 : end", "end - count : end", _SPECULATION),
            Mutation("HFRunner.draft", "not self._states or ", "", _SPECULATION),
            Mutation("HFRunner._forward", "cache.begin(paged, latents=self._has_latents)", "pass"),
        ],
    ),
    Module(
        "scheduler_adapters.hf.recurrent",
        ["tests/scheduler_adapters/hf/test_hybrid.py"],
        [
            Mutation("check_supported", "not kv_layers_of(config)", "False", _STATE_MODELS),
            Mutation("check_supported", "text.model_type in _UNSERVED", "False", _STATE_MODELS),
            Mutation("check_states_known", "kind not in STATE_FORMS", "False", _STATE_MODELS),
            Mutation("PagedStates.begin", "PagedLatents(batch) if latents else None", "None"),
            Mutation("PagedStates.update", "self._batch.attending = layer_idx", "pass"),
            Mutation("PagedStates.get_linear_cache", "state if state.any() else None", "None"),
            Mutation("PagedStates.store", "len(used) != len(self._places)", "False"),
            Mutation("PagedStates.store", "all(layer in states", "any(layer in states"),
            Mutation("PagedStates.store", "self._written, kinds", "self._pages, kinds", _DRAFTED),
            Mutation("PagedStates.store", "advance(self._written", "advance(self._pages", _DRAFTED),
            Mutation(
                "_shape_of", "mixer.head_dim) * 2, mixer.q_proj", "mixer.head_dim, 1, mixer.head_dim), mixer.q_proj"
            ),
            Mutation("_shape_of", "mixer.head_v_dim, mixer.num_k_heads", "mixer.head_v_dim, mixer.num_v_heads"),
        ],
    ),
    Module(
        "kvcache.replica.replica",
        _MOVES,
        [
            Mutation("Replica._plan", "hits[: end - first]", "hits"),
            Mutation("Replica.act", "if last else None", "if False else None"),
            Mutation("Replica.act", "last - 1, last)", "last - 2, last - 1)"),
            Mutation("Replica.pages_needed", " + self.pool.beside", "", _SHARED),
            Mutation("Replica.fork", " + self.pool.beside", "", _SHARED),
        ],
    ),
    Module(
        "kvcache.states.passing_copies",
        [],
        [
            Mutation("PassingCopies.renew", "len(set(copies.tolist()))", "len(digests)"),
            Mutation("PassingCopies.renew", "len(set(digests[:, 0].tolist()))", "len(digests)"),
            Mutation("PassingCopies.renew", "(copies == NO_PAGE).any() or ", ""),
            Mutation("PassingCopies.renew", "pool.holders[copies].any() or ", ""),
            Mutation("PassingCopies.renew", " or index.find(digests).any()", ""),
            Mutation("PassingCopies.renew", "pool.idle.remove(copies)", "pass"),
            Mutation("PassingCopies.renew", "pool.idle.renew(copies)", "pass", _HINTS),
            Mutation("PassingCopies.renew", "pool.idle.forget(copies)", "pass", _HINTS),
            Mutation("PassingCopies.renew", "index.publish(copies, digests)", "index.publish(copies, digests + 100)"),
            Mutation("PassingCopies.renew", "self[request_id] = digests[at : at + 1]", "pass"),
        ],
    ),
    Module(
        "kvcache.replica.prefix_states",
        _GROUPED,
        [Mutation("up_to_state", "further.longest(first, digests, ends)", "last_end(ends)")],
    ),
    Module(
        "kvcache.replica.page_moves",
        _SHARED,
        [
            Mutation("ReplicaPageMoves.staying", "stays[self._pages_of(row)] = True", "pass"),
            Mutation("ReplicaPageMoves.staying", "self._pages_of(row)", "self._replica.rows.pages(row)", _GROUPED),
            Mutation("ReplicaPageMoves.move", "others[:] = renamed[others]", "pass", _GROUPED),
            Mutation("ReplicaPageMoves.move", "index.say_tables(targets, index.tables_of(sources))", "pass", _GROUPED),
            Mutation("ReplicaPageMoves._pages_of", "if further is None:", "if True:", _GROUPED),
            Mutation("ReplicaPageMoves.staying", "self._runs | self._told", "self._runs"),
            Mutation("ReplicaPageMoves.staying", "self._runs | self._told", "self._told"),
            Mutation("ReplicaPageMoves.stepped", "self._runs[rows] = False", "pass"),
            Mutation("ReplicaPageMoves.claimed", "self._runs[row] = self._told[row] = False", "pass"),
            Mutation("ReplicaPageMoves.move", "self._copy(sources, targets)", "pass"),
            Mutation("ReplicaPageMoves.move", '"right"', '"left"'),
            Mutation("ReplicaPageMoves.move", "rows.changed[moved] = True", "pass"),
            Mutation("ReplicaPageMoves.move", "index.rename(sources[published], targets[published])", "pass"),
        ],
    ),
    Module(
        "kvcache.pool.slabs",
        [],
        [
            Mutation("num_slabs", " - 1", ""),
            Mutation("SlabPool.take_slab", "cached.oldest_use <= age", "False"),
            Mutation("SlabPool.take_slab", "if age and cached", "if cached"),
            Mutation("SlabPool.take_slab", " if moving else 0", ""),
            Mutation("SlabPool._make_room", "cached.oldest_use > self._next_use()", "True"),
            Mutation("SlabPool.take_slab", "self._evict_due(self.idle)", "False", _HINTS),
            Mutation("SlabPool.use_of", " - _HELD", "", _HINTS),
            Mutation("SlabPool._next_use", "self.use_of(self.idle, self._used)", "self._last_evicted"),
            Mutation("SlabPool.use_of", " + int(order.first_lead() * self.num_pages)", ""),
            Mutation("SlabPool._free", "np.maximum(leads, 1 - self.clock)", "0"),
            Mutation("SlabPool.width", "1.0 + slabs * self.slab_pages / published", "1.0"),
            Mutation("SlabPool._push_fresh", "self._later[pages] = 0", "pass"),
            Mutation("SlabPool._oldest_slab", "age == self._ages[slab]", "True"),
            Mutation("SlabPool._age_of", "np.count_nonzero(self.holders[pages]) or ", ""),
            Mutation("SlabPool._age_of", " or np.count_nonzero(self.writers[pages])", ""),
            Mutation("SlabPool._age_of", ".max()", ".min()"),
            Mutation(
                "SlabPool._free", "self._used[pages] = self._ages[pages // self.slab_pages] = ", "self._used[pages] = "
            ),
            Mutation("SlabPool._push_fresh", "self._ages[pages // self.slab_pages] = ", ""),
            Mutation("SlabPool._take_fresh", "self._stack[places] = others", "pass"),
            Mutation("SlabPool._take_fresh", "self._place[others] = places", "pass"),
            Mutation("SlabPool.give_back", "self._ages[slab] = ", ""),
            Mutation("SlabPool.give_back", "self._bottom < self.slab_pages", "True"),
            Mutation("SlabPool._cheapest_to_move", "np.where(stays, ", "np.where(False, "),
            Mutation("SlabPool._cheapest_to_move", "self._fresh_count + self.idle.count < self.slab_pages", "False"),
            Mutation("SlabPool._clear", "self.holders[targets] = self.holders[held]", "pass"),
            Mutation("SlabPool._clear", "self.idle.moved(held, targets)", "pass"),
            Mutation("SlabPool._evict", "self.idle.forget(pages)", "pass"),
            Mutation("SlabPool.give_back", "self.taken[slab] = False", "pass"),
        ],
    ),
    Module(
        "kvcache.states.state_pages",
        _PAGES,
        [
            Mutation("StatePages.allocate", "self._reset(page)", "pass"),
            Mutation("StatePages.begin_import", "self._pool.add_writer(one_page(page))", "pass"),
            Mutation("StatePages.lease", "self._pool.hold(one_page(page))", "pass"),
            Mutation("StatePages.pages_at", "if has != start:", "if has < start:"),
            Mutation("StatePages.cancel_import", "self._reset(page)", "pass"),
        ],
    ),
    Module(
        "kvcache.states.state_layout",
        ["tests/kvcache/states/test_state_layout.py"],
        [
            Mutation("state_layouts", "shard * shape.groups // shards", "shard * groups"),
            Mutation("state_layouts", "heads * shape.head_dim", "heads * shape.d_state"),
            Mutation("state_layouts", "if kind in shape.conv_kinds", ""),
            Mutation("state_layouts", "if shape.matrix:", "if True:"),
        ],
    ),
    Module(
        "transfer.plan.shapes",
        ["tests/transfer/plan/test_recurrent_states.py"],
        [
            Mutation("with_states", "len(layout.region_bytes) + one.region", "len(layout.region_bytes)"),
            Mutation("with_states", "0 if one.region is None", "1 if one.region is None"),
            Mutation(
                "with_states", "_box_of(one.layout, one.stride, 0)", "_box_of(one.layout, one.layout.page_bytes, 0)"
            ),
            Mutation("with_states", "num_pages * one.stride", "num_pages"),
        ],
    ),
)
