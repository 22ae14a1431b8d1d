"""Mutations written by hand: rules that no operator on the syntax tree can break. Examples are: identity or equality,
the choice between two similar values, shared or copied data, and the requests that get a message.

`make mutants` reports an entry whose text no longer occurs. No test fails because of such an entry, so an edit of a
function never requires an edit of this list.
"""

from tests.mutants.mutation import Module, Mutation

HANDWRITTEN: tuple[Module, ...] = (
    Module(
        "kvcache.pool.pages",
        [
            Mutation("PagePool.drop_writer", "self._unused(pages)", "self.writers[pages] == 0"),
            Mutation("PagePool._free", "self.idle.append(idle)", "self._push_fresh(idle)"),
        ],
    ),
    Module(
        "kvcache.pool.index",
        [
            Mutation("PrefixIndex.match", "pages[: (pages == NO_PAGE).argmax()]", "pages[pages != NO_PAGE]"),
            Mutation("PrefixIndex.publish", "winners[missing] = pages[missing]", "winners = pages"),
            Mutation(
                "PrefixIndex._unlink_one", "links[before] = after = links.item(page)", "links[before] = after = NO_PAGE"
            ),
            Mutation("PrefixIndex._find", "digests.take(hits, axis=0)", "digests[: hits.size]"),
        ],
    ),
    Module(
        "kvcache.replica.replica",
        [
            Mutation("Replica.find", "kept[:3] == (index.generation, first, last)", "kept[1:3] == (first, last)"),
            Mutation("Replica.hasher", "lineage = self.lineage(row)", "lineage = self.lineage(None)"),
            Mutation("Replica.hasher_of_pages", "self.refuse_renamed(row, context)", "pass"),
            Mutation("Replica.hasher_of_pages", "lineage is self.weights.now", "lineage"),
            Mutation("Replica.lineage", "known.switches != now.switches", "False"),
            Mutation("Replica.fork", "self._lineages[parent]", "self.weights.now"),
            Mutation("Replica.fork", "rows.stale[row] = rows.stale[parent]", "pass"),
        ],
    ),
    Module(
        "kvcache.replica.context",
        [
            Mutation("check_fork", '("cache_salt", "extra_keys")', '("cache_salt",)'),
        ],
    ),
    Module(
        "kvcache.replica.hashing",
        [
            Mutation("PrefixHasher.fits", "self.named == named", "self.salt == named[0]"),
            Mutation("PrefixHasher.fits", " and self.segments == segments", ""),
            Mutation("_seeded", "fields.append(weights)", "pass"),
            Mutation("PrefixHasher.copy", "_known(twin.running, self.known)", "bytearray(self.known)"),
            Mutation("_compiled", "except ImportError", "except OSError"),
        ],
    ),
    Module(
        "kvcache.replica.imports",
        [
            Mutation("export_table", ", num_tokens // size)\n    first", ", num_tokens)\n    first"),
            Mutation("_check_open", "is not pending", "is None"),
            Mutation("_check_proof", "copier.proof is not proof", "copier.proof is None"),
            Mutation("_check_proof", "proof.num_tokens < pending.tokens[1]", "proof.num_tokens < 0"),
        ],
    ),
    Module(
        "kvcache.replica.copier",
        [
            Mutation("ImportBook._free", "self.of_row.get(row) is pending", "row in self.of_row"),
        ],
    ),
    Module(
        "kvcache.replica.leases",
        [
            Mutation("PageLeases.replace", "max(0, end - first)", "len(pages)"),
            Mutation("PageLeases.end", "leases.remove(lease)", "leases.pop()"),
        ],
    ),
    Module(
        "kvcache.claims",
        [
            Mutation("Claims.check", "if rows != self.places:", "if len(rows) != len(self.places):"),
        ],
    ),
    Module(
        "kvcache.placement",
        [
            Mutation("place_replicas", "len(placed), sizes.max_seq_len", "0, sizes.max_seq_len"),
        ],
    ),
    Module(
        "kvcache.replicas",
        [
            Mutation(
                "Replicas.__init__", "[one for one in tiers if one is not None]", "[one for one in tiers[:1] if one]"
            ),
        ],
    ),
    Module(
        "kvcache.replica.tables",
        [
            Mutation("RowTables.every", "digests ^ self._mixed", "digests ^ self._mixed[:1]"),
            Mutation("RowTables.publish", "own[~duplicate], names[~duplicate]", "own, names"),
        ],
    ),
    Module(
        "kvcache.replica.contents",
        [
            Mutation("PageContents.lease", "np.concatenate(tables)", "tables[0]"),
        ],
    ),
    Module(
        "kvcache.tiers.tiers",
        [
            Mutation("make_tiers", "layout(*named), count", "layout(), count"),
            Mutation("StateTier._let_go", "self.pool.release(pages)", "self.pool.drop_writer(pages)"),
            Mutation("divide_tiers", "space - slots * state_bytes", "space * (1 - share)"),
        ],
    ),
    Module(
        "kvcache.events.book",
        [
            Mutation("EventBook.state", "*reversed(self._shared)", "HOST, FILES"),
            Mutation("EventBook._go", "np.subtract.at(self._kids[source]", "np.add.at(self._kids[source]"),
        ],
    ),
    Module(
        "scheduler_adapters.loop",
        [
            Mutation(
                "ServingLoop._plan",
                "[entry.context.active_length for entry in running]",
                "[entry.context.end_idx - entry.context.start_idx for entry in running]",
            ),
        ],
    ),
    Module(
        "kvcache.policies.hints",
        [
            Mutation("_said_of", "said[newest[newest >= 0]] = True", "said[:] = True"),
            Mutation("ReplicaHints.leave", "pages, self._salt_of(row)", 'pages, getattr(context, "cache_salt", None)'),
        ],
    ),
    Module(
        "kvcache.tiers.host_tier",
        [
            Mutation("LowerTier._publish", "slots[right], digests[right]", "slots, digests"),
        ],
    ),
    Module(
        "transfer.nixl.object_io",
        [
            Mutation("NixlObjectIO._ask", "            self._end()\n", ""),
        ],
    ),
    Module(
        "kvcache.layout",
        [
            Mutation("scales_of", "words.stride(0), *", "scales.page_elements, *"),
        ],
    ),
    Module(
        "kvcache.copies",
        [
            Mutation("page_rows", "blocks.stride(0)", "blocks[0].numel()"),
        ],
    ),
    Module(
        "transfer.plan.shapes",
        [
            Mutation(
                "dense", "_box_of(layout.scales, layout.page_bytes", "_box_of(layout.scales, layout.scales.page_bytes"
            ),
            Mutation(
                "with_states", "_box_of(one.layout, one.stride, 0)", "_box_of(one.layout, one.layout.page_bytes, 0)"
            ),
        ],
    ),
    Module(
        "kvcache.states.state_pages",
        [
            Mutation("StatePages.generation", " + self.below.generation", ""),
            Mutation("StatePages.release", "self._passing.pop(request_id, None)", "self._passing.get(request_id)"),
            Mutation("StatePages.cancel_import", "self._copy(copy, page)", "self._reset(page)"),
        ],
    ),
    Module(
        "kvcache.replica.row_states",
        [
            Mutation("step_drafted", "each[replica_idx]", "each[0]"),
        ],
    ),
    Module(
        "kvcache.endpoints.prometheus",
        [
            Mutation("_states", "states.pool.idle.count", "states.num_held"),
            Mutation("_of_states", "read(states)", "read(all_of.states[0])"),
            Mutation("_pages", "replica.pool.num_pages - free", "replica.pool.num_pages - idle"),
            Mutation("_prompt_tokens", "metrics.cache_tokens", "metrics.prompt_tokens"),
        ],
    ),
    Module(
        "kvcache.params",
        [
            Mutation("_CONVOLVED", '("conv.B", "conv.C", "conv.x")', '("conv.x", "conv.B", "conv.C")'),
        ],
    ),
    Module(
        "scheduler_adapters.hf.recurrent",
        [
            Mutation("PagedStates.store", "self._written, kinds", "self._pages, kinds"),
            Mutation("_shape_of", "mixer.head_v_dim, mixer.num_k_heads", "mixer.head_v_dim, mixer.num_v_heads"),
        ],
    ),
    Module(
        "kvcache.endpoints.publisher",
        [
            Mutation("_Stream.reply", "except zmq.ZMQError:", "except zmq.ContextTerminated:"),
            Mutation("_Worker.turn", "told, self._untold = self._untold, []", "told = []"),
        ],
    ),
    Module(
        "transfer.pull.lease",
        [
            Mutation("LeaseWords.give_back", "lease.word_idx", "lease.lease_id"),
            Mutation("Lease.is_read", "len(heard) == self.ranks[engine] * ours", "len(heard) >= 1"),
            Mutation("Lease.is_read", "self.ranks[engine] * ours", "self.ranks[engine]"),
            Mutation("LeaseBook.grant", "if not running:", "if True:"),
            Mutation("LeaseBook._verdict", "if (at, note.rank) in", "if (at, note.ranks) in"),
        ],
    ),
    Module(
        "transfer.pull.pull",
        [
            Mutation("Puller._holds", "word == pull.lease.lease_id", "word != CLEARED"),
            Mutation("Puller._collect_reads", "pull.reading.remove(entry)", "pull.reading.clear()"),
        ],
    ),
    Module(
        "transfer.pull.remote",
        [
            Mutation("_check_ranks", "list(range(first.ranks))", "[found.rank for found in ranks]"),
            Mutation(
                "_check_fit",
                "differences(mine.settings, found.settings)",
                "differences(mine.settings, ranks[0].settings)",
            ),
        ],
    ),
    Module(
        "transfer.nixl.agent",
        [
            Mutation("Agent.remove_peer", "self._words.pop(key)", "self._words[key]"),
            Mutation("Agent.read_word", "_FIRST, note", '_FIRST, b""'),
            Mutation("Agent.close", "self._agent = self._agent, None", "_ = self._agent, None"),
        ],
    ),
    Module(
        "transfer.pull.replica",
        [
            Mutation("ReplicaTransfer._fail", "safe = all(one.is_over for one in pull.reads)", "safe = True"),
        ],
    ),
    Module(
        "transfer.pull.directory",
        [
            Mutation("Directory.watch", "> self._times.heartbeat_s:", "> self._times.idle_s:"),
        ],
    ),
    Module(
        "transfer.wire.handshake",
        [
            Mutation("HandshakeServer.serve", "{**self._cards, card.engine_id: card}", "{card.engine_id: card}"),
        ],
    ),
    Module(
        "transfer.wire.messages",
        [
            Mutation("digest_of", "hashlib.sha256(key).digest() if key", "hashlib.sha256().digest() if key"),
        ],
    ),
    Module(
        "transfer.engine.peers",
        [
            Mutation("NotificationBook.accept", "self.is_complete(peer, name)", "name in transfers"),
        ],
    ),
    Module(
        "transfer.plan.boxes",
        [
            Mutation("_check_box", "else group.page_size)", "else box.extent[TOKEN])"),
        ],
    ),
    Module(
        "transfer.connector.scheduler",
        [
            Mutation("NixlConnectorScheduler._leased", "if offer is None:", "if offer is not None and offer.over:"),
            Mutation(
                "NixlConnectorScheduler._lease_over",
                "if len(offer.over) == self.config.ranks:",
                "if len(offer.over) == 1:",
            ),
            Mutation("Offer.answer", "held.prompt.digest(count)", "held.prompt.digest(held.num_tokens)"),
        ],
    ),
    Module(
        "transfer.connector.worker_book",
        [
            Mutation(
                "WorkerBook.on_lease",
                "if self.leases.get(event.request_id) != event.lease_id:",
                "if event.request_id not in self.leases:",
            ),
        ],
    ),
    Module(
        "scheduler_adapters.service.requests",
        [
            Mutation(
                "PREFILL_MOVES",
                '"held": frozenset({"ending", "over"})',
                '"held": frozenset({"ending", "over", "queued"})',
            ),
            Mutation("DECODE_MOVES", '"decoding": frozenset({"over"})', '"decoding": frozenset({"over", "waiting"})'),
            Mutation("TrackedRequest.blame", "self.reason or reason", "reason or self.reason"),
            Mutation("TrackedRequest.move", "deadline\n", "self.deadline\n"),
        ],
    ),
    Module(
        "scheduler_adapters.service.decode",
        [
            Mutation("DecodeScheduler._on_message", "(message.attempt, prefill)", "(request.attempt, prefill)"),
            Mutation("DecodeScheduler._ask", "self._unasked.values()", "self._requests.values()"),
        ],
    ),
    Module(
        "scheduler_adapters.service.prefill",
        [
            Mutation(
                "PrefillScheduler._on_output",
                "self._loop.abort(request.key)\n        self.peers",
                "self._loop.free(request.key)\n        self.peers",
            ),
            Mutation("PrefillScheduler._offer_chunks", "self._untold.values()", "self._requests.values()"),
        ],
    ),
    Module(
        "scheduler_adapters.service.messages",
        [
            Mutation("Token", "lt=1 << 31", "le=1 << 31"),
        ],
    ),
    Module(
        "scheduler_adapters.pull_or_compute",
        [
            Mutation("_compute_terms", "(cached + tokens / 2)", "(tokens / 2)"),
        ],
    ),
    Module(
        "scheduler_adapters.sglang.leases",
        [
            Mutation("RoomLeases._tell_wishes", "elif known.readers:", "else:"),
        ],
    ),
    Module(
        "scheduler_adapters.sglang.pulls",
        [
            Mutation("RoomPulls.is_over", "and known.is_loading", "and known.is_held"),
        ],
    ),
    Module(
        "transfer.pull.exchange",
        [
            Mutation("PageExchange._grant", "undo.callback(self._manager.end_lease, held)", "pass"),
        ],
    ),
    Module(
        "transfer.pull.thread",
        [
            Mutation("TransferThread._pause", "return AWAIT_POLL_S", "return POLL_S"),
            Mutation("TransferThread._run_here", "self._failure = error", "raise"),
        ],
    ),
    Module(
        "transfer.nixl.vouchers",
        [
            Mutation("is_vouched", "_CREDENTIALS.unpack(found)[1] == os.geteuid()", "bool(found)"),
        ],
    ),
    Module(
        "scheduler_adapters.front.holders",
        [
            Mutation("_ProcessPages.poll", "number != self._last + 1", "number <= self._last"),
            Mutation("PageHolders.follow", "known.ready.incarnation", "there[name].incarnation"),
        ],
    ),
)
