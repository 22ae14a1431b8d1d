"""Mutations of ownership from end to end: leases and proofs of the manager, the exchange, trials and vouchers."""

from tests.mutants.mutation import Module, Mutation

_OWNERSHIP = "tests/scheduler_adapters/service/test_ownership.py"
_LEASES = "tests/kvcache/replica/test_leases.py"
_TRIALS = "tests/transfer/nixl/test_trials.py"
_VOUCHERS = "tests/transfer/nixl/test_vouchers.py"

EXCHANGE: tuple[Module, ...] = (
    Module(
        "kvcache.replica.import_book",
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
        "scheduler_adapters.service.exchange",
        [_OWNERSHIP],
        [
            Mutation("Exchange._end_copy", "if not event.error:", "if event.safe:", [_OWNERSHIP]),
            Mutation("Exchange.open_pull", "if key in self._pulls[replica]:", "if not key:", [_OWNERSHIP]),
            Mutation("Exchange.read", "elif copier.pending is not pending:", "elif not copier:", [_OWNERSHIP]),
            Mutation("Exchange.poll", "thread.raise_failure()", "pass", [_OWNERSHIP]),
            Mutation("Exchange.close", "if thread.is_closed:", "if thread:", [_OWNERSHIP]),
            Mutation("Exchange.close", "self._end_lease(replica, lease_id)", "pass", [_OWNERSHIP]),
            Mutation(
                "_keys",
                "return shared.metadata_key, shared.keyring",
                'return b"", shared.keyring',
                ["tests/scheduler_adapters/service/test_exchange.py"],
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
        "transfer.pull.thread",
        [],
        [
            Mutation(
                "TransferThread.add_engine",
                "self.call(lambda replica: replica.directory.try_out(address, ranks))()",
                "pass",
                [f"{_TRIALS}::test_a_caller_that_adds_an_engine_waits_for_its_trial_and_no_pull_does"],
            )
        ],
    ),
    Module(
        "transfer.nixl.agent",
        [],
        [
            Mutation(
                "_keep_in_fork",
                "ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))",
                "pass",
                ["tests/transfer/pull/test_forks.py"],
            )
        ],
    ),
    Module(
        "transfer.nixl.trials",
        [_TRIALS],
        [
            Mutation(
                "Trials._without_trial",
                "all(is_vouched(rank.metadata) for rank in ranks)",
                "True",
                [f"{_TRIALS}::test_what_nobody_on_this_host_vouches_for_contacts_nobody"],
            ),
            Mutation(
                "Trials.may_try",
                " or reaches_other_hosts(agreed_settings(memory_type))",
                "",
                [f"{_TRIALS}::test_where_agents_reach_other_hosts_nobody_can_be_asked_and_all_is_tried"],
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
