"""Mutations of the schedulers: the loop, the requests of both sides, messages, and what runs the model."""

from tests.mutants.mutation import Module, Mutation

SCHEDULER_ADAPTERS: tuple[Module, ...] = (
    Module(
        "scheduler_adapters.loop",
        ["tests/scheduler_adapters/test_loop.py"],
        [
            Mutation("ServingLoop.context_for", "most_pages(total - 1, size)", "most_pages(total, size)"),
            Mutation(
                "ServingLoop.context_for",
                "if not self.knows(highest):",
                "if highest < 0:",
                [
                    "tests/scheduler_adapters/test_loop.py::test_the_last_token_of_the_vocabulary_is_taken_and_the_one_after_it_is_not"
                ],
            ),
            Mutation(
                "ServingLoop.knows",
                "0 <= token < self.vocab_size",
                "0 <= token <= self.vocab_size",
                [
                    "tests/scheduler_adapters/test_loop.py::test_the_last_token_of_the_vocabulary_is_taken_and_the_one_after_it_is_not"
                ],
            ),
            Mutation("ServingLoop._reserve_running", "if e.replica == entry.replica", "if e"),
            Mutation(
                "ServingLoop._reserve_running",
                "reversed(self._running.values())",
                "self._running.values()",
                [
                    "tests/scheduler_adapters/test_loop.py::test_the_oldest_request_is_never_preempted",
                    "tests/scheduler_adapters/test_loop.py::test_a_tiny_pool_preempts_and_still_gives_equal_tokens",
                ],
            ),
            Mutation(
                "ServingLoop._preempt",
                "entry.context.reset()",
                "pass",
                ["tests/scheduler_adapters/test_loop.py::test_a_tiny_pool_preempts_and_still_gives_equal_tokens"],
            ),
            Mutation(
                "ServingLoop._preempt",
                "last=False",
                "last=True",
                ["tests/scheduler_adapters/test_loop.py::test_a_preempted_request_comes_before_those_that_wait"],
            ),
            Mutation(
                "ServingLoop._claim",
                "if not reserved:",
                "if reserved is None:",
                [
                    "tests/scheduler_adapters/test_loop.py::test_a_tiny_pool_preempts_and_still_gives_equal_tokens",
                    "tests/scheduler_adapters/test_loop.py::test_held_pages_stay_until_freed_and_requests_wait_for_them",
                ],
            ),
            Mutation(
                "ServingLoop._run",
                "sorted(batch, key=lambda pair: pair[0].replica)",
                "batch",
                ["tests/scheduler_adapters/test_loop.py::test_every_request_gets_the_models_own_tokens"],
            ),
            Mutation(
                "ServingLoop._output",
                "if request.hold_pages:",
                "if not request:",
                ["tests/scheduler_adapters/test_loop.py::test_held_pages_stay_until_freed_and_requests_wait_for_them"],
            ),
            Mutation(
                "ServingLoop._check_new",
                "request_id in self._held or",
                "",
                ["tests/scheduler_adapters/test_loop.py::test_an_id_is_used_once_at_a_time"],
            ),
            Mutation(
                "plan_chunks",
                "max(1, budget",
                "max(0, budget",
                ["tests/scheduler_adapters/test_loop.py::test_the_plan_runs_decodes_first_and_prompts_by_age"],
            ),
            Mutation(
                "plan_chunks",
                "min(count, left)",
                "count",
                ["tests/scheduler_adapters/test_loop.py::test_the_plan_runs_decodes_first_and_prompts_by_age"],
            ),
            Mutation(
                "finish_reason",
                ">= request.max_new_tokens",
                "> request.max_new_tokens",
                ["tests/scheduler_adapters/test_loop.py::test_why_a_request_ends"],
            ),
        ],
    ),
    Module(
        "scheduler_adapters.service.requests",
        ["tests/scheduler_adapters/service/test_requests.py"],
        [
            Mutation(
                "PREFILL_MOVES",
                '"held": frozenset({"ending", "over"})',
                '"held": frozenset({"ending", "over", "queued"})',
            ),
            Mutation("DECODE_MOVES", '"decoding": frozenset({"over"})', '"decoding": frozenset({"over", "waiting"})'),
            Mutation(
                "DecodeRequest.relieve",
                "self.load = 0",
                "pass",
                ["tests/scheduler_adapters/service/test_prefill_router.py"],
            ),
            Mutation(
                "DecodeRequest.begin_anew",
                "self.avoid.add(self.prefill.name)",
                "pass",
                [
                    "tests/scheduler_adapters/service/test_faults.py::test_the_next_attempt_avoids_the_prefill_process_of_the_one_that_failed"
                ],
            ),
            Mutation("TrackedRequest.blame", "self.reason or reason", "reason or self.reason"),
            Mutation("PrefillRequest.digest_of", "num_tokens == len(self.prompt.token_ids)", "num_tokens"),
            Mutation("DecodeRequest.foreign", "count == self.digest[0]", "self.digest[0]"),
            Mutation("DecodeRequest.foreign", "self.digest = known.end_idx, prompt.digest(known.end_idx)", "pass"),
            Mutation("TrackedRequest.move", "deadline\n", "self.deadline\n"),
            Mutation(
                "Recent.add",
                "if len(self._names) > self._most:",
                "if not self._names:",
                ["tests/scheduler_adapters/service/test_repeats.py::test_what_is_remembered_is_bounded"],
            ),
            Mutation(
                "DecodeRequest.next_offer",
                "whole=self.importing is None",
                "whole=False",
                ["tests/scheduler_adapters/service/test_offers.py"],
            ),
        ],
    ),
    Module(
        "scheduler_adapters.service.offers",
        ["tests/scheduler_adapters/service/test_offers.py"],
        [
            Mutation("Offers.has_had", "if _place(offer) in self._waiting:", "if False:"),
            Mutation(
                "Offers.has_had",
                "return before is not None",
                "return False",
                [
                    "tests/scheduler_adapters/service/test_repeats.py::test_a_last_offer_that_comes_again_while_decode_has_no_pages_puts_out_one_token"
                ],
            ),
            Mutation("Offers.has_had", "offer.table.num_tokens <= before.table.num_tokens", "False"),
            Mutation("Offers.take", "min(self._waiting", "max(self._waiting"),
            Mutation("Offers.take", " or not offer.table.follows(before)", ""),
            Mutation("Offers.take", "whole and ", ""),
        ],
    ),
    Module(
        "scheduler_adapters.service.decode",
        ["tests/scheduler_adapters/service/test_faults.py", "tests/scheduler_adapters/service/test_service.py"],
        [
            Mutation(
                "DecodeScheduler._on_message",
                "(message.attempt, prefill)",
                "(request.attempt, prefill)",
                [
                    "tests/scheduler_adapters/service/test_faults.py::test_offers_of_an_attempt_that_is_over_are_refused_and_their_pages_come_back",
                    "tests/scheduler_adapters/service/test_faults.py::test_the_same_id_may_come_again_while_its_first_pull_still_ends",
                ],
            ),
            Mutation(
                "DecodeScheduler._on_message",
                "not self._loop.knows(message.token)",
                "message.token < 0",
                [
                    "tests/scheduler_adapters/service/test_repeats.py::test_an_offered_token_that_the_model_does_not_know_fails_the_attempt"
                ],
            ),
            Mutation(
                "DecodeScheduler._on_late",
                'prefill.cancel(message.request_id, message.attempt, "too late")',
                "pass",
                [
                    "tests/scheduler_adapters/service/test_faults.py::test_offers_of_an_attempt_that_is_over_are_refused_and_their_pages_come_back"
                ],
            ),
            Mutation(
                "DecodeScheduler._admit",
                "while queue and not self._loop.num_waiting:",
                "while queue:",
                [
                    "tests/scheduler_adapters/service/test_service.py::test_what_was_preempted_comes_before_what_has_just_arrived"
                ],
            ),
            Mutation("DecodeScheduler._fail", ">= MAX_ATTEMPTS", "> MAX_ATTEMPTS"),
            Mutation("DecodeScheduler._fail", "self._unasked[request.request_id] = request", "pass"),
            Mutation(
                "DecodeScheduler._ask",
                "self._unasked.values()",
                "self._requests.values()",
                ["tests/scheduler_adapters/service/test_service.py::test_a_poll_looks_at_no_request_that_has_no_news"],
            ),
            Mutation(
                "DecodeScheduler._ask",
                " if there else ()",
                "",
                [
                    "tests/scheduler_adapters/service/test_service.py::test_requests_that_nobody_takes_are_not_looked_at_until_somebody_does"
                ],
            ),
            Mutation(
                "DecodeScheduler._finish",
                "self._unasked.pop(request.request_id, None)",
                "pass",
                ["tests/scheduler_adapters/service/test_faults.py::test_a_cancelled_request_ends_in_every_phase"],
            ),
            Mutation(
                "DecodeScheduler.submit",
                "if self.draining or len(self._requests) >= self._max_open:",
                "if self.draining or len(self._requests) > self._max_open:",
                [
                    "tests/scheduler_adapters/service/test_frontend.py::test_a_request_beyond_those_that_may_be_on_their_way_is_refused_alone"
                ],
            ),
            Mutation(
                "DecodeScheduler._on_message",
                "request.offer.source != message.source",
                "not message.source",
                [
                    "tests/scheduler_adapters/service/test_repeats.py::test_two_leases_for_one_attempt_fail_it_and_another_follows"
                ],
            ),
            Mutation(
                "DecodeScheduler._give_up",
                "self._loop.abort(request.request_id)",
                "pass",
                ["tests/scheduler_adapters/service/test_faults.py::test_a_cancelled_request_ends_in_every_phase"],
            ),
            Mutation(
                "DecodeScheduler._give_up_source",
                "request.prefill.cancel(request.request_id, request.attempt, reason)",
                "pass",
                ["tests/scheduler_adapters/service/test_faults.py::test_a_cancelled_request_ends_in_every_phase"],
            ),
            Mutation(
                "DecodeScheduler._expire",
                "request.deadline <= now",
                "request.deadline < 0",
                [
                    "tests/scheduler_adapters/service/test_faults.py::test_a_request_that_stays_in_a_phase_for_too_long_fails_with_the_reason"
                ],
            ),
            Mutation(
                "DecodeScheduler._give_up",
                "self._manager.cancel_import(importing.pending)",
                "pass",
                [
                    "tests/scheduler_adapters/service/test_faults.py::test_the_same_id_may_come_again_while_its_first_pull_still_ends",
                    "tests/scheduler_adapters/service/test_faults.py::test_a_cancelled_request_ends_in_every_phase",
                    "tests/scheduler_adapters/service/test_faults.py::test_pages_stay_held_until_their_lease_word_is_cleared",
                ],
            ),
            Mutation(
                "DecodeScheduler._on_event",
                "request.key != key or ",
                "",
                ["tests/scheduler_adapters/service/test_decode.py"],
            ),
            Mutation(
                "DecodeScheduler._on_event",
                "request.key != key",
                "not request.key",
                ["tests/scheduler_adapters/service/test_decode.py"],
            ),
            Mutation(
                "DecodeScheduler._admit",
                "(start := pending.tokens[0]) //",
                "(start := pending.tokens[1]) //",
                ["tests/scheduler_adapters/service/test_service.py::test_decode_pulls_only_what_it_lacks"],
            ),
        ],
    ),
    Module(
        "scheduler_adapters.service.prefill",
        ["tests/scheduler_adapters/service/test_faults.py", "tests/scheduler_adapters/service/test_service.py"],
        [
            Mutation(
                "PrefillScheduler._welcome_reader",
                "if reader.name == hello.reader",
                "if not reader",
                [
                    "tests/scheduler_adapters/service/test_faults.py::test_a_decode_process_that_connects_anew_has_given_up_what_it_asked_for"
                ],
            ),
            Mutation(
                "PrefillScheduler._start",
                "min(message.within_s, self._times.compute_s)",
                "self._times.compute_s",
                [
                    "tests/scheduler_adapters/service/test_faults.py::test_the_deadline_that_decode_names_holds_at_prefill"
                ],
            ),
            Mutation("PrefillScheduler._on_event", 'if reason == "read":', "if reason:"),
            Mutation(
                "PrefillScheduler._known_pages",
                "if request.new_pages else 0",
                "",
                ["tests/scheduler_adapters/service/test_offers.py"],
            ),
            Mutation(
                "PrefillScheduler._on_output",
                "self._loop.abort(request.key)\n        self.peers",
                "self._loop.free(request.key)\n        self.peers",
                ["tests/scheduler_adapters/service/test_offers.py"],
            ),
            Mutation(
                "PrefillScheduler._offer_chunks",
                "self._untold.values()",
                "self._requests.values()",
                ["tests/scheduler_adapters/service/test_service.py::test_a_poll_looks_at_no_request_that_has_no_news"],
            ),
            Mutation(
                "PrefillScheduler._forget",
                "self._untold.pop(request.key, None)",
                "pass",
                ["tests/scheduler_adapters/service/test_faults.py::test_a_cancelled_request_ends_in_every_phase"],
            ),
            Mutation(
                "PrefillScheduler._table",
                "full_pages=True",
                "full_pages=False",
                ["tests/scheduler_adapters/service/test_service.py"],
            ),
            Mutation(
                "PrefillScheduler._offer",
                "self._exchange.start_clock(source)",
                "pass",
                [
                    "tests/scheduler_adapters/service/test_faults.py::test_the_time_of_a_lease_runs_from_the_last_offer_on"
                ],
            ),
            Mutation(
                "PrefillScheduler._end",
                "if request.source is None:",
                "if request.source:",
                [
                    "tests/scheduler_adapters/service/test_faults.py::test_a_cancelled_request_ends_in_every_phase",
                    "tests/scheduler_adapters/service/test_faults.py::test_pages_stay_held_until_their_lease_word_is_cleared",
                ],
            ),
        ],
    ),
    Module(
        "scheduler_adapters.service.messages",
        ["tests/scheduler_adapters/service/test_messages.py"],
        [
            Mutation("decode_frames", "if len(frames) != 1:", "if not frames:"),
            Mutation("decode_frames", "if not isinstance(message, wanted):", "if not message:"),
            Mutation("clipped", "_MAX_REASON - 3", "_MAX_REASON"),
            Mutation("Token", "lt=1 << 31", "le=1 << 31"),
        ],
    ),
    Module(
        "scheduler_adapters.hf.paged_attention",
        ["tests/scheduler_adapters/hf/test_paged_attention.py"],
        [
            Mutation("PagedBatch._group", ">= _first_seen(seen, positions)", "> _first_seen(seen, positions)"),
            Mutation("PagedBatch._group", "= _first_seen(seen, starts)", "= _first_seen(seen, starts) + 1"),
            Mutation("PagedBatch.write", "self._write_pages[table]", "self._write_pages[0]"),
            Mutation("PagedBatch._groups_of", "self._tables[table]", "self._tables[0]"),
            Mutation("_grouped_attention", "sinks.to(query.dtype)", "torch.zeros_like(sinks)"),
            Mutation("PagedBatch._read", "states[group.stale[0], :, group.stale[1]] = 0", "pass"),
            Mutation("PagedBatch._group", "-(-ends // self._page_size)", "ends // self._page_size"),
        ],
    ),
    Module(
        "scheduler_adapters.replay.replay",
        ["tests/scheduler_adapters/replay/test_replay.py"],
        [
            Mutation("reference_lru_hits", "reversed(blocks)", "blocks"),
            Mutation(
                "optimum_of_each",
                "if resident.get(block) == (use, depth):",
                "if block in resident:",
                equivalent="the use of a stale entry has passed: all that are resident are popped before it",
            ),
            Mutation("_window_loads", "each.max() * replicas / each.sum()", "each.max() / each.sum()"),
        ],
    ),
    Module(
        "scheduler_adapters.replay.trace_hints",
        ["tests/scheduler_adapters/replay/test_trace_hints.py"],
        [
            Mutation("continues", "(len(blocks) - 1) // 2", "-1"),
            Mutation("_share_wrong", "if 0.0 <= share <= 1.0:", "if -1.0 <= share <= 1.0:"),
        ],
    ),
)
