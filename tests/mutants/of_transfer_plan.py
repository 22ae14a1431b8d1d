"""Mutations of what is read where: layouts, plans, page lists, page checks, and what schedulers are told of it."""

from tests.mutants.mutation import Module, Mutation

TRANSFER_PLAN: tuple[Module, ...] = (
    Module(
        "transfer.plan.boxes",
        ["tests/transfer/plan/test_boxes.py"],
        [
            Mutation("_check_box", "if end > limit:", "if end > limit + 1:"),
            Mutation("_check_box", "if step < covered and n > 1:", "if step < covered - 1 and n > 1:"),
            Mutation("_check_box", "if box.extent[TOKEN] != group.page_size:", "if not box.extent[TOKEN]:"),
            Mutation("_check_disjoint", "kind[:, None] == kind[None]", "kind[:, None] != kind[None]"),
            Mutation("sub_box", "(head - first_head) * by_head", "head * by_head"),
        ],
    ),
    Module(
        "transfer.plan.group_plan",
        [
            "tests/transfer/plan/test_plan.py::test_lists_that_do_not_fit_name_the_value_and_the_limit",
            "tests/transfer/plan/test_plan.py::test_a_page_named_twice_is_found_among_equal_pages_too",
            "tests/transfer/plan/test_plan.py::test_the_last_page_is_copied_to_the_nearer_end_and_nothing_before_the_first",
            "tests/transfer/plan/test_plan.py::test_tokens_go_on_over_pages_of_another_size",
            "tests/transfer/plan/test_plan_properties.py",
        ],
        [
            Mutation(
                "GroupPlan.tokens",
                "min(_up(stop, self.local.page_size), _up(stop, self.remote.page_size))",
                "_up(stop, self.local.page_size)",
            ),
            Mutation(
                "GroupPlan.tokens", "if stop > (start // size + pages) * size:", "if stop > (start + pages * size):"
            ),
            Mutation("_pages_of", ">= group.num_pages:", "> group.num_pages:"),
            Mutation("_pages_of", "len(found) < needed", "len(found) < needed - 1"),
            Mutation("GroupPlan.refuse_repeated", "if pairs.repeated is not None:", "if pairs.repeated:"),
            Mutation("cut", "start % local_size == stop % local_size == 0", "start % local_size == 0"),
        ],
    ),
    Module(
        "transfer.plan.runs",
        ["tests/transfer/pull/test_batches.py", "tests/transfer/plan/test_plan_properties.py"],
        [
            Mutation(
                "Runs.shortened",
                "np.minimum(np.repeat(self.length, counts) - skipped, longest)",
                "np.repeat(self.length, counts) - skipped",
            ),
            Mutation("joined", " & (remote[:-1] + length[:-1] == remote[1:])", ""),
            Mutation("PagePairs.__init__", "keys.sort()", "pass"),
        ],
    ),
    Module(
        "transfer.plan.plan",
        ["tests/transfer/plan/test_plan.py"],
        [
            Mutation(
                "window_start",
                "num_tokens - window + 1",
                "num_tokens - window",
                ["tests/transfer/plan/test_plan.py::test_a_window_needs_the_page_of_its_first_token"],
            ),
            Mutation(
                "_plan_group",
                "if local.state != remote.state:",
                "if local.state and not remote.state:",
                ["tests/transfer/plan/test_plan.py::test_shards_of_two_models_are_refused"],
            ),
        ],
    ),
    Module(
        "transfer.plan.source_ranks",
        ["tests/transfer/plan/test_source_ranks.py"],
        [
            Mutation("_Grid.choose", "local_rank % len(among)", "0"),
            Mutation("_Grid.choose", "np.flatnonzero(held & used) if (held & used).any() else", ""),
        ],
    ),
    Module(
        "transfer.plan.page_lists",
        ["tests/transfer/plan/test_page_lists.py"],
        [
            Mutation("resolved", "if stop > pages.end:", "if stop > pages.end + 1:"),
            Mutation("resolved", "if first < 0:", "if first < -1:"),
            Mutation("resolved", "if first * size > pages.needed:", "if first * size > stop:"),
            Mutation("resolved", "blocks[-1:]", "blocks[:1]"),
        ],
    ),
    Module(
        "transfer.plan.few_pages",
        ["tests/transfer/plan/test_few_pages.py"],
        [
            Mutation("FewPages.part", "local == our_end and remote == their_end and", "local == our_end and"),
            Mutation("_pairs", "0 <= theirs < most_remote", "0 <= theirs <= most_remote"),
            Mutation("_pairs", "if count == 1 or len({ours for ours, _ in pairs}) == count else None", ""),
            Mutation("_pairs", "if start % size or", "if"),
        ],
    ),
    Module(
        "transfer.pull.batches",
        ["tests/transfer/pull/test_batches.py"],
        [
            Mutation("next_transfer", "max(last, first + 1), False", "last, False"),
            Mutation("next_transfer", "if background and left", "if left"),
        ],
    ),
    Module(
        "transfer.pull.page_checks",
        ["tests/transfer/pull/test_page_checks.py"],
        [
            Mutation("PageChecks.bad", "!= expected", "< expected"),
            Mutation("PageChecks._ids", "0 <= ids.min() <= ids.max() < len(self.words[group])", "ids.min() >= 0"),
        ],
    ),
    Module(
        "transfer.pull.verify",
        ["tests/transfer/pull/test_verify.py"],
        [
            Mutation("Verifier._compare", "if not attempts:", "if attempts < 0:"),
            Mutation(
                "Verifier._draw",
                "if self._share >= 1:",
                "if self._share > 1:",
                equivalent="what is drawn is below 1: all of them",
            ),
        ],
    ),
    Module(
        "transfer.connector.offers",
        ["tests/transfer/connector/test_companion.py"],
        [
            Mutation("Offers.standing", "len(offer.offered) < self._ranks or", ""),
            Mutation("Offers.standing", " or offer.aborted", ""),
            Mutation("Offers.on_offered", 'self.end(metadata, request_id, "not granted by every rank")', "pass"),
            Mutation("Offers._over", "if len(offer.over) < self._ranks:", "if not offer.over:"),
            Mutation("Offers._over", 'and offer.reason == "read"', ""),
            Mutation("Offers._over", "heapq.heappush(self._slots, offer.lease.slot)", "pass"),
        ],
    ),
    Module(
        "transfer.connector.pending_loads",
        ["tests/transfer/connector/test_companion.py"],
        [
            Mutation("PendingLoads.on_received", "if len(pending.received) < self._ranks:", "if not pending.received:"),
            Mutation("PendingLoads.on_failed", "metadata.reqs_to_cancel[request_id] = reason", "pass"),
            Mutation("PendingLoads.check", "source.total_tokens > num_tokens:", "source.total_tokens < 0:"),
            Mutation("PendingLoads._ask", "stop // self._chunk * self._chunk", "stop"),
            Mutation("PendingLoads.more", '("lease_id", first.lease, source.lease),', ""),
        ],
    ),
    Module(
        "transfer.connector.worker_book",
        ["tests/transfer/connector/test_worker_book.py"],
        [
            Mutation("Load.has", "return self.closed and", "return"),
            Mutation("Loads._pages_of", "or (group.is_state and not asked.last)", ""),
            Mutation("Loads._pages_of", "max(start, group.needed(asked.total_tokens))", "start"),
            Mutation("Loads.on_event", "self.bad_blocks |= load.blocks", "pass"),
            Mutation("Loads.on_event", "if not event.safe:", "if not event:"),
        ],
    ),
    Module(
        "transfer.connector.transfer_params",
        ["tests/transfer/connector/test_transfer_params.py"],
        [
            Mutation("read_params", "if ranks > MAX_RANKS:", "if not ranks:"),
            Mutation("read_params", "if not _HOST.fullmatch(host):", "if not _HOST.match(host):"),
            Mutation("_Reader.lease", "0 < lease_id < 1 << 64", "0 <= lease_id < 1 << 64"),
            Mutation(
                "_Reader.integer",
                "if not _is_integer(value) or not low <= value <= high:",
                "if not _is_integer(value) or not low <= value:",
            ),
            Mutation("_Reader._blocks_of", "len(blocks) > num_tokens", "len(blocks) > MAX_BLOCK_ID"),
            Mutation("_is_integer", " and not isinstance(value, bool)", ""),
        ],
    ),
    Module(
        "transfer.engine.checks",
        ["tests/transfer/engine/test_engine.py"],
        [
            Mutation("page_indices", "high >= total_num_pages", "high > total_num_pages"),
            Mutation("sorted_pairs", "if twice.any():", "if twice.all():"),
            Mutation("_check_apart", "next_start < start + size", "next_start < start"),
            Mutation("check_replica", "0 <= replica_idx < dp", "0 <= replica_idx <= dp"),
        ],
    ),
    Module(
        "transfer.connector.sends",
        ["tests/transfer/connector/test_sends.py"],
        [
            Mutation(
                "Sends.on_event",
                "if self._leases.get(event.request_id) != event.lease_id:",
                "if event.request_id not in self._leases:",
            ),
        ],
    ),
)
