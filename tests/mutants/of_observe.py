"""Mutations of what operators see: metrics and spans."""

from tests.mutants.mutation import Module, Mutation

_CACHE = "tests/kvcache/test_prometheus.py"
_TRANSFER = "tests/transfer/test_prometheus.py"
_SPANS = "tests/transfer/test_spans.py"
_WATCH = "tests/kvcache/watch/test_endpoint.py"
_TOP = "tests/scheduler_adapters/top/test_app.py"

OBSERVE: tuple[Module, ...] = (
    Module(
        "kvcache.watch.cells",
        [_WATCH],
        [
            Mutation("pool_cells", "cells[pool.writers > 0] = PageState.WRITTEN", "pass"),
            Mutation("pool_cells", "cells[holders > 1] |=", "cells[holders > 0] |="),
            Mutation("replica_cells", "_BECOMES[at >= len(leases)]", "_BECOMES[0]"),
            Mutation("replica_cells", "pages[owner[pages] == 0] if at < len(leases) else pages", "pages"),
        ],
    ),
    Module(
        "kvcache.watch.book",
        [_WATCH],
        [
            Mutation("PoolBook.update", "self._changed[cells != self.cells] = number", "pass"),
            Mutation("PoolBook.since", "self._changed > base", "self._changed > base + 1"),
            Mutation("WatchBook.is_outdated", "one.pool is not one.watched.pool", "False"),
            Mutation("WatchBook.update", "self.beside_s += time.thread_time() - started", "pass"),
        ],
    ),
    Module(
        "kvcache.watch.endpoint",
        [f"{_WATCH}::test_a_look_waits_as_long_as_a_loop_that_never_rests_needs"],
        [
            Mutation("_pause", "min(1.0, busy)", "busy"),
            Mutation("_pause", "min(_MOST_S, held_s", "min(1e9, held_s"),
            Mutation("_clocks", " - time.thread_time()", " * 0"),
            Mutation("_WatchThread._answer", "book.cost_s - book.beside_s, busy", "book.cost_s - book.beside_s, 0.0"),
        ],
    ),
    Module(
        "kvcache.watch.log",
        [_WATCH],
        [
            Mutation("EvictionBook.apply", "self._words.size or max(numbers) != _PUBLISHED", "self._words.size"),
            Mutation("EvictionBook._book", "at - one.at > _SPREAD_S", "True"),
            Mutation("EvictionBook._count_again", "one.again += count", "pass"),
            Mutation("EvictionBook._count_again", "self.again[one.reason] += count", "pass"),
            Mutation("EvictionBook._count_again", " & ~is_evicted[1:]", ""),
            Mutation("EvictionBook._count_again", "is_evicted[:-1] &= ~follows", "pass"),
            Mutation("EvictionBook._count_again", "[-_EVICTED:]", "[:_EVICTED]"),
            Mutation("_by_reason", "entry.words[entry.more == code]", "entry.words"),
            Mutation("PrefixTree.apply", "hits[at >= self._born[hits]]", "hits"),
            Mutation("PrefixTree.apply", "self._clock += 1", "pass"),
            Mutation("_with_below", "np.add.at(below, before[reached], below[heads[reached]])", "pass"),
        ],
    ),
    Module(
        "kvcache.watch.follower",
        [f"{_WATCH}::test_what_is_no_look_changes_nothing"],
        [
            Mutation("_changes", "int(pages.max()) <= pool.num_pages", "True"),
            Mutation("Followed.apply", "self.look.incarnation != look.incarnation", "False"),
        ],
    ),
    Module(
        "scheduler_adapters.top.view",
        [_TOP],
        [
            Mutation("TopView.lit", "self.filter.has_owner(request_id, tenant)", "True"),
            Mutation("TopView.is_gone", "> _SILENT_S", "> 1e9"),
        ],
    ),
    Module(
        "kvcache.families",
        [
            f"{_CACHE}::test_what_cannot_be_read_is_left_out_counted_and_logged_once",
            f"{_CACHE}::test_a_histogram_has_cumulative_buckets_and_their_sum",
        ],
        [
            Mutation("FamilyCollector.collect", "if family.name not in self._unread:", "if family:"),
            Mutation("FamilyCollector.collect", "self._unread.get(family.name, 0) + 1", "1"),
            Mutation("FamilyCollector.collect", "[*self._values, *map(str, values)]", "[*map(str, values)]"),
            Mutation("_cumulative", "accumulate(counts)", "counts"),
        ],
    ),
    Module(
        "kvcache.prometheus",
        [
            f"{_CACHE}::test_every_figure_is_that_of_the_books",
            f"{_CACHE}::test_pages_that_something_in_flight_may_write_are_counted_until_it_ends",
        ],
        [
            Mutation("_quarantined", " if pending.closed", ""),
            Mutation("_pages", "replica.pool.num_pages - free", "replica.pool.num_pages - idle"),
            Mutation("_prompt_tokens", "metrics.cache_tokens", "metrics.prompt_tokens"),
            Mutation("_host", "all_of.tiers.replicas[number]", "all_of.tiers.replicas[0]"),
        ],
    ),
    Module(
        "transfer.prometheus",
        [f"{_TRANSFER}::test_both_sides_of_a_pull_are_counted", f"{_TRANSFER}::test_failures_are_counted_by_kind"],
        [
            Mutation("_by", "read(thread.replica, value)", "read(thread.replica, label[0])"),
            Mutation("_busy", "thread.pull_seconds", "0.0"),
        ],
    ),
    Module(
        "transfer.spans",
        [_SPANS],
        [
            Mutation("HandoverSpan.begin", "max(at, self._begun[-1][1])", "at"),
            Mutation("HandoverSpan.begin", "min(at, now)", "at"),
            Mutation("HandoverSpan.end", "self._begun = self._begun, []", "_ = self._begun, []"),
            Mutation(
                "HandoverSpan.end", "context=TraceContextTextMapPropagator().extract(self._carrier)", "context=None"
            ),
            Mutation("HandoverSpan.end", "seconds[part] += until - since", "seconds[part] = 0.0"),
            Mutation("HandoverSpan.end", "start_time=wall(begun[0][1])", "start_time=wall(begun[-1][1])"),
            Mutation("HandoverSpan.end", "if error:", "if not error:"),
        ],
    ),
    Module(
        "scheduler_adapters.service.requests",
        [
            "tests/scheduler_adapters/service/test_spans.py::test_each_attempt_has_a_span_and_one_that_fails_says_why",
        ],
        [
            Mutation("DecodeRequest.trace", '"waiting", "decoding", "over"', '"decoding", "over"'),
            Mutation("DecodeRequest.trace", "self.reasons[-1]", "self.reason"),
            Mutation("DecodeRequest.fenced", 'self.span.begin("fence", times.fence_at)', "pass"),
            Mutation("DecodeRequest.fenced", 'self.span.begin("commit", times.over_at)', "pass"),
            Mutation("TrackedRequest.move", "self.trace(self.span)", "pass"),
        ],
    ),
)
