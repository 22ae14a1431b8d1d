"""Mutations of the manager: pages, index, replica, batches, imports, policy. See `of_kvcache_tiers` for the tiers,
`of_kvcache_groups` for groups of layers.
"""

from tests.mutants.mutation import Module, Mutation

_MANAGER = "tests/kvcache/test_manager.py"

KVCACHE: tuple[Module, ...] = (
    Module(
        "kvcache.pool.pages",
        ["tests/kvcache/test_manager.py", "tests/kvcache/test_against_model.py::test_seeded_moves"],
        [
            Mutation("PagePool.allocate", "self.index.withdraw(ascending)", "pass"),
            Mutation("PagePool.allocate", "self.evictions += len(evicted)", "self.evictions += 1"),
            Mutation("PagePool.allocate", "pages = np.sort(pages)", "pass"),
            Mutation("PagePool.allocate", "self.guard(evicted)", "pass", ["tests/kvcache/tiers/test_host_tier.py"]),
            Mutation("PagePool.allocate_one", "self.index.withdraw_one(page)", "pass"),
            Mutation("PagePool.allocate_one", "self.evictions += 1", "pass"),
            Mutation("PagePool.allocate_one", "self.guard(evicted)", "pass", ["tests/kvcache/tiers/test_host_tier.py"]),
            Mutation(
                "PagePool.release",
                "(holders == 0) & (self.writers[at] == 0)",
                "holders == 0",
                ["tests/kvcache/replica/test_imports.py"],
            ),
            Mutation("PagePool.release", "[::-1]", ""),
            Mutation("PagePool.drop_writer", "self._unused(pages)", "self.writers[pages] == 0"),
            Mutation("PagePool.would_be_taken", "np.count_nonzero(self._unused(pages))", "len(pages)"),
            Mutation(
                "PagePool.would_be_freed",
                "(self.holders[pages] == 1) & (self.writers[pages] == 0)",
                "self.holders[pages] == -1",
            ),
            Mutation("PagePool.forget_idle", "self.index.withdraw(pages)", "pass"),
            Mutation("PagePool.check", "have != want", "have < want", ["tests/kvcache/test_check.py"]),
            Mutation("PagePool.check", "state[1:] != 1", "state[1:] > 1", ["tests/kvcache/test_check.py"]),
            Mutation("PagePool.check", "~self.index.published[idle]", "idle < 0", ["tests/kvcache/test_check.py"]),
            Mutation(
                "PagePool.check", "fresh[self.index.published[fresh]][:1]", "fresh[:0]", ["tests/kvcache/test_check.py"]
            ),
            Mutation("PagePool._free", "self.idle.append(pages[published])", "self._push_fresh(pages[published])"),
        ],
    ),
    Module(
        "kvcache.pool.index",
        ["tests/kvcache/pool/test_index.py", "tests/kvcache/test_against_model.py::test_seeded_moves"],
        [
            Mutation("PrefixIndex._follow", "!= word", "> word"),
            Mutation("PrefixIndex._find", "left if places is None else places[left]", "left"),
            Mutation("PrefixIndex._find", "hits if places is None else places[hits]", "hits"),
            Mutation("PrefixIndex.match", "pages[: missing[0]] if missing.size else pages", "pages[pages != NO_PAGE]"),
            Mutation("PrefixIndex.publish", "winners[missing] = pages[missing]", "winners = pages"),
            Mutation("PrefixIndex.withdraw", "self._changed(", "(lambda *_: None)("),
            Mutation("PrefixIndex.withdraw", "self._linked[before]", "before >= 0"),
            Mutation("PrefixIndex.withdraw_one", "self._changed(page, False)", "pass"),
            Mutation("PrefixIndex._changed", "self.published[pages] = come", "pass"),
            Mutation("PrefixIndex._changed", "self.generation += 1", "pass"),
            Mutation(
                "PrefixIndex.withdraw_one",
                "links[before] = after = links.item(page)",
                "links[before] = after = NO_PAGE",
            ),
            Mutation("PrefixIndex.withdraw_one", "self._before[after] = before", "pass"),
            Mutation("PrefixIndex._insert", "self._changed(at, True, digests)", "pass"),
            Mutation("PrefixIndex._find", "self.digests_of(pages).tobytes() != asked.tobytes()", "False"),
            Mutation("PrefixIndex._find", "digests.take(hits, axis=0)", "digests[: hits.size]"),
            Mutation("PrefixIndex._unlink", "self._before[after.astype(np.intp)] = before.astype(np.int32)", "pass"),
            Mutation("PrefixIndex._insert", "self._before[heads.astype(np.intp)] = written", "pass"),
            Mutation("PrefixIndex._insert", "if not lost.size:", "if lost.size or not lost.size:"),
            Mutation("PrefixIndex.check", "if steps != len(linked):", "if steps < len(linked):"),
        ],
    ),
    Module(
        "kvcache.replica.replica",
        [
            "tests/kvcache/test_manager.py",
            "tests/kvcache/replica/test_batch.py",
            "tests/kvcache/replica/test_imports.py",
            "tests/kvcache/replica/test_fork.py",
            "tests/kvcache/test_against_model.py::test_seeded_moves",
        ],
        [
            Mutation("Replica.reserve", "if not self.pool.free_count:", "if self.pool.free_count < 2:"),
            Mutation("Replica.act", " - self.pool.would_be_freed(plan.replaced[kept:])", ""),
            Mutation("Replica.act", "plan.replaced[kept:]", "plan.replaced", ["tests/kvcache/replica/test_leases.py"]),
            Mutation("Replica.act", "self.pool.would_be_taken(plan.hits)", "0"),
            Mutation("Replica.act", "if taken > self.pool.free_count:", "if taken >= self.pool.free_count:"),
            Mutation("Replica.pages_needed", "+ num_steps - 1", "+ num_steps"),
            Mutation("Replica.pages_needed", "length > self.max_seq_len", "length >= self.max_seq_len"),
            Mutation("Replica.pages_needed", "in_all > self.pool.num_pages", "in_all >= self.pool.num_pages"),
            Mutation("Replica.match", "(context.current_length - 1)", "context.current_length"),
            Mutation("Replica.match", "kept[:3] == (index.generation, first, last)", "kept[1:3] == (first, last)"),
            Mutation("Replica.fork", "self.pool.hold(shared)", "pass"),
            Mutation("Replica.fork", "min(full, int(rows.committed[parent]))", "full"),
            Mutation(
                "Replica.fork", "self.pool.beside > self.pool.free_count", "self.pool.beside >= self.pool.free_count"
            ),
            Mutation("Replica.fork", "if not computed % self.page_size:", "if not full:"),
            Mutation("Replica.reserve_decoding", "np.count_nonzero(beyond[short] > self.page_size) or ", "False or "),
            Mutation(
                "Replica.reserve_decoding", "len(lacking) > self.pool.free_count", "len(lacking) >= self.pool.num_pages"
            ),
            Mutation("Replica.reserve_decoding", " or np.count_nonzero(state.prompt[lacking] < 0)", ""),
            Mutation("Replica.reserve_decoding", " or longest:", ":"),
            Mutation("Replica.refuse_short", 'if call == "step":', "if False:"),
            Mutation("Replica.refuse_short", "np.count_nonzero(lengths > room)", "np.all(lengths > room)"),
            Mutation("Replica.filled", "computed >= self.rows.commit_at[rows]", "computed > self.rows.commit_at[rows]"),
            Mutation("Replica.publish", "if len(filled) == 1 or", "if True or"),
            Mutation("Replica.publish", "self.tier.arrive(filled)", "pass", ["tests/kvcache/tiers/test_host_tier.py"]),
            Mutation("Replica.release", "self._hashers.pop(row, None)", "pass"),
            Mutation(
                "Replica.release",
                "self.tier.leave(row, self._published_pages(row, pages))",
                "pass",
                ["tests/kvcache/tiers/test_host_tier.py"],
            ),
            Mutation(
                "Replica.reserve", "self.refuse_rewrite(row, context)", "pass", ["tests/kvcache/replica/test_leases.py"]
            ),
            Mutation("Replica.advance", "self.counter.hit(row, context.end_idx, before, cached)", "pass"),
            Mutation("Replica._plan", "if cached <= context.start_idx:", "if cached < context.start_idx:"),
            Mutation("Replica._take", "self.pool.release(plan.replaced)", "pass"),
            Mutation("Replica._take", "self.tier.hold(plan.slots)", "pass", ["tests/kvcache/tiers/test_host_tier.py"]),
            Mutation("Replica._publish", "self.pool.release(own[duplicate])", "pass"),
        ],
    ),
    Module(
        "kvcache.replica.rows",
        [
            "tests/kvcache/test_handover.py",
            "tests/kvcache/test_manager.py",
            "tests/kvcache/replica/test_batch.py",
            "tests/kvcache/replica/test_fork.py",
            "tests/kvcache/test_against_model.py",
        ],
        [
            Mutation("AllRows.slack", ".min()", ".max()"),
            Mutation("AllRows.due", ".min()", ".max()"),
            Mutation("BlockRows.unbind", "self.table[row, : self.num_pages[row]] = NO_PAGE", "pass"),
            Mutation("BlockRows.unbind", "self.prompt[row] = -1", "pass"),
            Mutation("BlockRows.unbind", "self.measure(row)", "pass"),
            Mutation(
                "BlockRows.measure", "min(self.num_pages.item(row) * self.page_size, self.max_seq_len)", "1 << 40"
            ),
            Mutation("BlockRows.measure", " if usable else -1", "", ["tests/kvcache/replica/test_imports.py"]),
            Mutation("BlockRows.append", "counts * self.page_size", "self.page_size"),
            Mutation("BlockRows.commit", "(pages + 1)", "pages"),
            Mutation("PromptCounter.admit", "if self._rows.prompt[row] < 0:", "if True:"),
            Mutation("PromptCounter.run", "np.minimum(ends, prompts)", "ends"),
            Mutation(
                "PromptCounter.ran_elsewhere", "self._rows.prompt[row] = self._rows.counted[row] = tokens", "pass"
            ),
        ],
    ),
    Module(
        "kvcache.replica.shares",
        ["tests/kvcache/replica/test_shares.py"],
        [
            Mutation("shares_of_all", "rows = rows[order]", "pass"),
            Mutation("shares_at", "own[order]", "own"),
            Mutation("shares_at", "np.diff(mine).nonzero()[0] + 1", "np.diff(mine).nonzero()[0]"),
            Mutation("as_run", " or np.count_nonzero(indices[1:] - indices[:-1] != 1)", ""),
            Mutation("as_run", "!= count - 1 or", "!= count - 1 and"),
        ],
    ),
    Module(
        "kvcache.replica.batch",
        ["tests/kvcache/replica/test_batch.py", "tests/kvcache/test_against_model.py::test_seeded_moves"],
        [
            Mutation("Batch.update", "self.slack -= 1", "pass"),
            Mutation("Batch.update", "self.due -= 1", "pass"),
            Mutation("Batch.update", "self._updates_left -= 1", "pass"),
            Mutation("Batch.update", "self.starts = self.ends - 1", "self.starts = self.ends"),
            Mutation("Batch.turning", "== 1 % self._page_size", "== 0"),
            Mutation("Batch.turning", "at = self.ends.item(0) % self._page_size", "at = 0"),
            Mutation("Batch.turning", " or self._longest > most", ""),
            Mutation("Batch.part", "self._behind.get(share.replica)", "0"),
            Mutation("Batch.refresh", "self._stale or", ""),
            Mutation("Batch.last_tokens", "self._count - 1", "self._count - 2"),
            Mutation("Batch.last_tokens", "self.refresh()", "pass"),
            Mutation("Batch.lengths", "self.refresh()", "pass"),
            Mutation("Gathered.part", "active - start, active, end)", "active, active, end)"),
            Mutation("Batch.digests", "np.count_nonzero(steps != step) or ", ""),
            Mutation("Batch.lose", "self.catch_up(place)", "pass"),
            Mutation("Batch._refuse_longest", "end >= context.max_length", "end > context.max_length"),
            Mutation("Batch._hand_over", "self.catch_up(place)", "pass"),
            Mutation("Batch._checked", ".max() >= 1 << 31", ".max() > 1 << 31"),
        ],
    ),
    Module(
        "kvcache.replica.context",
        [
            "tests/kvcache/replica/test_context.py",
            "tests/kvcache/replica/test_fork.py",
            "tests/kvcache/test_manager.py",
        ],
        [
            Mutation("TextContext.update", "self._end >= self.max_length", "self._end > self.max_length"),
            Mutation("TextContext.update", "self.leave()", "pass", ["tests/kvcache/replica/test_batch.py"]),
            Mutation("TextContext.set_token_indices", "0 <= start < active", "0 <= start <= active"),
            Mutation("TextContext.set_token_indices", "self.prefix_hasher = None", "pass"),
            Mutation("TextContext.set_token_indices", "self.prefix_hasher.num_tokens > end", "True"),
            Mutation("TextContext.set_token_indices", "self.prefix_hasher.num_tokens > end", "False"),
            Mutation("TextContext.fork", "self.prefix_hasher.copy()", "self.prefix_hasher"),
            Mutation("check_fork", "0 < computed < child.end_idx", "0 < computed <= child.end_idx"),
            Mutation("check_fork", '("cache_salt", "extra_keys")', '("cache_salt",)'),
            Mutation("hasher_of", "kept.salt, kept.extra_keys", "kept.salt, keys"),
            Mutation("hasher_of", "kept.salt, kept.extra_keys", "salt, kept.extra_keys"),
        ],
    ),
    Module(
        "kvcache.replica.hashing",
        [
            "tests/kvcache/replica/test_hashing.py",
            "tests/kvcache/test_manager.py",
            "tests/kvcache/replica/test_fork.py",
        ],
        [
            Mutation("PrefixHasher.__init__", "sorted(extra_keys)", "list(extra_keys)"),
            Mutation("PrefixHasher.__init__", "position, len(key)", "0, len(key)"),
            Mutation("PrefixHasher.copy", "self.keys_left[:], {}", "self.keys_left, {}"),
            Mutation("PrefixHasher.copy", "self.running.copy(), self.known[:]", "self.running.copy(), self.known"),
            Mutation(
                "PrefixHasher._extend", "while keys and keys[-1][0] == page", "while keys and keys[-1][0] >= page"
            ),
            Mutation(
                "next_digests",
                " or hasher.keys_left",
                "",
                ["tests/kvcache/replica/test_hashing.py", "tests/kvcache/replica/test_batch.py"],
            ),
        ],
    ),
    Module(
        "kvcache.replica.imports",
        [
            "tests/kvcache/test_handover.py",
            "tests/kvcache/replica/test_imports.py",
            "tests/kvcache/replica/test_leases.py",
        ],
        [
            Mutation("export_table", "-(-num_tokens // size)", "(num_tokens // size)"),
            Mutation("export_table", "num_tokens -= num_tokens % size", "pass"),
            Mutation(
                "check_table", "0 < table.num_tokens < context.end_idx", "0 < table.num_tokens <= context.end_idx"
            ),
            Mutation("_has_types", "<= {int}", "is not None"),
            Mutation("_check_pages", "max(pages) >= 1 << 31", "max(pages) > 1 << 31"),
            Mutation("_check_pages", "min(pages) <= 0", "min(pages) < 0"),
            Mutation("_check_pages", "len(pages) != wanted", "len(pages) < wanted"),
            Mutation("_check_pages", "len(set(every)) != len(every)", "False"),
            Mutation("_check_digests", ".any(axis=1)", ".all(axis=1)"),
            Mutation("_check_digests", "len(table.digests) != (", "len(table.digests) < ("),
            Mutation("begin_import", "min(replica.pages_here(row), end)", "replica.pages_here(row)"),
            Mutation("begin_import", "if replica.rows.num_pages[row]:", "if replica.rows.num_pages[row] > 1:"),
            Mutation("extend_import", "if not pending.num_tokens <= table.num_tokens", "if not 0 <= table.num_tokens"),
            Mutation("extend_import", "np.array_equal(now[: len(known)], known)", "True"),
            Mutation(
                "check_table",
                "not last and table.num_tokens % table.page_size",
                "not last and table.num_tokens < table.page_size",
            ),
            Mutation("own_import", "if is_open and pending.closed:", "if False:"),
            Mutation("own_import", " if pending.owner is replica", ""),
            Mutation("_check_open", "is not pending", "is None"),
            Mutation("_check_open", "replica.refuse_renamed(row, context)", "pass"),
            Mutation("_check_proof", "if pending.needs_copy:", "if False:"),
            Mutation("_check_proof", "copier.proof is not proof", "copier.proof is None"),
            Mutation("_check_proof", "proof.num_tokens < pending.tokens[1]", "proof.num_tokens < 0"),
        ],
    ),
    Module(
        "kvcache.replica.block_table",
        ["tests/kvcache/replica/test_imports.py", "tests/kvcache/replica/test_leases.py"],
        [Mutation("PendingImport.take_up", "max(first, table.num_tokens)", "table.num_tokens")],
    ),
    Module(
        "kvcache.replica.copier",
        [
            "tests/kvcache/test_handover.py",
            "tests/kvcache/replica/test_imports.py",
            "tests/kvcache/replica/test_leases.py",
        ],
        [
            Mutation("ImportBook.begin", "self._pool.add_writer(pending.written)", "pass"),
            Mutation("ImportBook.begin", "self._rows.measure(row, usable=False)", "pass"),
            Mutation("ImportBook.make_copier", "if pending in self.copiers:", "if False:"),
            Mutation("ImportBook.cancel", "copier is None or copier.is_over", "True"),
            Mutation("ImportBook._free", "self._rows.measure(row)", "pass"),
            Mutation("ImportBook._free", "self.of_row.get(row) is pending", "row in self.of_row"),
            Mutation(
                "ImportBook.check",
                "pending.closed and (copier is None or copier.is_over)",
                "False",
                ["tests/kvcache/test_handover.py"],
            ),
        ],
    ),
    Module(
        "kvcache.replica.copier",
        [
            "tests/kvcache/test_handover.py",
            "tests/kvcache/replica/test_imports.py",
            "tests/kvcache/replica/test_leases.py",
        ],
        [
            Mutation("ImportCopier.take", "self.is_over or self._has_all or pending.closed", "pending.closed"),
            Mutation("ImportCopier.take", " or pending.closed:", ":"),
            Mutation("ImportCopier.take", "self._taken, self._has_all = pending.tokens[1], last", "pass"),
            Mutation("ImportCopier.prove", "self.is_over or not self._has_all", "not self._has_all"),
            Mutation("ImportCopier.prove", "self.is_over or not self._has_all", "self.is_over"),
            Mutation("ImportCopier.prove", "self.give_up()", "pass"),
            Mutation("ImportCopier.give_up", "self._ended()", "pass"),
        ],
    ),
    Module(
        "kvcache.replica.leases",
        [
            "tests/kvcache/test_handover.py",
            "tests/kvcache/replica/test_leases.py",
            "tests/kvcache/test_against_model.py::test_seeded_moves",
        ],
        [
            Mutation("PageLeases.leave", "computed = max(computed, int(self._rows.committed[row]))", "pass"),
            Mutation(
                "PageLeases.leave",
                "max(int(self._rows.cached[row]), int(self.told[row]))",
                "int(self._rows.cached[row])",
            ),
            Mutation("PageLeases.leave", "self.told[row], self.kept[row] = 0, _NEVER", "pass"),
            Mutation("PageLeases.grant", "self.tell(row, int(self._rows.cached[row]))", "pass"),
            Mutation("PageLeases.tell", "max(tokens, int(self.told[row]))", "tokens"),
            Mutation("PageLeases.refuse_rewrite", "starts < self.told[rows]", "starts > self.told[rows]"),
            Mutation("PageLeases.end", "self.told[row], self.kept[row] = 0, _NEVER", "pass"),
            Mutation("PageLeases.replace", "max(cached, int(self.told[row]))", "len(pages) * self._page_size"),
            Mutation("PageLeases.replace", "self._hold(lease, seen)", "pass"),
            Mutation("PageLeases.end", "self._pool.release(pages)", "pass"),
            Mutation("PageLeases.end", "self.of_row[row].remove(lease)", "self.of_row[row].pop()"),
            Mutation("PageLeases._hold", "self._pool.hold(pages)", "pass"),
            Mutation("books_of", "if lease.owner is each:", "if True:"),
        ],
    ),
    Module(
        "kvcache.replica.keys",
        ["tests/kvcache/test_handover.py", "tests/kvcache/replica/test_keys.py", "tests/kvcache/test_misuse.py"],
        [
            Mutation("checked_salt", "salt.encode()", "pass"),
            Mutation("checked_keys", "not 0 <= at < 1 << 31", "not at < 1 << 31"),
            Mutation("checked_keys", "not 0 <= at < 1 << 31", "not 0 <= at"),
            Mutation("checked_keys", "(at, bytes(key))", "(at, key)"),
        ],
    ),
    Module(
        "kvcache.arguments",
        ["tests/kvcache/test_misuse.py", "tests/kvcache/test_hostile.py"],
        [
            Mutation("integer", "if isinstance(value, bool | np.bool_):", "if False:"),
            Mutation("whole", "not least <= found <= most", "not least <= found"),
            Mutation("number", " and least <= found <= most", "", ["tests/kvcache/test_params.py"]),
            Mutation("steps", "1 <= num_steps <= MOST", "num_steps <= MOST"),
        ],
    ),
    Module(
        "kvcache.claims",
        ["tests/kvcache/test_manager.py", "tests/kvcache/replica/test_batch.py"],
        [
            Mutation("Claims.claim", "not 0 <= chosen < count", "not chosen < count"),
            Mutation("Claims._bind", "len(set(found)) != len(found):", "False:"),
            Mutation("Claims.release", "self._releases += 1", "pass"),
            Mutation(
                "Claims.release",
                "del self.bound[_key(context)]",
                "pass",
                ["tests/kvcache/test_check.py", "tests/kvcache/test_misuse.py"],
            ),
            Mutation("Claims._unbound", "if place in self._contexts:", "if False:", ["tests/kvcache/test_misuse.py"]),
            Mutation(
                "Claims._refuse_stale",
                "batch.slack = batch.due = UNKNOWN",
                "pass",
                ["tests/kvcache/replica/test_batch.py"],
            ),
            Mutation(
                "Claims._refuse_stale", "if batch.owner is not self:", "if False:", ["tests/kvcache/test_misuse.py"]
            ),
            Mutation("_key", "context if by_identity else (id(context),)", "context", ["tests/kvcache/test_misuse.py"]),
            Mutation(
                "Claims.check",
                "if rows != self.places:",
                "if len(rows) != len(self.places):",
                ["tests/kvcache/test_check.py"],
            ),
        ],
    ),
    Module(
        "kvcache.replicas",
        [
            "tests/kvcache/test_handover.py",
            "tests/kvcache/test_manager.py",
            "tests/kvcache/replica/test_batch.py",
            "tests/kvcache/test_admission.py",
            "tests/kvcache/replica/test_peer_copies.py",
        ],
        [
            Mutation(
                "_fits",
                "if len(replica.rows.row_of) == len(replica.rows.request_ids):",
                "if not replica.rows.request_ids:",
            ),
            Mutation("_fits", " + replica.pool.would_be_taken(hits)", ""),
            Mutation("Replicas.reserve", "and first_time:\n            self._router", ":\n            self._router"),
            Mutation("Replicas.reserve_batch", "gathered.slack >= num_steps - 1", "gathered.slack >= num_steps - 2"),
            Mutation(
                "Replicas.fetch",
                "replica.leases.refuse_rewrite(state.rows, state.starts)",
                "pass",
                ["tests/kvcache/replica/test_leases.py"],
            ),
            Mutation(
                "Replicas.reserve_batch",
                "self.each[replica_idx].refuse_rewrite(row, context)",
                "pass",
                ["tests/kvcache/test_handover.py"],
            ),
            Mutation("Replicas.fetch", 'replica.refuse_short(state.rows, lengths, "fetch")', "pass"),
            Mutation(
                "Replicas.step", 'self.each[share.replica].refuse_short(share.rows, computed[share.at], "step")', "pass"
            ),
            Mutation("Replicas.step", "gathered.due > 0", "gathered.due >= 0"),
            Mutation("Replicas.step", "gathered.due = 1", "gathered.due = 2"),
            Mutation("Replicas.step", "None if gathered.due else gathered.turning()", "gathered.turning()"),
            Mutation("Replicas._computed", "self._rows.cached[gathered.places] = gathered.starts", "pass"),
            Mutation(
                "Replicas._computed",
                "counter.run",
                "(lambda *_: 0)",
                ["tests/kvcache/replica/test_batch.py"],
            ),
            Mutation("Replicas._reserve_decoding", "gathered.slack == -1 and ", ""),
            Mutation(
                "Replicas.fetch_one", "end > self.capacity[row]", "not row < 1 << 30", ["tests/kvcache/test_manager.py"]
            ),
            Mutation("Replicas.step_one", "computed > self.capacity[row] or ", "", [_MANAGER]),
            Mutation("Replicas.step_one", "computed >= rows", "computed > rows", [_MANAGER]),
            Mutation(
                "Replicas._is_plain", "row not in replica.leases.of_row and ", "", ["tests/kvcache/test_manager.py"]
            ),
            Mutation("Replicas._is_plain", " and not replica.counter.is_open", "", [_MANAGER]),
            Mutation("Replicas.step", "gathered.slack < -1", "gathered.slack < -2"),
            Mutation("Replicas._reserve_decoding", "gathered.slack = num_steps - 1", "gathered.slack = num_steps"),
            Mutation(
                "Replicas.fork",
                "self.placed[replica_idx].copy_page(source, target)",
                "pass",
                ["tests/kvcache/replica/test_fork.py"],
            ),
            Mutation("place_replicas", "slice(first, first + rows)", "slice(0, rows)"),
        ],
    ),
    Module(
        "kvcache.manager",
        [
            "tests/kvcache/test_manager.py",
            "tests/kvcache/replica/test_fork.py",
            "tests/kvcache/replica/test_imports.py",
        ],
        [
            Mutation("PagedKVCacheManager.maybe_reserve", "- num_steps + 1", "- num_steps + 2"),
            Mutation(
                "PagedKVCacheManager.fork",
                "if not forked:\n                self._claims.release",
                "if False:\n                self._claims.release",
            ),
            Mutation("PagedKVCacheManager.claim", "if self.contains(context.request_id):", "if True:"),
        ],
    ),
    Module(
        "kvcache.replica.inputs",
        ["tests/kvcache/test_manager.py"],
        [Mutation("data_parallel_splits", "np.diff(replicas) < 0", "np.diff(replicas) < -1")],
    ),
)
