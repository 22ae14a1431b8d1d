"""Mutations of what lies around the pools of the manager: tiers, hints, quotas, routing, sizes."""

from tests.mutants.mutation import Module, Mutation

KVCACHE_TIERS: tuple[Module, ...] = (
    Module(
        "kvcache.pool.idle_order",
        ["tests/kvcache/pool/test_idle_order.py"],
        [
            Mutation("IdleOrder.remove", "self._stamp[pages] = -1", "pass"),
            Mutation("IdleOrder.remove", "self._give_up(first)", "pass"),
            Mutation("IdleOrder.pop", "self.count -= count", "self.count -= len(taken)"),
            Mutation("IdleOrder.pop", "self.count -= len(pages)", "pass"),
            Mutation("IdleOrder.pop", "left + count == self._end_of(chunk) - head", "left + count > 0"),
            Mutation(
                "IdleOrder.pop", "self._live[chunk], self._head = left, head + count", "self._head = head + count"
            ),
            Mutation("IdleOrder.squeeze", "pairs.min() > CHUNK", "pairs.min() >= CHUNK"),
            Mutation("IdleOrder._give_up", "self._spare.append(chunk)", "pass"),
        ],
    ),
    Module(
        "kvcache.pool.retention",
        ["tests/kvcache/pool/test_retention.py"],
        [
            Mutation("page_hints", "(retention, *retention.ranges)", "(retention,)"),
            Mutation("page_hints", "-(-hint.start // page_size)", "hint.start // page_size"),
            Mutation("merge_codes", "refuted | (old == SHARED)", "refuted"),
            Mutation("HintedOrder.append", "(1.0 - self.share)", "self.share"),
            Mutation("HintedOrder.append", "if not len(pages):", "if False:"),
            Mutation("HintedOrder.pop", "self._quotas.disown(gone)", "pass", ["tests/kvcache/replica/test_hints.py"]),
            Mutation("HintedOrder.pop", "self.codes[gone] = NEUTRAL", "pass"),
            Mutation("HintedOrder.pop", "self._on_surplus(taken[0])", "pass", ["tests/kvcache/replica/test_hints.py"]),
            Mutation("HintedOrder._pop_older", "pages, lead = pages[:expired], 0", "pages = pages[:expired]"),
            Mutation("HintedOrder._pop_older", "bound - lead", "bound"),
            Mutation("HintedOrder._expired", "> now", ">= 0"),
        ],
    ),
    Module(
        "kvcache.replica.hints",
        ["tests/kvcache/replica/test_hints.py"],
        [
            Mutation("ReplicaHints.come", "self._found[row] += found", "self._found[row] = found"),
            Mutation("ReplicaHints.brought", "baseline.touch(words)", "pass"),
            Mutation("ReplicaHints.leave", "self._salt_of(row)", 'getattr(context, "cache_salt", None)'),
            Mutation("ReplicaHints._judge", "promised * scale", "promised"),
            Mutation("ReplicaHints._judge", "gained * scale", "gained"),
            Mutation("ReplicaHints._forget_given_up", "computed < last", "computed > last"),
            Mutation("ReplicaHints._order_pages", "self._forget(pool.index.words_of(surplus))", "None"),
        ],
    ),
    Module(
        "kvcache.pool.baselines",
        ["tests/kvcache/pool/test_baselines.py", "tests/kvcache/replica/test_hints.py"],
        [
            Mutation("LruBaseline.visit", "room // self.rate", "room"),
            Mutation("LruBaseline._touch", "while len(kept) > self._room:", "while len(kept) > self._room + 1:"),
            Mutation("HintShare.learn", "max(_LEAST_SHARE,", "max(0.0,"),
            Mutation("HintShare.learn", "min(self._most,", "min(1.0,"),
        ],
    ),
    Module(
        "kvcache.pool.quotas",
        ["tests/kvcache/pool/test_retention.py", "tests/kvcache/replica/test_hints.py"],
        [
            Mutation("TenantQuotas._weigh", "> self._quotas[owner]", ">= self._quotas[owner]"),
            Mutation("TenantQuotas._id_of", "self._shares.get(salt, self._share)", "self._share"),
            Mutation("TenantQuotas._new_id", "if not order.count and", "if"),
        ],
    ),
    Module(
        "kvcache.routing",
        ["tests/kvcache/test_routing.py"],
        [
            Mutation("Router.recommend", "(not fits[replica], costs", "(costs"),
            Mutation("Router.admitted", "self._loads = [load * decay for load in self._loads]", "pass"),
        ],
    ),
    Module(
        "kvcache.replica.partial",
        ["tests/kvcache/replica/test_partial.py"],
        [
            Mutation("PartialReuse.find", "context.current_length - 1)", "context.current_length)"),
            Mutation(
                "PartialReuse.find",
                "pool.holders[own] != 1 or",
                "",
                equivalent="forks share no page past the committed ones",
            ),
            Mutation("PartialReuse._is_published", "bool(index.published[page]) and", ""),
            Mutation("PartialReuse._prefix", 'b"" if salt is None else b"=" + salt.encode()', 'b""'),
        ],
    ),
    Module(
        "kvcache.replica.peer_copies",
        ["tests/kvcache/replica/test_peer_copies.py"],
        [
            Mutation("PeerCopies.bring", "mine.pool.hold(present)", "pass"),
            Mutation("PeerCopies.bring", "self.copied += len(brought)", "self.copied += len(digests)"),
            Mutation("PeerCopies._runs", "index.may_have(digests[at])", "index.may_have(digests[0])"),
            Mutation("PeerCopies._copy", "brought[copied : copied", "brought[: copied"),
            Mutation("PeerCopies.bring", "new + mine.pool.would_be_taken(present)", "new"),
        ],
    ),
    Module(
        "kvcache.sizing",
        ["tests/kvcache/test_sizing.py", "tests/kvcache/test_manager.py"],
        [
            Mutation("infer_optimal_batch_size", "max(dp, min", "max(1, min"),
            Mutation("estimated_memory_size", "-(-batch // dp)", "(batch // dp)"),
            Mutation("pages_per_replica", "if share < size:", "if share <= size:"),
            Mutation("check_sizes", "max_batch_size, params.data_parallel_degree", "max_batch_size, 1"),
        ],
    ),
    Module(
        "kvcache.check",
        ["tests/kvcache/test_check.py"],
        [
            Mutation("check_replica", "np.add.at(holders, rows.pages(row), 1)", "pass"),
            Mutation(
                "check_replica",
                "np.add.at(writers, pending.written, 1)",
                "pass",
                ["tests/kvcache/replica/test_imports.py"],
            ),
            Mutation("_check_row", "rows.table[row, len(pages) :].any()", "False"),
            Mutation("_check_row", "not pool.index.published[pages[:committed]].all()", "False"),
        ],
    ),
    Module(
        "kvcache.tiers.host_tier",
        ["tests/kvcache/tiers/test_host_tier.py"],
        [
            Mutation("ReplicaTier.match", "(context.current_length - 1)", "context.current_length"),
            Mutation("ReplicaTier.store", "fits = min(len(new), pool.free_count)", "fits = len(new)"),
            Mutation("ReplicaTier.poll", "self.storing[pages] = False", "pass"),
            Mutation("ReplicaTier.poll", "self.host.pool.release(slots)", "pass"),
            Mutation("ReplicaTier.forget_waiting", "self.waiting.clear()", "pass"),
            Mutation("ReplicaTier.restore", "self.pool.add_writer(pages)", "pass"),
            Mutation("ReplicaTier._end", "self.host.pool.release(load.slots)", "pass"),
        ],
    ),
    Module(
        "kvcache.tiers.tiers",
        ["tests/kvcache/tiers/test_host_tier.py"],
        [
            Mutation(
                "Tiers.tick",
                "min(self._credit + self.share * (now - self._seen), _MOST_CREDIT_S)",
                "self._credit + self.share * (now - self._seen)",
            ),
            Mutation("Tiers.reset", "tier.load_all()", "pass"),
            Mutation("Tiers.reset", "self.host.pool.forget_idle()", "pass"),
            Mutation("_check_queue", "if pages.size and not", "if not pages.size and not"),
        ],
    ),
    Module(
        "kvcache.tiers.file_tier",
        ["tests/kvcache/tiers/test_file_tier.py"],
        [
            Mutation("FileTier.__init__", "host.pool.num_pages // 4", "host.pool.num_pages"),
            Mutation("FileTier.promote", "self._host.pool.free_count // 2", "self._host.pool.free_count"),
            Mutation("FileTier.tick", "or self._clock() - self._queue[0][0] > _LONGEST_QUEUED_S", ""),
            Mutation("FileTier.tick", "self._clock() - self._scanned > _RESCAN_S", "False"),
            Mutation("FileTier._take_up_reads", "read.slots[right], read.digests[right]", "read.slots, read.digests"),
            Mutation("FileTier._take_up_reads", "refusal for refusal in refusals if refusal", "set(refusals) - {None}"),
            Mutation("FileTier._begin_write", "& (self._index.find(digests[once]) == NO_ENTRY)", ""),
            Mutation("FileTier._take_up_write", "self._paused_until = self._clock() + _PAUSE_S", "pass"),
            Mutation(
                "FileTier._make_room",
                "self._writer.submit(Path.unlink, self._folder.path / name, missing_ok=True)",
                "pass",
            ),
        ],
    ),
    Module(
        "kvcache.tiers.page_files",
        ["tests/kvcache/tiers/test_page_files.py"],
        [
            Mutation("FileFormat.judge", "if row[: self.name_bytes] != digest:", "if False:"),
            Mutation("FileFormat.judge", "None if row == self.row(digest, parts) else FileRefusal.CORRUPTED", "None"),
            Mutation("_judge", "if footer == wanted:", "if True:"),
            Mutation("FileFormat.refuses", "len({row.tobytes() for row in names}) < len(names)", "False"),
            Mutation("FileFormat.refuses", "(names[:, -1] >= self.tables).any()", "False"),
            Mutation("FileFormat.name_bytes", "8 if self.tables > 1 else 0", "0"),
            Mutation(
                "FileFormat.count_of",
                "0 if rest or count < 0 else count",
                "max(0, count)",
                ["tests/kvcache/tiers/test_file_tier.py::test_the_layout_of_a_file_knows_its_sizes"],
            ),
            Mutation("write_pages", "path.unlink(missing_ok=True)", "pass"),
        ],
    ),
    Module(
        "kvcache.tiers.file_index",
        ["tests/kvcache/tiers/test_file_tier.py"],
        [
            Mutation("FileIndex.use", "self._files.move_to_end(self._names[number])", "pass"),
            Mutation("FileIndex.room_for", "self.bytes + size > self._max_bytes", "self.bytes > self._max_bytes"),
            Mutation("FileIndex.forget", "self.bytes -= file.size", "pass"),
        ],
    ),
    Module(
        "kvcache.tiers.object_tier",
        [],
        [
            Mutation("ObjectTier.promote", "digests[: max(0, self._host.pool.num_pages // 2 - first)]", "digests"),
            Mutation("ObjectTier.promote", "if unknown and unknown[0] not in self._busy:", "if unknown:"),
            Mutation("ObjectTier.coming", "> now for", ">= now - 1e9 and group.name in self._busy for"),
            Mutation("ObjectTier.reset", "self._era += 1", "pass"),
            Mutation("ObjectTier.reset", "self._untold = True", "pass"),
            Mutation("ObjectTier._tried", "self._paused_until = self._clock() + _PAUSE_S", "pass"),
            Mutation("ObjectTier._end", "self._host.pool.release(job.slots)", "pass"),
            Mutation("ObjectTier._end", "self._queue.clear()", "pass"),
            Mutation("ObjectTier._fetch", "room, pieces = pool.free_count // 2", "room, pieces = pool.free_count"),
            Mutation("ObjectTier._fetch", "break  # what follows", "continue  # what follows"),
            Mutation("ObjectTier._read", "self._layout.blank(io.memory[: starts[-1]])", "pass"),
            Mutation("ObjectTier._take_pages", "slots[right], digests[right]", "slots, digests"),
            Mutation("ObjectTier._take_pages", "self._broken.add(piece.name)", "pass"),
            Mutation("ObjectTier._begin_write", "(slots != NO_PAGE).all()", "(slots != NO_PAGE).any()"),
            Mutation("ObjectTier._write", "if not known or name in broken:", "if True:"),
            Mutation("ObjectTier.used", "len(self._queue) < _MOST_QUEUED", "True"),
            Mutation("ReadRates.pays", "(before + pages) * self.page_s", "pages * self.page_s"),
            Mutation("ReadRates.pays", "self._tried = now", "pass"),
        ],
    ),
    Module(
        "kvcache.tiers.page_objects",
        ["tests/kvcache/tiers/test_object_tier.py"],
        [
            Mutation("ObjectFormat.groups", "first % self.count", "0"),
            Mutation("ObjectFormat.unpack", " if row.any() else FileRefusal.CUT", ""),
            Mutation("ObjectFormat.epoch_of", "and content == self.epoch_object(text.decode())", ""),
        ],
    ),
    Module(
        "transfer.nixl.object_io",
        ["tests/transfer/nixl/test_object_io.py"],
        [
            Mutation("NixlObjectIO._ask", "            self._end()\n", ""),
            Mutation("NixlObjectIO._rows", "self._prefix + one.key", "one.key"),
        ],
    ),
    Module(
        "transfer.nixl.object_store",
        ["tests/transfer/nixl/test_object_io.py"],
        [
            Mutation("_listen", "os._exit(0)", "pass"),
            Mutation("_Plugin.write", "if not all(done):", "if False:"),
        ],
    ),
)
