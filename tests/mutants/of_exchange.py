"""Mutations of ownership from end to end: leases and proofs of the manager, the exchange, vouchers."""

from tests.mutants.mutation import Module, Mutation

_OWNERSHIP = "tests/transfer/pull/test_ownership.py"
_EXCHANGE = "tests/transfer/pull/test_exchange.py"
_LENDING = "tests/transfer/pull/test_lending.py"
_CONTENTS = "tests/kvcache/replica/test_contents.py"
_IMPORTS = "tests/kvcache/replica/test_imports.py"
_LEASES = "tests/kvcache/replica/test_leases.py"
_DIRECTORY = "tests/transfer/pull/test_directory.py"
_VOUCHERS = "tests/transfer/nixl/test_vouchers.py"

EXCHANGE: tuple[Module, ...] = (
    Module(
        "kvcache.replica.copier",
        [_OWNERSHIP],
        [
            Mutation(
                "ImportBook.cancel",
                "if copier is None or copier.is_over:",
                "if pending.closed:",
                [f"{_OWNERSHIP}::test_cancelled_then_committed"],
            ),
            Mutation(
                "ImportBook.check",
                "if pending.closed and (copier is None or copier.is_over):",
                "if pending is None:",
                [_LEASES],
            ),
        ],
    ),
    Module(
        "kvcache.replica.copier",
        [_OWNERSHIP],
        [
            Mutation("ImportCopier.take", "self.is_over or self._has_all or", "self.is_over or"),
            Mutation(
                "ImportCopier.prove",
                "if self.is_over or not self._has_all:",
                "if self.is_over:",
                [f"{_OWNERSHIP}::test_nothing_is_proven_before_the_last_was_taken_or_twice"],
            ),
        ],
    ),
    Module(
        "kvcache.replica.leases",
        [_LEASES],
        [Mutation("PageLeases.check", "len(booked) != len(self._row_of) or ", "", [_LEASES])],
    ),
    Module(
        "transfer.pull.exchange",
        [_OWNERSHIP],
        [
            Mutation("PageExchange._end_copy", "if not event.error:", "if event.safe:", [_OWNERSHIP]),
            Mutation("PageExchange._refuse_open", "if (replica, key) in self._pulls:", "if not key:", [_OWNERSHIP]),
            Mutation("PageExchange.read", "elif copier.pending is not pending:", "elif not copier:", [_OWNERSHIP]),
            Mutation("PageExchange.poll", "thread.raise_failure()", "pass", [_OWNERSHIP]),
            Mutation("PageExchange.close", "if thread.is_closed:", "if thread:", [_OWNERSHIP]),
            Mutation("PageExchange.close", "self._end_lease(replica, lease_id)", "pass", [_OWNERSHIP]),
            Mutation(
                "PageExchange._thread_of", "if source.engine_id not in self._names:", "if not source:", [_EXCHANGE]
            ),
            Mutation("PageExchange.offer", "running=running", "running=True", [_EXCHANGE]),
            Mutation("PageExchange.pull", "self._refuse_open(replica, key)", "pass", [_EXCHANGE]),
            Mutation("PageExchange.pull", "copier.give_up()", "pass", [_OWNERSHIP]),
            Mutation("PageExchange._grant", "self._manager.end_lease(held)\n            raise", "raise", [_OWNERSHIP]),
            Mutation("PageExchange._take", "and self.lending.of[replica].settle(event)", "and False", [_LENDING]),
        ],
    ),
    Module(
        "transfer.pull.lending",
        [_LENDING],
        [
            Mutation("PageLender._lend", " - sum(lent.num_pages for lent in self._lent.values())", "", [_LENDING]),
            Mutation("PageLender.answer", "known is None and query.digests", "query.digests", [_LENDING]),
            Mutation(
                "PageLender.answer",
                "len(self._asked) + len(self._loading) >= _MOST_ASKED",
                "not self._lock",
                [_LENDING],
            ),
            Mutation("PageLender.answer", "len(self._answers) > _KNOWN", "not self._answers", [_LENDING]),
            Mutation("PageLender.settle", "del self._lent[event.lease_id]", "pass", [_LENDING]),
            Mutation("PageLender._lend", "now < until and ", "", [_LENDING]),
            Mutation("PageLender._lend", "self._loading.append((query, until))", "pass", [_LENDING]),
            Mutation("PageLender.is_asked", " or self._loading", "", [_LENDING]),
        ],
    ),
    Module(
        "transfer.pull.asking",
        [_LENDING],
        [
            Mutation("PageAsks.poll", "if now >= ask.deadline:", "if not ask.key:", [_LENDING]),
            Mutation("PageAsks._lent", "or own[-width:] != pages.prompt_digest", "", [_LENDING]),
        ],
    ),
    Module(
        "kvcache.replica.contents",
        [_LENDING],
        [
            Mutation("PageContents._wanted", "or ours != theirs ", "", [_LENDING]),
            Mutation("PageContents.lease", "[: max(0, most)]", "", [_LENDING]),
            Mutation("PageContents.digests", "(context.current_length - 1)", "context.current_length", [_LENDING]),
            Mutation("PageContents.lease", "wanted.first_page + length", "length", [_CONTENTS, _LENDING]),
        ],
    ),
    Module(
        "kvcache.replica.imports",
        [_IMPORTS],
        [
            Mutation("begin_import", "if table.first_page:", "if not table:", [_IMPORTS]),
            Mutation("_refuse_hole", "not context.start_idx and ", "", [_IMPORTS]),
            Mutation("_check_pages", " or not pages or table.first_page < 0", "", [_IMPORTS]),
        ],
    ),
    Module(
        "kvcache.tiers.host_tier",
        [_CONTENTS],
        [
            Mutation("ReplicaTier.bring", " - self.pool.would_be_taken(head)", "", [_CONTENTS]),
            Mutation("ReplicaTier.bring", " // 2", "", [_CONTENTS]),
            Mutation("ReplicaTier.bring", "len(head) : max(0, most)", "len(head) :", [_CONTENTS]),
            Mutation(
                "ReplicaTier.bring",
                "if any(load.digests is not None for load in self._left):",
                "if first < 0:",
                [_CONTENTS],
            ),
            Mutation("ReplicaTier.bring", "min(self.brought_at_once, room)", "room", [_CONTENTS]),
            Mutation("ReplicaTier.bring", " or self.host.pool.index.generation != generation", "", [_CONTENTS]),
            Mutation("ReplicaTier.poll", "if load.digests is not None:", "if not load:", [_CONTENTS]),
        ],
    ),
    Module(
        "transfer.pull.thread",
        [_OWNERSHIP],
        [
            Mutation("TransferThread._refuse_ended", "if self._stopping:", "if not self:", [_OWNERSHIP]),
            Mutation("TransferThread._round", "not self._early and bool(events)", "False"),
            Mutation("TransferThread._pause", "self._used = now", "pass"),
            Mutation("TransferThread._pause", "self._leased = now", "pass"),
            Mutation("TransferThread._pause", "return AWAIT_POLL_S", "return POLL_S"),
            Mutation("TransferThread._pause", "return AWAIT_POLL_S", "return IDLE_POLL_S"),
            Mutation("TransferThread._run_here", "if not self._turn.acquire(blocking=False):", "if not self:"),
            Mutation("TransferThread._run_here", "self._commands or ", ""),
            Mutation("TransferThread._run_here", " or self._is_resting", ""),
            Mutation("TransferThread._run_here", "self._failure = error", "raise"),
            Mutation("TransferThread._tell", "self._ring()", "pass"),
        ],
    ),
    Module(
        "transfer.pull.bell",
        [],
        [
            Mutation("Bell.ring", "self._rung = True", "pass"),
            Mutation("Bell.hear", "self._rung = False", "pass"),
        ],
    ),
    Module(
        "transfer.pull.start",
        [],
        [
            Mutation(
                "fleet_keys",
                "return shared.metadata_key, shared.keyring",
                'return b"", shared.keyring',
                [_EXCHANGE],
            ),
        ],
    ),
    Module(
        "transfer.pull.rank",
        [],
        [
            Mutation("RankTransfer.poll", "self._give_up_stuck()", "pass", ["tests/transfer/pull/test_rank.py"]),
            Mutation(
                "RankTransfer.close",
                " or not self._agent.is_own",
                "",
                ["tests/transfer/pull/test_forks.py"],
            ),
        ],
    ),
    Module(
        "transfer.nixl.agent",
        [],
        [
            Mutation(
                "_keep_in_fork",
                "ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent))",
                "pass",
                ["tests/transfer/pull/test_forks.py"],
            ),
            Mutation(
                "Agent.close",
                "self._agent = self._agent, None",
                "_ = self._agent, None",
                ["tests/transfer/nixl/test_agent.py"],
            ),
        ],
    ),
    Module(
        "transfer.pull.directory",
        [_DIRECTORY],
        [
            Mutation(
                "_is_vouched",
                "all(is_vouched(rank.agent_metadata) for rank in remote.ranks)",
                "True",
                [f"{_DIRECTORY}::test_a_source_on_another_host_is_refused_without_a_key"],
            ),
            Mutation(
                "_is_vouched",
                "all(is_vouched(rank.agent_metadata) for rank in remote.ranks)",
                "any(is_vouched(rank.agent_metadata) for rank in remote.ranks)",
                [f"{_DIRECTORY}::test_one_rank_that_nobody_vouches_for_is_one_too_many"],
            ),
            Mutation(
                "Directory.add",
                "not self._has_key and not _is_vouched(remotes[0])",
                "not remotes",
                [f"{_DIRECTORY}::test_a_source_on_another_host_is_refused_without_a_key"],
            ),
            Mutation(
                "Directory._admit",
                "self._has_key or self._client.is_keyed or ",
                "self._client.is_keyed or ",
                [f"{_DIRECTORY}::test_with_a_key_nobody_is_asked_to_vouch"],
            ),
        ],
    ),
    Module(
        "transfer.nixl.vouchers",
        [_VOUCHERS],
        [
            Mutation("is_vouched", "_CREDENTIALS.unpack(found)[1] == os.geteuid()", "bool(found)", [_VOUCHERS]),
            Mutation("Voucher.poll", "self._listening.accept()[0].close()", "return", [_VOUCHERS]),
        ],
    ),
)
