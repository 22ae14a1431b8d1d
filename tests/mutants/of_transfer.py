"""Mutations of the protocol: leases, pulls and their fences, ranks, engines, handshakes."""

from tests.mutants.mutation import Module, Mutation

_MANY = ["tests/transfer/pull/test_many_sources.py"]

TRANSFER: tuple[Module, ...] = (
    Module(
        "transfer.pull.lease",
        ["tests/transfer/pull/test_lease.py"],
        [
            Mutation("Lease.is_read", "ended >= self.engines", "ended >= 1"),
            Mutation("Lease.is_read", "len(ranks) == self.ranks[engine]", "len(ranks) >= 1"),
            Mutation("LeaseBook.grant", "self.words[slot] = lease_id", "pass"),
            Mutation("LeaseBook.grant", " or lease_id in self._by_id", ""),
            Mutation("LeaseBook.grant", " or slot in self._slots", ""),
            Mutation("LeaseBook.grant", "math.inf if running else self._clock()", "self._clock()"),
            Mutation("LeaseBook.grant", "now + duration_s * self._longest", "math.inf"),
            Mutation("LeaseBook.start_clock", " and lease.deadline == math.inf", ""),
            Mutation("LeaseBook.start_clock", "self._next_deadline = min", "self._next_deadline = max"),
            Mutation("LeaseBook.hear", "note.reason or", "lease.refusal or"),
            Mutation("LeaseBook.hear", " and not lease.refusal", ""),
            Mutation("LeaseBook._verdict", " or lease.ranks.get(note.engine_id, note.ranks) != note.ranks", ""),
            Mutation("LeaseBook._verdict", "if note.rank in lease.heard", "if note.ranks in lease.heard"),
            Mutation(
                "LeaseBook._renew", "min(self._clock() + lease.duration_s, lease.last_deadline)", "lease.last_deadline"
            ),
            Mutation("LeaseBook._renew", "max(lease.deadline,", "max(0.0,"),
            Mutation("LeaseBook.expire", "lease.deadline <= now", "lease.deadline < now"),
            Mutation("LeaseBook.expire", "if now < self._next_deadline:", "if now <= self._next_deadline:"),
            Mutation("LeaseBook._end", "self.words[lease.slot] = CLEARED", "pass"),
            Mutation("LeaseBook._end", "self._ended[lease.lease_id] = None", "pass"),
            Mutation("LeaseBook.check", "self.words != expected", "self.words < expected"),
        ],
    ),
    Module(
        "transfer.pull.pull",
        ["tests/transfer/pull/test_pull.py"],
        [
            Mutation("Puller._opened", "lease.duration_s / 3", "lease.duration_s"),
            Mutation(
                "Puller.pull_at_once",
                "self.words.item(slot) == lease.lease_id",
                "self.words.item(slot)",
                ["tests/transfer/pull/test_small_pulls.py"],
            ),
            Mutation(
                "Puller.pull_at_once",
                "found.fencing is None and self.words",
                "self.words",
                ["tests/transfer/pull/test_small_pulls.py"],
            ),
            Mutation(
                "Puller.pull_at_once",
                "self.words[slot] = CLEARED",
                "pass",
                ["tests/transfer/pull/test_small_pulls.py"],
            ),
            Mutation(
                "Puller.pull_at_once", "self._free.append(slot)", "pass", ["tests/transfer/pull/test_small_pulls.py"]
            ),
            Mutation("Puller._go_on", "self._free.append(slot)", "pass", ["tests/transfer/pull/test_small_pulls.py"]),
            Mutation(
                "Puller._go_on",
                "pull.reading.append((found.reading, part))",
                "pass",
                ["tests/transfer/pull/test_small_pulls.py"],
            ),
            Mutation("Puller._go_on", "self._expect(pull)", "pass", ["tests/transfer/pull/test_small_pulls.py"]),
            Mutation("Puller._advance", "self._moving.pop(pull.key, None)", "pass"),
            Mutation("Puller._on_time", "self._expect(pull)", "pass"),
            Mutation("Puller.get", " or not pull.more", ""),
            Mutation("Puller.fail_engine", "engine.failure = engine.failure or reason", "pass"),
            Mutation("Puller._on_time", "now >= pull.deadline", "now < 0"),
            Mutation("Puller._on_time", "pull.renew_at = now + pull.lease.duration_s / 3", "pass"),
            Mutation("Puller._advance", "not pull.reading and ", ""),
            Mutation("Puller._advance", "pull.in_flight or (", "("),
            Mutation("Puller._advance", "(not pull.more or pull.passed < pull.added)", "not pull.more"),
            Mutation("Puller._read", "pull.read_ranks.add(part.rank)", "pass"),
            Mutation("Puller._fence", "self.words[slot] = CLEARED", "pass"),
            Mutation("Puller._fence", "pull.lease.slot * WORD_BYTES", "slot * WORD_BYTES"),
            Mutation("Puller._fence", 'b"" if pull.more else', 'b"" if not pull else'),
            Mutation("Puller._fence", "sorted(pull.read_ranks)", "sorted(pull.read_ranks)[:1]"),
            Mutation("Puller._fence", "self._free.append(slot)", "pass"),
            Mutation("Puller._collect_fences", "word != pull.lease.lease_id", "word == CLEARED"),
            Mutation("Puller._collect_fences", "elif not pull.fencing and", "elif"),
            Mutation("Puller._collect_fences", "self._free.append(slot)", "pass"),
            Mutation("Puller._collect_fences", "pull.told.add(rank)", "pass"),
            Mutation("Puller._collect_reads", "pull.reading.remove(entry)", "pull.reading.clear()"),
            Mutation("Puller._came", " and not pull.error:\n            self._use", ":\n            self._use"),
            Mutation("Puller.withdraw", "event.key == key)]", "event.key)]"),
            Mutation("Puller.engines_in_use", "self._spoken.lately() | ", "", _MANY),
            Mutation(
                "Puller.engines_in_use",
                " | {pull.engine for pull in self._moving.values()}",
                "",
                _MANY,
            ),
            Mutation("Puller._opened", "self._spoken.add(engine)", "self._clock()", _MANY),
            Mutation("Puller._tell", "self._spoken.add(pull.engine)", "pass", _MANY),
            Mutation("Puller.pull_at_once", "self._spoken.add(engine)", "self._clock()", _MANY),
            Mutation(
                "Puller.withdraw",
                "self.fail(key, reason)",
                "pass",
                [
                    "tests/transfer/pull/test_replica.py::test_what_one_rank_lacks_no_rank_needs",
                    "tests/transfer/pull/test_replica.py::test_a_cancelled_pull_ends_the_lease_with_its_reason",
                ],
            ),
            Mutation("Puller._fail", "if pull.error:", "if not pull:"),
            Mutation("Puller._fail", " - pull.told", ""),
            Mutation("Puller._on_error", "if error.peer_lost and", "if"),
            Mutation("Puller.conclude", "part.settle()", "pass"),
            Mutation("Puller.conclude", "self._free += [entry[2] for entry in pull.fencing]", "pass"),
        ],
    ),
    Module(
        "transfer.pull.rank",
        ["tests/transfer/pull/test_replica.py"],
        [
            Mutation("RankTransfer._give_up_stuck", "self._destroy(remote)", "pass"),
            Mutation("RankTransfer._to_poll", "if len(known) <= _IN_TURN:", "if known:", _MANY),
            Mutation("RankTransfer._to_poll", "self._next if self._next < len(known) else 0", "0", _MANY),
            Mutation("RankTransfer._to_poll", "self._next = first + _IN_TURN", "self._next = first + 9", _MANY),
            Mutation("RankTransfer._to_poll", ", *used", "", _MANY),
            Mutation("RankTransfer._to_poll", " if self._remotes.get(remote.engine_id) is remote", "", _MANY),
            Mutation(
                "RankTransfer._give_up_stuck",
                "self.puller.stuck(self._stuck_s)",
                "self.puller.stuck(-1.0)",
            ),
            Mutation(
                "RankTransfer.poll",
                "self.released.extend(self.leases.expire())",
                "self.leases.expire()",
                ["tests/transfer/pull/test_replica.py::test_a_lease_expires_on_the_source_s_own_clock"],
            ),
            Mutation(
                "RankTransfer.inspect",
                "if remote.engine_id == self.identity.engine_id:",
                "if not remote:",
                ["tests/transfer/pull/test_replica.py::test_an_engine_does_not_read_from_itself"],
            ),
            Mutation(
                "RankTransfer.inspect",
                "expected not in {None, (remote.engine_id, remote.incarnation)}",
                "not ranks",
                [
                    "tests/transfer/pull/test_replica.py::test_a_server_that_tells_of_another_engine_does_not_take_its_place"
                ],
            ),
            Mutation(
                "RankTransfer.disconnect",
                "self.puller.fail_engine(remote, reason)",
                "pass",
                ["tests/transfer/pull/test_replica.py::test_what_was_read_from_an_engine_that_is_connected_anew_fails"],
            ),
            Mutation(
                "RankTransfer.end_lease",
                "self.released.append(lease)",
                "pass",
                [
                    "tests/transfer/pull/test_replica.py::test_shutting_down_ends_what_is_open_and_can_be_done_twice",
                    "tests/transfer/pull/test_replica.py::test_a_prefill_that_nobody_reads_ends_its_lease_after_it_has_computed",
                ],
            ),
            Mutation(
                "RankTransfer._reap",
                "if not self.puller.uses(remote)",
                "if remote",
                [
                    "tests/transfer/pull/test_replica.py::test_an_engine_that_was_lost_stays_loaded_while_a_read_from_it_is_in_flight"
                ],
            ),
            Mutation(
                "RankTransfer.add_pages",
                "self.puller.fail(key, str(error))",
                "pass",
                [
                    "tests/transfer/pull/test_replica.py::test_pages_that_do_not_fit_fail_the_pull_of_the_rank_that_is_told_of_them"
                ],
            ),
            Mutation(
                "RankTransfer.close",
                'self.end_lease(lease_id, "this rank was shut down")',
                "pass",
                ["tests/transfer/pull/test_replica.py::test_shutting_down_ends_what_is_open_and_can_be_done_twice"],
            ),
        ],
    ),
    Module(
        "transfer.pull.remote",
        ["tests/transfer/pull/test_replica.py"],
        [
            Mutation(
                "RemoteEngine.__init__",
                "min(found.words for found in ranks)",
                "max(found.words for found in ranks)",
                [
                    "tests/transfer/pull/test_replica.py::test_an_engine_has_as_many_lease_words_as_the_rank_with_the_fewest"
                ],
            ),
            Mutation(
                "RemoteEngine.parts",
                "found += self._parts_of(key, planned, groups)",
                "found = found or self._parts_of(key, planned, groups)",
                [
                    "tests/transfer/pull/test_replica.py::test_pages_of_all_ranks_are_read_where_a_rank_leaves_the_quick_way"
                ],
            ),
            Mutation(
                "RemoteEngine._parts_of",
                "self.verifier is None and ",
                "",
                [
                    "tests/transfer/pull/test_replica.py::test_pages_of_all_ranks_are_read_where_a_rank_leaves_the_quick_way"
                ],
            ),
            Mutation(
                "_check_ranks",
                "if len(same) != 1:",
                "if not same:",
                ["tests/transfer/pull/test_replica.py::test_every_rank_of_an_engine_must_fit_not_only_its_first"],
            ),
            Mutation(
                "_check_ranks",
                "list(range(first.ranks))",
                "[found.rank for found in ranks]",
                ["tests/transfer/pull/test_replica.py::test_every_rank_of_an_engine_must_fit_not_only_its_first"],
            ),
            Mutation(
                "_check_fit",
                "differences(mine.settings, found.settings)",
                "differences(mine.settings, ranks[0].settings)",
                ["tests/transfer/pull/test_replica.py::test_every_rank_of_an_engine_must_fit_not_only_its_first"],
            ),
            Mutation(
                "_check_fit",
                "differences(compatibility, found.compatibility)",
                "differences({}, {})",
                ["tests/transfer/pull/test_replica.py::test_every_rank_of_an_engine_must_fit_not_only_its_first"],
            ),
            Mutation(
                "_check_fit",
                "if len(found.layout.groups) != len(mine.layout.groups):",
                "if not found.layout.groups:",
                ["tests/transfer/pull/test_replica.py::test_every_rank_of_an_engine_must_fit_not_only_its_first"],
            ),
        ],
    ),
    Module(
        "transfer.pull.pull_state",
        ["tests/transfer/pull/test_pull.py"],
        [Mutation("check_opening", "0 <= lease.slot < engine.words", "0 <= lease.slot <= engine.words")],
    ),
    Module(
        "transfer.pull.at_once",
        ["tests/transfer/pull/test_small_pulls.py"],
        [
            Mutation("read_and_fence", "lease.slot * WORD_BYTES", "0"),
            Mutation("read_and_fence", "found.reading is None", "True"),
        ],
    ),
    Module(
        "transfer.nixl.agent",
        ["tests/transfer/nixl/test_agent.py"],
        [
            Mutation("Agent.remove_peer", "self._words.pop(key)", "self._words[key]"),
            Mutation("Agent.read_word", "_FIRST, note", '_FIRST, b""'),
        ],
    ),
    Module(
        "transfer.pull.small_pulls",
        ["tests/transfer/pull/test_small_pulls.py"],
        [
            Mutation("SmallPulls.pull", " or is_of_other_start(source, peer)", ""),
            Mutation("SmallPulls.pull", "self._directory.use(", "self._directory.ready("),
            Mutation(
                "is_of_other_start",
                'source.incarnation not in ("", peer.incarnation)',
                "not source.incarnation",
                ["tests/transfer/pull/test_replica.py::test_a_lease_of_another_start_of_the_source_is_not_read_under"],
            ),
        ],
    ),
    Module(
        "transfer.pull.replica",
        ["tests/transfer/pull/test_replica.py"],
        [
            Mutation(
                "ReplicaTransfer.offer",
                'rank.leases.end(lease.lease_id, "not granted by every rank")',
                "pass",
                ["tests/transfer/pull/test_replica.py::test_a_lease_is_granted_by_every_rank_or_by_none"],
            ),
            Mutation(
                "ReplicaTransfer.pull",
                "if key in self._pulls:",
                "if not key:",
                ["tests/transfer/pull/test_replica.py::test_a_name_can_be_used_once_at_a_time_and_the_first_goes_on"],
            ),
            Mutation(
                "ReplicaTransfer._collect_leases",
                "if not left:",
                "if True:",
                [
                    "tests/transfer/pull/test_replica.py::test_pages_go_when_the_words_of_all_ranks_are_cleared_and_not_with_the_first"
                ],
            ),
            Mutation(
                "ReplicaTransfer._collect_leases",
                "left.discard(at)",
                "left.clear()",
                [
                    "tests/transfer/pull/test_replica.py::test_pages_go_when_the_words_of_all_ranks_are_cleared_and_not_with_the_first"
                ],
            ),
            Mutation(
                "ReplicaTransfer._on_rank",
                "elif not pull.open_ranks and not pull.error:",
                "elif not pull.error:",
                ["tests/transfer/pull/test_replica.py::test_a_pull_has_ended_when_every_rank_of_ours_has_its_part"],
            ),
            Mutation("ReplicaTransfer._passed", "return min(", "return max("),
            Mutation(
                "ReplicaTransfer._start",
                "is_of_other_start(pull.source, peer)",
                "False",
                [
                    "tests/transfer/pull/test_replica.py::test_the_first_request_of_a_restarted_engine_is_served",
                    "tests/transfer/pull/test_replica.py::test_an_engine_restarted_at_its_address_is_found_out_and_read_from_anew",
                ],
            ),
            Mutation(
                "ReplicaTransfer._fail",
                "safe = not pull.open_ranks",
                "safe = True",
                [
                    "tests/transfer/pull/test_replica.py::test_a_failure_is_told_at_once_and_pages_come_back_when_nothing_is_in_flight"
                ],
            ),
            Mutation(
                "ReplicaTransfer._expire",
                "now >= pull.deadline",
                "now < 0",
                [
                    "tests/transfer/pull/test_replica.py::test_a_pull_does_not_wait_for_its_source_longer_than_its_own_time"
                ],
            ),
            Mutation(
                "ReplicaTransfer.cancel",
                "if not pull.started and not pull.error:",
                "if not pull:",
                [
                    "tests/transfer/pull/test_replica.py::test_a_pull_that_is_cancelled_before_its_source_has_answered_is_refused_there"
                ],
            ),
            Mutation(
                "ReplicaTransfer._ask",
                "if self._pulls.get(key) is pull and not pull.error:",
                "if self._pulls:",
            ),
            Mutation(
                "ReplicaTransfer._on_answer",
                "elif not answer.pages:",
                "elif answer is None:",
                ["tests/transfer/pull/test_replica.py::test_a_reader_waits_until_the_lease_stands_on_every_rank"],
            ),
            Mutation(
                "ReplicaTransfer._on_answer",
                "min(2 * pull.pause_s, _MAX_PAUSE_S)",
                "pull.pause_s",
                ["tests/transfer/pull/test_replica.py::test_a_reader_does_not_wait_longer_than_its_own_time"],
            ),
            Mutation(
                "ReplicaTransfer._on_answer",
                "elif answer.error:",
                "elif not answer:",
                ["tests/transfer/pull/test_replica.py::test_a_lease_that_is_not_for_this_reader_is_not_touched_by_it"],
            ),
            Mutation(
                "ReplicaTransfer.cancel",
                "self.refuse(pull.source, reason, pull.deadline - self._clock())",
                "pass",
                [
                    "tests/transfer/pull/test_replica.py::test_a_source_that_has_not_said_what_it_holds_is_told_of_a_cancelled_pull_when_it_does"
                ],
            ),
            Mutation(
                "ReplicaTransfer.cancel",
                ", is_failure=False",
                "",
                [
                    "tests/transfer/pull/test_replica.py::test_a_source_that_has_not_said_what_it_holds_is_told_of_a_cancelled_pull_when_it_does"
                ],
            ),
            Mutation(
                "ReplicaTransfer._fail_all",
                "isinstance(pull.source, Wanted) or ",
                "",
                [
                    "tests/transfer/pull/test_replica.py::test_a_source_that_is_lost_before_it_has_said_what_it_holds_is_looked_for_anew"
                ],
            ),
        ],
    ),
    Module(
        "transfer.pull.source",
        [],
        [
            Mutation("answered", "if pages.prompt_digest != wanted.digest:", "if not pages.prompt_digest:"),
            Mutation("answered", "pages.duration_s)", "pages.slot + 1.0)"),
        ],
    ),
    Module(
        "transfer.pull.directory",
        ["tests/transfer/pull/test_replica.py"],
        [
            Mutation("Directory._is_loaded", "return False", "continue"),
            Mutation(
                "Directory._load",
                "rank.disconnect(engine_id, str(error))",
                "pass",
                ["tests/transfer/pull/test_replica.py::test_an_engine_that_one_rank_cannot_load_is_loaded_by_none"],
            ),
            Mutation(
                "Directory._refuse",
                "self.failed_handshakes += 1",
                "pass",
                ["tests/transfer/pull/test_replica.py::test_a_dead_source_fails_its_own_pulls_in_its_own_time"],
            ),
            Mutation(
                "Directory._ping",
                "elif answer.incarnation != peer.incarnation:",
                "elif not answer.incarnation:",
                [
                    "tests/transfer/pull/test_replica.py::test_an_engine_restarted_at_its_address_is_found_out_and_read_from_anew"
                ],
            ),
            Mutation("Directory._forget", "rank.disconnect(engine_id, reason, peer.incarnation)", "pass"),
            Mutation(
                "Directory.watch",
                "now - peer.used > self._times.idle",
                "now < 0",
                ["tests/transfer/pull/test_replica.py::test_engines_that_are_long_idle_are_forgotten"],
            ),
            Mutation(
                "Directory.watch",
                "> self._times.heartbeat:",
                "> self._times.idle:",
                [
                    "tests/transfer/pull/test_replica.py::test_a_silent_source_is_given_up",
                    "tests/transfer/pull/test_replica.py::test_a_source_that_lives_is_not_given_up_however_long_it_computes",
                ],
            ),
        ],
    ),
    Module(
        "transfer.stats",
        ["tests/transfer/pull/test_rank.py", "tests/transfer/pull/test_replica.py"],
        [
            Mutation("TransferStats.record_lease", '"expired" if reason.startswith("expired") else "other"', '"other"'),
            Mutation("TransferStats.record_failure", "self.failures[failure_kind(reason)] += 1", "pass"),
        ],
    ),
    Module(
        "transfer.wire.handshake",
        ["tests/transfer/wire/test_handshake.py", "tests/transfer/wire/test_keys.py"],
        [
            Mutation("differences", "{*ours, *theirs}", "ours"),
            Mutation(
                "HandshakeClient.poll", "{asked.address for asked in self._asked.values()}", "[*self._sockets]", _MANY
            ),
            Mutation("HandshakeServer._main", "waited.poll()", "waited.poll(50)"),
            Mutation("HandshakeServer.close", "os.eventfd_write(self._wake, 1)", "pass"),
            Mutation("HandshakeServer._answer", "if not throttle.admits(identity):", "if not identity:"),
            Mutation("HandshakeServer._answer", "isinstance(query, LeaseQuery | ContentQuery)", "False"),
            Mutation("HandshakeServer._answer_to", "if card.leased is None:", "if query is None:"),
            Mutation("HandshakeServer._answer_to", "if cards and not engine_id else None", "if cards else None"),
            Mutation(
                "HandshakeServer._answer_to",
                "differences(query.compatibility, card.compatibility)",
                "differences({}, {})",
            ),
            Mutation("HandshakeServer.serve", "{**self._cards, card.engine_id: card}", "{card.engine_id: card}"),
            Mutation("HandshakeClient.poll", "asked.deadline <= now", "asked.deadline < 0"),
            Mutation("HandshakeClient._send", "now + asked.timeout_s / 2", "math.inf"),
            Mutation("HandshakeClient._send", "min(now, asked.begin + (_PATIENCE - 1) * asked.timeout_s)", "now"),
            Mutation("HandshakeClient._socket", "socket.setsockopt(zmq.IMMEDIATE, 1)", "pass"),
            Mutation(
                "HandshakeClient.forget",
                "if any(asked.address == address for asked in self._asked.values()):",
                "if not address:",
            ),
            Mutation("HandshakeClient._deliver", "del self._asked[answer.query_id]", "pass"),
        ],
    ),
    Module(
        "transfer.wire.messages",
        ["tests/transfer/wire/test_messages.py", "tests/transfer/engine/test_metadata.py"],
        [
            Mutation(
                "_check_seal",
                "if not hmac.compare_digest(message.digest, _digest(message, key)):",
                "if not message.digest:",
            ),
            Mutation(
                "open_pages",
                "if (pages.engine_id, pages.lease_id) != (engine_id, lease_id):",
                "if not pages:",
                ["tests/transfer/pull/test_source.py"],
            ),
            Mutation("open_rank", "if len(data) > MAX_METADATA_BYTES:", "if not data:"),
            Mutation("open_rank", "check(rank.layout)", "pass"),
            Mutation("open_rank", "if not 0 <= rank.rank < rank.ranks", "if not 0 <= rank.rank <= rank.ranks"),
            Mutation("_check_memory", "len(rank.bases) != len(sizes)", "len(rank.bases) < len(sizes)"),
            Mutation("_check_memory", "0 < base < base + size", "0 < base <= base + size"),
            Mutation("decode_note", "0 <= note.rank < note.ranks", "0 <= note.rank <= note.ranks"),
            Mutation(
                "_digest",
                "hashlib.sha256(key).digest() if key else",
                '"" if not key else hashlib.sha256().digest() if not rank else',
            ),
        ],
    ),
    Module(
        "transfer.engine.notifications",
        ["tests/transfer/engine/test_notifications.py"],
        [
            Mutation(
                "NotificationBook.accept", "if name in self.given_up and self.is_complete(peer, name):", "if not name:"
            ),
            Mutation("NotificationBook.accept", "self.is_complete(peer, name)", "name in transfers"),
            Mutation("NotificationBook._verdict", "peer is None or peer not in self.completed", "peer is None"),
            Mutation("NotificationBook.disconnect", "if shards == self._shards", "if not shards"),
        ],
    ),
    Module(
        "transfer.engine.engine",
        ["tests/transfer/engine/test_postings.py"],
        [
            Mutation("KVTransferEngine.sync_and_release", "if not timeout_s >= 0:", "if timeout_s < 0:"),
            Mutation("KVTransferEngine.disconnect", "self._notifications.disconnect(name)", "pass"),
            Mutation("KVTransferEngine.quarantined_pages", "if replica == replica_idx", "if pages"),
            Mutation("KVTransferEngine.release_quarantine", "if request.initiator == peer:", "if request:"),
        ],
    ),
    Module(
        "transfer.engine.postings",
        ["tests/transfer/engine/test_engine.py"],
        [
            Mutation("page_runs", "if pairs.repeated is not None:", "if pairs.repeated:"),
            Mutation("Postings._fail", "self._park(posting)", "pass"),
            Mutation("Postings._park", "if posting.pending:", "if posting:"),
            Mutation("Postings.give_up", "self._park(posting)", "pass"),
            Mutation("Postings.reap", "if posting.is_moving()", "if not posting.is_moving()"),
        ],
    ),
)
