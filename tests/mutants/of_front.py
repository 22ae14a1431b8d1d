"""Mutations of the front, and of what drains behind it."""

from tests.mutants.mutation import Module, Mutation

_DRAIN = "tests/scheduler_adapters/service/test_drain.py"
_OBSERVE = "tests/scheduler_adapters/front/test_observe.py"

_HOLDERS = (
    "pages_come_and_go_as_in_a_set",
    "a_page_takes_at_most_16_bytes_and_there_is_a_most",
    "who_has_more_of_a_prompt_than_who_computes_it_is_named",
    "a_process_that_goes_is_forgotten_and_one_that_is_back_is_followed_anew",
    "after_a_gap_nothing_is_known_until_all_is_told_anew",
    "windows_that_go_take_no_page_of_full_layers_along",
)

FRONT: tuple[Module, ...] = (
    Module(
        "scheduler_adapters.front.holders",
        [f"tests/scheduler_adapters/front/test_holders.py::test_{name}" for name in _HOLDERS],
        [
            Mutation("PageSet.add", "self._gone.difference_update(hashes)", "pass"),
            Mutation("PageSet.add", "max(0, self._most - len(self))", "None"),
            Mutation("PageSet.remove", "self._come.difference_update(hashes)", "pass"),
            Mutation("PageSet._settle", "64 + len(self._sorted) // 32", "64 + len(self._sorted)"),
            Mutation("_ProcessPages.poll", "number != self._last + 1", "number <= self._last"),
            Mutation("_ProcessPages._take", "event.group_idx:", "False:"),
            Mutation("PageHolders.follow", "known.ready.incarnation", "there[name].incarnation"),
            Mutation("PageHolders.follow", "len(there) == len(members)", "True"),
            Mutation("PageHolders.sources", "tokens[name] > least", "tokens[name] >= least"),
            Mutation("PageHolders.sources", "reverse=True", "reverse=False"),
        ],
    ),
    Module(
        "scheduler_adapters.front.frontend",
        [],
        [
            Mutation("Frontend._attempted", "refused.add(attempt.name)", "pass"),
            Mutation("Frontend._attempted", "pulled = bool(emitted)", "pulled = True"),
            Mutation("Frontend._attempted", "if not news.elsewhere:", "if news.error == str(news.elsewhere):"),
            Mutation("Frontend._submit", "(*request.prompt, *emitted)", "request.prompt"),
            Mutation("Frontend._submit", "request.max_new_tokens - len(emitted)", "request.max_new_tokens"),
            Mutation("Frontend._choose", "min(willing", "max(willing"),
            Mutation("Frontend._forget", "self._attempts.pop(attempt.serial, None) is not None", "not attempt"),
            Mutation("Frontend._forget", "self.members[attempt.name].serials.discard(attempt.serial)", "pass"),
            Mutation("Frontend._serving", " and not one.ready.draining", ""),
            Mutation("Frontend._lose", "elsewhere=True", "elsewhere=False"),
            Mutation("Frontend._on_ready", "known.ready.incarnation != ready.incarnation", "known.ready.name != name"),
            Mutation("Frontend._on_tokens", "if message.finished is None:", "if attempt is not None:"),
            Mutation("Frontend.run", "if member.pulse.is_over", "if not member.ready.name"),
            Mutation("Frontend.drain", "self.left[name].pages_held:", "not self.left:"),
            Mutation("Frontend.generate", "self.counts.open -= 1", "pass"),
            Mutation("Frontend.generate", "len(request.prompt) - cached", "len(request.prompt)"),
        ],
    ),
    Module(
        "scheduler_adapters.front.placement",
        [],
        [
            Mutation("InTurns.place", "next(self._turns) % len(names)", "0"),
            Mutation("Selected.place", " if name in prefills", ""),
            Mutation("Selected.place", " or request_id in self._reserved", ""),
            Mutation("Selected.over", "await self._service.free_reservation(request_id)", "pass"),
            Mutation("Selected.follow", "there[name].incarnation != known.incarnation", "not known"),
        ],
    ),
    Module(
        "scheduler_adapters.front.openai",
        [],
        [
            Mutation("read_request", "not body.ignore_eos or", "not body and"),
            Mutation("read_request", "ignore_eos=bool(body.ignore_eos)", "ignore_eos=False"),
            Mutation("TextStream.add", "text.endswith(_UNFINISHED) or", "not text and"),
        ],
    ),
    Module(
        "scheduler_adapters.front.app",
        [f"{_OBSERVE}::test_a_hundred_requests_of_a_client_are_in_its_traces_and_in_the_metrics"],
        [
            Mutation("_submit", 'traceparent if len(traceparent) <= _LONGEST_TRACEPARENT else ""', '""'),
            Mutation("_submit", "ignore_eos=asked.ignore_eos", "ignore_eos=False"),
        ],
    ),
    Module(
        "scheduler_adapters.service.prefill",
        [],
        [
            Mutation("PrefillScheduler._start", "if self.draining:", "if not message:", [_DRAIN]),
            Mutation("PrefillScheduler.drain", "self._send(reader, msg.Leaving())", "pass", [_DRAIN]),
        ],
    ),
    Module(
        "scheduler_adapters.service.prefill_router",
        [],
        [Mutation("PrefillConnection.takes_requests", " and not self.leaving", "", [_DRAIN])],
    ),
    Module(
        "scheduler_adapters.service.decode",
        [],
        [Mutation("DecodeScheduler.submit", "self.draining or", "", [_DRAIN])],
    ),
)
