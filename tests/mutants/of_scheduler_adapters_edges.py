"""Mutations of the edges of the schedulers: the frontend, whom decode asks, the folder of a run, signals, arguments."""

from tests.mutants.mutation import Module, Mutation

_FRONTEND = "tests/scheduler_adapters/service/test_frontend.py"
_SOCKETS = "tests/scheduler_adapters/service/test_sockets.py"
_FOLDER = "tests/scheduler_adapters/service/test_run_folder.py"
_SIGNALS = "tests/scheduler_adapters/test_interrupts.py"
_PEERS = "tests/scheduler_adapters/service/test_peer_prefixes.py::test_"
_QUICKER = f"{_PEERS}where_computing_is_quicker_nobody_is_asked"
_IN_TURN = f"{_PEERS}sources_that_a_client_names_are_asked_in_turn"
_LOST = f"{_PEERS}what_was_pulled_and_lost_before_its_turn_is_computed"
_PULLS = f"{_PEERS}what_one_has_computed_another_pulls_and_computes_the_rest"
_CANCELLED = f"{_PEERS}a_request_that_is_cancelled_meanwhile_leaves_nothing_held"
_RUN_BY_RUN = f"{_PEERS}the_head_is_pulled_from_one_and_the_tail_from_another_whoever_is_named_first"
_RUNS = f"{_PEERS}two_that_have_every_other_page_are_not_asked_for_ever"
_SILENT = f"{_PEERS}one_that_does_not_answer_leaves_time_for_the_next"
_NO_ROOM = f"{_PEERS}no_room_for_what_is_lent_is_no_error_and_it_is_given_back"
_HOLE = f"{_PEERS}a_tail_whose_head_is_gone_meanwhile_is_given_back"

SCHEDULER_ADAPTERS_EDGES: tuple[Module, ...] = (
    Module(
        "scheduler_adapters.service.sockets",
        [f"{_FRONTEND}::test_what_is_not_read_waits_in_order_and_the_front_turns_deaf_at_its_limit"],
        [
            Mutation("FrontendQueue.send", "if self._unread or not", "if not"),
            Mutation("FrontendQueue.flush", "len(self._unread) > limit", "len(self._unread) >= limit"),
            Mutation("FrontendQueue.flush", "return self.is_deaf and not was_deaf", "return self.is_deaf"),
            Mutation("Pulse.__init__", "self._idle.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)", "pass", [_SOCKETS]),
            Mutation("_follow_peers", "keep_alive(socket)", "socket.setsockopt(zmq.HEARTBEAT_IVL, 500)", [_SOCKETS]),
        ],
    ),
    Module(
        "scheduler_adapters.service.prefill_router",
        ["tests/scheduler_adapters/service/test_prefill_router.py"],
        [
            Mutation("route", "chosen.load += missing[chosen]", "pass"),
            Mutation("chunks_of", "len(tokens) - CHUNK + 1", "len(tokens)"),
            Mutation("chunks_of", "hash(cache_salt)", "0"),
            Mutation("PromptHistory.add", "reversed(chunks)", "chunks"),
            Mutation("_sources", "tokens < missing[chosen]", "tokens <= missing[chosen]"),
            Mutation("_sources", "own.source.tokens // CHUNK * CHUNK", "own.source.tokens"),
            Mutation("_sources", "length - missing[best]", "0"),
            Mutation("_sources", "chosen.welcome.page_size == own.page_size", "own"),
            Mutation("_sources", "sorted(lacking, key=lambda one: one[0])", "lacking[::-1]"),
        ],
    ),
    Module(
        "scheduler_adapters.service.peer_prefixes",
        [],
        [
            Mutation(
                "PeerPrefixes.begin",
                "not self.estimate.pays(missing, context.current_length - cached - missing)",
                "not missing",
                [_QUICKER],
            ),
            Mutation("PeerPrefixes._go_on", "if not fetch.to_ask or", "if fetch.to_ask or", [_IN_TURN]),
            Mutation("PeerPrefixes._go_on", "fetch.stretches == _MOST_STRETCHES", "False", [_RUNS]),
            Mutation("PeerPrefixes._go_on", "fetch.engines.pop()", "pass", [_SILENT]),
            Mutation("PeerPrefixes._go_on", "context.reset()", "pass", [_RUN_BY_RUN]),
            Mutation("PeerPrefixes._ask", " / fetch.to_ask", "", [_SILENT]),
            Mutation("PeerPrefixes._ask", "cached // self._manager.page_size", "0", [_RUN_BY_RUN]),
            Mutation("PeerPrefixes._take", "fetch.to_ask = len(fetch.engines)", "pass", [_RUN_BY_RUN]),
            Mutation(
                "PeerPrefixes._on_lent",
                "self._exchange.refuse(replica, lent.source, _DROPPED)",
                "pass",
                [f"{_CANCELLED}[asked]"],
            ),
            Mutation(
                "PeerPrefixes._on_lent",
                "self._exchange.refuse(replica, lent.source, _USELESS)  #",
                "pass  #",
                [_NO_ROOM],
            ),
            Mutation(
                "PeerPrefixes._on_lent",
                "self._exchange.refuse(replica, lent.source, _USELESS)\n            return",
                "return",
                [_HOLE],
            ),
            Mutation("PeerPrefixes._end", "context.reset()", "pass", [_LOST]),
            Mutation("PeerPrefixes._take", "self._manager.release(context.request_id)", "pass", [_PULLS]),
            Mutation("PeerPrefixes.drop", "self._give_back(fetch)", "pass", [_CANCELLED]),
            Mutation(
                "PeerPrefixes._give_back",
                "self._manager.release(fetch.waiting.context.request_id)",
                "pass",
                [_CANCELLED],
            ),
        ],
    ),
    Module(
        "scheduler_adapters.service.pull_or_compute",
        ["tests/scheduler_adapters/service/test_pull_or_compute.py"],
        [
            Mutation("TimeByTokens.add", "self._latest.append(seconds / usual)", "pass"),
            Mutation("TimeByTokens.add", "if kept:", "if tokens:"),
            Mutation("TimeByTokens.add", "seconds / self._pace()", "seconds"),
            Mutation("TimeByTokens.add", "median_low(times)", "fmean(times)"),
            Mutation("TimeByTokens.add", "min(median_low(times), longer_s)", "median_low(times)"),
            Mutation("TimeByTokens._pace", "last if last < mostly / 2 else mostly", "mostly"),
            Mutation("TimeByTokens._pace", "last if last < mostly / 2 else mostly", "last"),
            Mutation("TimeByTokens._usually", "max(line, low_s * min(1.0, tokens / low))", "line"),
            Mutation("PullOrCompute.pays", "pull < whole - behind", "pull > whole - behind"),
            Mutation("PullOrCompute.pays", "whole - behind", "whole"),
            Mutation("PullOrCompute.pays", "self._refused % _TRY_AGAIN == 0", "False"),
        ],
    ),
    Module(
        "scheduler_adapters.service.fleet",
        [],
        [
            Mutation("_lock", "os.path.samestat(folder.stat(), os.fstat(lock))", "folder", [_FOLDER]),
            Mutation("_remove_abandoned", "if lock is not None:", "if entry:", [_FOLDER]),
            Mutation("_is_mine", "st_uid == os.getuid()", "st_uid >= 0", [_FOLDER]),
            Mutation("RunFolder.close", "shutil.rmtree(self.path, ignore_errors=True)", "pass", [_FOLDER]),
        ],
    ),
    Module(
        "scheduler_adapters.interrupts",
        [
            f"{_SIGNALS}::test_a_signal_is_an_exception_once",
            f"{_SIGNALS}::test_a_signal_that_is_lost_can_be_sent_again",
            f"{_SIGNALS}::test_a_signal_that_is_held_acts_at_the_end_of_the_block",
            f"{_SIGNALS}::test_other_threads_hold_nothing",
        ],
        [
            Mutation("raised", "if time.monotonic() - obeyed > _ENDING_S:", "if number:"),
            Mutation("held", "signal.raise_signal(number)", "pass"),
            Mutation("_handled", "signal.signal(number, earlier)", "pass"),
        ],
    ),
    Module(
        "scheduler_adapters.arguments",
        ["tests/scheduler_adapters/test_cli.py::test_a_hostile_value_is_one_line_or_is_taken"],
        [
            Mutation(
                "number",
                "above < float(text) <= most",
                "above < float(text)",
                ["tests/scheduler_adapters/test_cli.py::test_a_number_is_within_both_its_limits"],
            ),
            Mutation("output_file", "if path.is_dir():", "if not path:"),
        ],
    ),
)
