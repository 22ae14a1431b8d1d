"""Mutations of what is read where: layouts, plans, page lists, page checks, and what schedulers are told of it."""

from tests.mutants.mutation import Module, Mutation

TRANSFER_PLAN: tuple[Module, ...] = (
    Module(
        "transfer.plan.boxes",
        ["tests/transfer/plan/test_boxes.py"],
        [
            Mutation("_check_box", "if end > limit:", "if end > limit + 1:"),
            Mutation("_check_box", "if step < covered and n > 1:", "if step < covered - 1 and n > 1:"),
            Mutation("_check_box", "else group.page_size)", "else box.extent[TOKEN])"),
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
        ["tests/transfer/pull/test_parts.py", "tests/transfer/plan/test_plan_properties.py"],
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
        ["tests/transfer/plan/test_plan.py", "tests/transfer/plan/test_few_runs.py"],
        [
            Mutation("Plan.few", "local == our_end and remote == their_end and", "local == our_end and"),
            Mutation("_listed", "most < pool", "most <= pool"),
            Mutation("_listed", "least >= 0", "most >= 0"),
            Mutation("_integers", 'pages.dtype.kind in "iu" and ', ""),
            Mutation("_integers", " and pages.ndim == 1", ""),
            Mutation("_few_pages", "(count > 1 and len(set(here)) < count)", "False"),
            Mutation("_few_pages", "if start % size or", "if"),
            Mutation("Plan.pages", "isinstance(one, BlocksOfGroup) and not group.stacks", "not one"),
            Mutation(
                "Plan.prefers_staging", " or copies_of(plan) > MAX_COPIES", "", ["tests/transfer/plan/test_staging.py"]
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
            Mutation("pages_of", "if stop > named.end:", "if stop > named.end + 1:"),
            Mutation("pages_of", "if first < 0:", "if first < -1:"),
            Mutation("pages_of", "if first * size > named.needed:", "if first * size > stop:"),
            Mutation("pages_of", "blocks[-1:]", "blocks[:1]"),
        ],
    ),
    Module(
        "transfer.pull.parts",
        ["tests/transfer/pull/test_parts.py"],
        [
            Mutation(
                "Part.next_transfer",
                "max(min(first + BACKGROUND_RUNS - 1, runs, within), first + 1), False",
                "min(first + BACKGROUND_RUNS - 1, runs, within), False",
            ),
            Mutation("Part.next_transfer", "if background and left", "if left"),
        ],
    ),
    Module(
        "transfer.pull.page_checks",
        ["tests/transfer/pull/test_page_checks.py"],
        [
            Mutation("PageChecks.bad", "!= expected", "< expected"),
            Mutation("PageChecks._ids", "0 <= ids.min() <= ids.max() < len(self.words[group])", "ids.min() >= 0"),
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
        "transfer.connector.scheduler",
        [],
        [
            Mutation("NixlConnectorScheduler._leased", "if offer is None:", "if offer is not None and offer.over:"),
            Mutation("NixlConnectorScheduler.params", "if offer is None or offer.ended:", "if offer is None:"),
            Mutation("NixlConnectorScheduler.params", "if len(prompt.token_ids) < num_tokens:", "if not prompt:"),
            Mutation("NixlConnectorScheduler._lease_over", ", self._by_lease[offer.lease.lease_id]", ""),
            Mutation("NixlConnectorScheduler.update", 'self.abort(request_id, "not granted by every rank")', "pass"),
            Mutation(
                "NixlConnectorScheduler._lease_over",
                "if len(offer.over) == self.config.ranks:",
                "if len(offer.over) == 1:",
            ),
            Mutation("NixlConnectorScheduler._lease_over", 'if offer.reason == "read":', "if offer.reason:"),
            Mutation("NixlConnectorScheduler._lease_over", "self._slots.give_back(offer.lease)", "pass"),
            Mutation(
                "NixlConnectorScheduler._book_loads",
                "if len(load.received) == self.config.ranks:",
                "if load.received:",
            ),
            Mutation(
                "NixlConnectorScheduler._book_loads", "self._metadata.reqs_to_cancel[request_id] = reason", "pass"
            ),
            Mutation("NixlConnectorScheduler.read", "found.num_tokens > count", "found.num_tokens < 0"),
            Mutation("NixlConnectorScheduler.load", "elif missing:", "elif not missing:"),
        ],
    ),
    Module(
        "transfer.connector.offer",
        ["tests/transfer/connector/test_scheduler.py"],
        [
            Mutation("Offer.ended", "if self.aborted:", "if self.over and self.aborted:"),
            Mutation("Offer.missing", "set(range(self.ranks)) - self.offered", "set(range(1)) - self.offered"),
            Mutation("Offer.answer", "not 0 <= count <= held.num_tokens", "not 0 <= count"),
            Mutation("Offer.answer", "not 0 <= count", "not count"),
            Mutation("Offer.answer", " or self.missing:", ":"),
            Mutation("Offer.answer", "held.prompt.digest(count)", "held.prompt.digest(held.num_tokens)"),
            Mutation("Offer.answer", "sealed_pages(pages, key)", "sealed_pages(pages)"),
        ],
    ),
    Module(
        "transfer.wire.prompt",
        [],
        [
            Mutation("Prompt.digest", "if key[0] < num_tokens", "if key"),
            Mutation("Prompt.digest", "len(salt), ", "0, "),
            Mutation("Prompt.digest", 'struct.pack("<QQ", position, len(key)) + key', "key"),
            Mutation("Prompt.digest", "sorted(", "list("),
            Mutation("Prompt.digest", "self.token_ids[:num_tokens]", "self.token_ids"),
        ],
    ),
    Module(
        "transfer.connector.worker_book",
        [],
        [
            Mutation("WorkerBook._pages_of", "max(start, group.needed(stop))", "start"),
            Mutation("WorkerBook.on_pull", "self.output.block_ids_with_errors |= load.blocks", "pass"),
            Mutation("WorkerBook.on_pull", "if not event.safe:", "if not event:"),
            Mutation(
                "WorkerBook.on_lease",
                "if self.leases.get(event.request_id) != event.lease_id:",
                "if event.request_id not in self.leases:",
            ),
        ],
    ),
    Module(
        "transfer.connector.transfer_params",
        [],
        [
            Mutation("read_params", "not _HOST.fullmatch(found.host)", "not _HOST.match(found.host)"),
            Mutation("read_params", "not found.request_id.isprintable()", "False"),
            Mutation("_LEASE_ID", "(?=.*[1-9a-f])", ""),
            Mutation("TransferParams", "Meta(ge=1, le=65535)", "Meta(ge=1)"),
            Mutation("TransferParams.wanted", "min(self.num_tokens, len(prompt.token_ids))", "self.num_tokens"),
            Mutation("read_params", 'if known.get("do_remote_decode") is True:', "if not known:"),
        ],
    ),
    Module(
        "transfer.pull.lease_slots",
        [],
        [
            Mutation("LeaseSlots.take", " if self._free else None", ""),
            Mutation("LeaseSlots.give_back", "lease.slot", "lease.lease_id"),
        ],
    ),
    Module(
        "transfer.pull.start",
        [],
        [
            Mutation("fleet_keys", "if key or keyring is not None:", "if keyring is not None:"),
            Mutation("make_rank", 'if memory.device.type == "cuda"', "if memory.device"),
        ],
    ),
    Module(
        "transfer.engine.checks",
        ["tests/transfer/engine/test_engine.py"],
        [
            Mutation("page_indices", "high >= total_num_pages", "high > total_num_pages"),
            Mutation("check_request", "if engine not in (request.src_name, request.dst_name):", "if not engine:"),
            Mutation("_check_apart", "next_start < start + size", "next_start < start"),
            Mutation("check_replica", "0 <= replica_idx < dp", "0 <= replica_idx <= dp"),
        ],
    ),
)
