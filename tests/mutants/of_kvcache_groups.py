"""Mutations of what groups of layers add: how they are cut, the further tables of a replica, and chunks of a loop."""

from tests.mutants.mutation import Module, Mutation

_TABLES = ["tests/kvcache/replica/test_further_tables.py", "tests/kvcache/test_group_moves.py"]
_MOVED = [
    "tests/kvcache/replica/test_further_imports.py",
    "tests/kvcache/replica/test_further_tables.py",
    "tests/kvcache/test_group_moves.py",
]
_WITH_STATES = ["tests/kvcache/states/test_grouped_states.py"]
_STATES_BELOW = ["tests/kvcache/states/test_grouped_states_below.py"]
_HINTED = ["tests/kvcache/replica/test_further_hints.py", "tests/kvcache/test_group_moves.py"]
_LIFTED = [
    "tests/kvcache/replica/test_lifts.py",
    "tests/kvcache/replica/test_lent_tables.py",
    "tests/kvcache/test_group_moves.py",
]
_OBJECTS = ["tests/kvcache/tiers/test_table_objects.py"]
_TOLD = ["tests/kvcache/events/test_grouped_events.py"]
_CUT = ["tests/kvcache/test_layer_groups.py"]

KVCACHE_GROUPS: tuple[Module, ...] = (
    Module(
        "kvcache.layer_groups",
        _CUT,
        [
            Mutation("LayerGroup.first_seen", "self.window - 1", "self.window"),
            Mutation("LayerGroup.first_seen", "positions - positions % self.window", "positions // self.window"),
            Mutation("LayerGroup.most_pages", "-(-(self.window - 1) // page_size) + 1", "-(-self.window // page_size)"),
            Mutation("layer_tables", "if lost <= MOST_LOST", "if lost <= 2 * MOST_LOST"),
            Mutation("layer_tables", "if named != list(range(num_layers)):", "if False:"),
            Mutation("layer_tables", 'group.kind != "full", -group.window', "-group.window"),
            Mutation("_cut", "lost = max(lost, tables * size / layers - 1)", "lost = tables * size / layers - 1"),
        ],
    ),
    Module(
        "kvcache.replica.further_tables",
        _TABLES,
        [
            Mutation("FurtherTables.longest", "digests[least:]", "digests[-1:]"),
            Mutation("FurtherTables.longest", "digests[: last_end(ends)]", "digests", _WITH_STATES),
            Mutation("FurtherTables.longest", "!= NO_PAGE, first, ends)", "!= NO_PAGE, first)", _WITH_STATES),
            Mutation("FurtherTables._longest", ".all(axis=0)", ".any(axis=0)"),
            Mutation("FurtherTables._longest", "last_missing < ", "last_missing <= "),
            Mutation("FurtherTables._longest", "columns + 1", "columns"),
            Mutation("FurtherTables._longest", "fits &= last_missing", "fits = last_missing"),
            Mutation("FurtherTables.plan", "min(now, first + len(digests)) if self._caching else now", "now"),
            Mutation("FurtherTables.plan", "max(before, min", "max(0, min"),
            Mutation("FurtherTables.plan", "leaving[tables, before:now] = True", "pass"),
            Mutation("FurtherTables.plan", "leaving[tables, from_hits:found] = True", "pass"),
            Mutation("FurtherTables.plan", "end - max(had, found)", "end - had"),
            Mutation(
                "FurtherTables.plan",
                "if imported and (missing",
                "if (missing",
                _MOVED,
                equivalent="a request's own pages were found whole in each table, or not at all",
            ),
            Mutation("FurtherTables.plan", "new + taken", "new"),
            Mutation("FurtherTables.plan", " - self._pool.would_be_freed(freed)", ""),
            Mutation("FurtherTables.plan", "leaving[mine, column:last] = False", "pass", _MOVED),
            Mutation(
                "FurtherTables.publish", "= there.nonzero()[0] + 1", "= 1", ["tests/kvcache/events/test_events.py"]
            ),
            Mutation("FurtherTables.least", "pages - self._seen(group, start)", "pages"),
            Mutation("FurtherTables.hold", "self._pool.hold(hits)", "pass"),
            Mutation("FurtherTables.hold", "self._pool.release(plan.leaving)", "pass"),
            Mutation("FurtherTables.hold", "self.firsts[:, row] = plan.firsts", "pass"),
            Mutation("FurtherTables.take", "self.ends[row] = plan.end", "self.ends[row] += 1"),
            Mutation("FurtherTables.take", "plan.end * self._page_size", "1 << 40"),
            Mutation(
                "FurtherTables.take", "min(int(rows.committed[row]), *plan.founds)", "rows.committed[row]", _MOVED
            ),
            Mutation("FurtherTables.append", "(ends != self._rows.num_pages[rows]).any() or ", ""),
            Mutation("FurtherTables.append", "(self.count + 1)", "self.count"),
            Mutation("FurtherTables.append", "self._slide(rows)", "pass"),
            Mutation("FurtherTables.publish", "self._pool.hold(kept[shared])", "pass"),
            Mutation("FurtherTables.publish", "self.table[:, rows, columns] = at", "pass"),
            Mutation("FurtherTables.publish", "self._pool.release(own[shared])", "pass"),
            Mutation("FurtherTables.fork", "self._pool.hold(shared[shared != NO_PAGE])", "pass"),
            Mutation("FurtherTables.fork", "self.firsts[:, parent]", "0"),
            Mutation("FurtherTables.release", "self.table[:, row, : self.ends[row]] = NO_PAGE", "pass"),
            Mutation("FurtherTables.release", "self._pool.release(pages)", "pass"),
            Mutation("FurtherTables.release", "self.firsts[:, row] = self.ends[row] = 0", "self.ends[row] = 0"),
            Mutation("FurtherTables.refuse_lost", "behind.size", "False"),
            Mutation("FurtherTables._slide", "np.minimum(now, published) if self._caching else now", "published"),
            Mutation("FurtherTables._slide", "mine[:, rows[at], columns] = NO_PAGE", "pass"),
            Mutation("FurtherTables._slide", "release_each", "release"),
            Mutation("FurtherTables._slide", "np.tile(-at,", "np.tile(at,"),
            Mutation("FurtherTables._mix", "^= self._mixed[tables, None]", "^= self._mixed[:1, None]"),
            Mutation("FurtherTables._slide", "max(int(before[at]), told)", "int(before[at])", _MOVED),
            Mutation("FurtherTables._slide", "if of_row else []", "if False else []", _MOVED),
            Mutation("FurtherTables.hold", "self._leave_to_readers(row, tables, first, last)", "pass", _MOVED),
            Mutation("FurtherTables._for_readers", "min(now, last, behind)", "min(now, last)", _MOVED),
            Mutation("FurtherTables._for_readers", "max(found - pages.shape[1], told)", "found", _MOVED),
            Mutation("FurtherTables.publish", "if told is not None:", "if False:", _MOVED),
            Mutation("FurtherTables.lists", "if windows or group", "if group", _MOVED),
            Mutation("FurtherTables.lists", "self._seen(group, tokens)", "0", _MOVED),
            Mutation("FurtherTables.imports", 'kind != "full"', "False", _MOVED),
            Mutation("FurtherTables.computed", "part != NO_PAGE", "part > 1", _MOVED),
            Mutation("FurtherTables.check", "!= with_page", "> with_page"),
            Mutation("FurtherTables.check", "full & ~", "full & "),
            Mutation("_tokens_to_hold", "start + context.active_length", "start + 1"),
            Mutation("_tokens_to_hold", "+ num_steps - 1", ""),
        ],
    ),
    Module(
        "kvcache.replica.further_tables",
        _HINTED,
        [
            Mutation("FurtherTables.hold", "self.leaving(np.full(len(plan.leaving), row), plan.leaving)", "pass"),
            Mutation("FurtherTables._slide", "self.leaving(rows[-at], pages)", "pass"),
            Mutation("FurtherTables._slide", "self.leaving(rows[-at], pages)", "self.leaving(rows[at], pages)"),
            Mutation("FurtherTables.needed", "self.table[:, row, : len(digests)] != NO_PAGE", "self._mixed == 0"),
            Mutation("FurtherTables.needed", ": end] = True", ": end] = False"),
            Mutation("FurtherTables.width", "every / first if first else 1.0 + self.count", "1.0"),
        ],
    ),
    Module(
        "kvcache.replica.hints",
        _HINTED,
        [
            Mutation("ReplicaHints.leave", "np.concatenate((pages, further))", "pages"),
            Mutation("ReplicaHints.leave", "self._order.hint(further, hints and hints.of(columns))", "pass"),
            Mutation("ReplicaHints.leave", "hints and hints.of(columns)", "None"),
            Mutation("ReplicaHints.leave", "self._pool.release(further)", "pass"),
            Mutation("ReplicaHints.come", "room = int(room / width)", "pass"),
            Mutation("ReplicaHints._begin_with_what_is_there", "pool.index.tables[sampled] == 0", "sampled > 0"),
        ],
    ),
    Module(
        "kvcache.replica.further_tables",
        _LIFTED,
        [
            Mutation("FurtherTables.from_below", " | below(every, absent)", ""),
            Mutation("FurtherTables.from_below", "self._longest(there[1:, :run], 0, ends)", "run"),
            Mutation("FurtherTables.from_below", ":run], 0, ends)", ":run], 0)", _STATES_BELOW),
            Mutation("FurtherTables.from_below", "self._seen(group, longest * self._page_size) : longest", ": longest"),
            Mutation("FurtherTables.from_below", "needed[0, :longest] = True", "needed[0] = True"),
            Mutation("FurtherTables.from_below", "needed & absent,", "needed,"),
            Mutation("FurtherTables.from_below", "(needed & ~absent)", "(needed & absent)"),
            Mutation(
                "FurtherTables.whole", "self._find(tables, digests[first:end])", "self._find(tables, digests[:end])"
            ),
            Mutation("FurtherTables.whole", "while end := self.longest(0, digests[:end]):", "while end:"),
            Mutation("FurtherTables.whole", "- most", "- 2 * most"),
            Mutation("FurtherTables.publish", "self.published(own, mixed)", "pass"),
            Mutation("FurtherTables.publish", "own[~shared], mixed[~shared]", "own, mixed"),
        ],
    ),
    Module(
        "kvcache.replica.lifts",
        _LIFTED,
        [
            Mutation("lift", "or replica.rows.num_pages[row] or", "or"),
            Mutation("lift", "hasher.matches[tier] = now", "pass"),
            Mutation("_fetched", "coming |= tier.to_host(wanted, wanted.pages - there.pages, wait=wait)", "pass"),
            Mutation("_fetched", "wanted = further.from_below(digests, tier.host_has, ends)", "pass"),
            Mutation(
                "_fetched", "tier.has, None if states is None else states.there(digests)", "tier.has", _STATES_BELOW
            ),
            Mutation(
                "_fetched", "coming |= states.bring_newest(digests[: wanted.pages], wait=wait)", "pass", _STATES_BELOW
            ),
            Mutation("_fetched", "ends = states.ends(None, digests)", "pass", _STATES_BELOW),
            Mutation("_fetched", " or states is not None", "", _STATES_BELOW),
            Mutation("lift", "0 if states is None else states.generation", "0", _STATES_BELOW),
            Mutation("_fetched", "tier.ask(further.from_below(digests, tier.may_have))", "False", _OBJECTS),
            Mutation("_fetched", "tier.generation != before", "False", _OBJECTS),
            Mutation("_fetched", "wanted.pages - there.pages", "wanted.pages", _OBJECTS),
            Mutation("lift", "start > context.start_idx and ", ""),
            Mutation("fits", " + further.least(context, num_steps, start)", ""),
            Mutation("fits", " + pool.would_be_taken(wanted.here)", ""),
            Mutation("fits", "<= pool.free_count", "< pool.free_count"),
            Mutation("bring", "pool.free_count // 2", "pool.free_count"),
            Mutation("bring", "return coming or count > 0", "return count > 0"),
        ],
    ),
    Module(
        "kvcache.tiers.host_tier",
        _LIFTED,
        [
            Mutation("ReplicaTier.has", "found |= lower.has_of(digests, asked & ~found, perhaps=perhaps)", "pass"),
            Mutation("ReplicaTier.generation", " + sum(lower.generation for lower in self.lower)", ""),
            Mutation("ReplicaTier.to_host", "lower.fetch(wanted.every, there, wait=wait, gain=gain)", "pass"),
            Mutation("ReplicaTier.to_host", "left &= ~there", "pass", _OBJECTS),
            Mutation("ReplicaTier.ask", "& ~self.host_has(perhaps.every, perhaps.lacking)", "", _OBJECTS),
            Mutation("ReplicaTier.leave", "digests[tables == 0]", "digests", _OBJECTS),
            Mutation("ReplicaTier._pass_uses", "lower.ended(digests)", "pass", _OBJECTS),
            Mutation("ReplicaTier._pass_uses", "continue", "pass", _OBJECTS),
            Mutation("ReplicaTier.lift", "self.host.pool.hold(slots)", "pass"),
            Mutation("ReplicaTier.lift", "self.pool.hold(here)", "pass"),
            Mutation("ReplicaTier.lift", "self.pool.index.say_tables(load.pages, tables)", "pass"),
            Mutation(
                "ReplicaTier.store",
                "pool.index.say_tables(slots, self.pool.index.tables_of(new[:fits]))",
                "pass",
                _TOLD,
            ),
            Mutation("ReplicaTier.lift", "self.pool.index.publish(load.pages, digests)", "pass"),
            Mutation("ReplicaTier.lift", "self.pool.release(here)", "pass"),
        ],
    ),
    Module(
        "kvcache.replica.contents",
        _LIFTED,
        [
            Mutation("PageContents.digests", "first_page if one.further is None else 0", "first_page"),
            Mutation("PageContents.cached", "pages[: replica.further.longest(0, digests[: len(pages)])]", "pages"),
            Mutation("PageContents.lease", "np.concatenate(tables)", "tables[0]"),
            Mutation("PageContents._wanted", "replica.further is not None and wanted.first_page", "False"),
        ],
    ),
    Module(
        "kvcache.replica.peer_copies",
        _LIFTED,
        [
            Mutation("PeerCopies._bring_tables", "missing &= ~taken", "pass"),
            Mutation("PeerCopies._bring_tables", "mine.pool.hold(wanted.here)", "pass"),
            Mutation("PeerCopies._bring_tables", " or not fits(mine, context, num_steps, wanted)", ""),
            Mutation("PeerCopies._bring_tables", "mine.pool.index.publish(brought, names)", "pass"),
        ],
    ),
    Module(
        "kvcache.tiers.tiers",
        _LIFTED,
        [
            Mutation("_page_format", 'tables.described() if params.groups else ""', '""'),
            Mutation(
                "_make_object_tier",
                "_page_format(params, layouts, tables,",
                "_page_format(replace(params, groups=()), layouts, tables,",
                _OBJECTS,
            ),
            Mutation("_make_file_tier", "replace(layout, tables=len(tables.tables))", "layout", _TOLD),
            Mutation("make_tiers", "place.replica.further.published = tier.published", "pass"),
        ],
    ),
    Module(
        "kvcache.tiers.file_tier",
        _TOLD,
        [
            Mutation("FileTier._take_up_reads", "self._host.pool.index.say_tables(read.slots, read.tables)", "pass"),
            Mutation("FileTier._begin_write", "self._host.pool.index.tables_of(slots)", "0 * slots.astype(np.intp)"),
        ],
    ),
    Module(
        "kvcache.tiers.file_index", _TOLD, [Mutation("FileIndex.add", "self.pages.say_tables(entries, tables)", "pass")]
    ),
    Module(
        "kvcache.events.log",
        _TOLD,
        [Mutation("EventLog.watch", "source if index.tables is None else source + index.tables[there]", "source")],
    ),
    Module(
        "kvcache.events.book",
        _TOLD,
        [
            Mutation("EventBook._medium", "source // len(self._specs)", "source"),
            Mutation("EventBook._bare", "if len(self._specs) > 1:", "if False:"),
            Mutation("EventBook.state", "*reversed(self._shared)", "HOST, FILES"),
            Mutation("EventBook._tell_known", "*reversed(self._shared)", "HOST, FILES"),
        ],
    ),
    Module(
        "kvcache.replica.leases",
        _MOVED,
        [
            Mutation("PageLeases.tell", "windows and tokens", "tokens"),
            Mutation("PageLeases.tell", "windows and tokens", "False"),
            Mutation("PageLeases.tell", "min(tokens, int(self.kept[row]))", "tokens"),
            Mutation("PageLeases.leave", "self._hold(lease, further(row, computed))", "pass"),
            Mutation("PageLeases.leave", "further(row, computed)", "further(row, 1 << 20)"),
            Mutation("PageLeases.end", "self.told[row], self.kept[row] = 0, _NEVER", "self.told[row] = 0"),
        ],
    ),
    Module(
        "kvcache.replica.imports",
        _MOVED,
        [
            Mutation("_check_pages", "table.kinds != kinds", "False"),
            Mutation("export_table", "first if further is None else 0", "first"),
            Mutation("_check_pages", '(kind == "full" or len(pages) > wanted)', "len(pages) > wanted"),
            Mutation("_check_reach", "first < min(begins, table.num_tokens)", "False"),
            Mutation("_check_reach", "min(begins, table.num_tokens)", "begins"),
            Mutation("_plan_tables", "max(num_tokens, found)", "num_tokens"),
            Mutation(
                "_plan_tables", "pages_needed(context, num_steps, num_tokens)", "pages_needed(context, num_steps)"
            ),
            Mutation("extend_import", "same &= np.array_equal(further[: len(one.src_pages)], one.src_pages)", "pass"),
            Mutation("extend_import", "_check_reach(context, table, [one.first for one in pending.further])", "pass"),
            Mutation("begin_import", "lift(replica, row, context, num_steps)", "pass", _LIFTED),
            Mutation("extend_import", "replica.further.refuse_lost(", "len("),
        ],
    ),
    Module(
        "kvcache.replica.block_table",
        _MOVED,
        [
            Mutation("FurtherImport.named", " - left_out", ""),
            Mutation("FurtherImport.take", "max(self.first, self.taken)", "self.first"),
            Mutation("PendingImport.needs_copy", " or any(one.first < one.stop for one in self.further)", ""),
            Mutation("PendingImport.written", "if not self.further:", "if True:"),
            Mutation("PendingImport.take_up", "if last or not one.at_end:", "if True:"),
            Mutation(
                "PendingImport.take_up", "one.stop = max(one.first, table.num_tokens)", "one.stop = table.num_tokens"
            ),
        ],
    ),
    Module(
        "kvcache.pool.pages",
        _TABLES,
        [
            Mutation("PagePool.release_each", "np.sort(first)", "np.sort(first)[::-1]"),
        ],
    ),
    Module(
        "kvcache.replica.replica",
        _TABLES,
        [
            Mutation("Replica.published_run", " and self.states is None", "", _WITH_STATES),
            Mutation("Replica.published_run", "pages[: self.further.longest(first, digests[: len(pages)])]", "pages"),
            Mutation("Replica.reserve", "and self.further is None", ""),
            Mutation("Replica.act", "plan.new + plan.further.cost", "plan.new"),
            Mutation("Replica.pages_needed", "+= self.further.least(context, num_steps, start)", "+= 0"),
            Mutation("Replica.fork", "else 1 + self.further.count", "else 1"),
            Mutation("Replica._plan", "start=cached", "start=0"),
            Mutation("Replica._plan", " and self.further is None", "", _STATES_BELOW),
            Mutation("Replica._publish", "self.further.publish(rows, columns, digests, told)", "pass"),
            Mutation("Replica._published_pages", "self.further.computed(row, committed)", "pages[:0]", _LIFTED),
            Mutation("Replica.release", "None if self.further is None else self.further.computed", "None", _MOVED),
        ],
    ),
    Module(
        "scheduler_adapters.loop",
        ["tests/scheduler_adapters/hf/test_groups.py"],
        [
            Mutation(
                "ServingLoop.step",
                "[entry.context.active_length for entry in running]",
                "[entry.context.end_idx - entry.context.start_idx for entry in running]",
            ),
            Mutation("ServingLoop._choose_chunk", "self._has_windows and", "False and"),
        ],
    ),
    Module(
        "kvcache.replicas",
        _TABLES,
        [
            Mutation("Replicas._fits", " - further.cost", ""),
            Mutation("Replicas.admission", "needed - len(pages) + more.new", "needed - len(pages)"),
            Mutation("Replicas.reserve", "lift(replica, row, context, num_steps)", "pass", _LIFTED),
            Mutation("Replicas.prefetch", "return prefetch(", "prefetch(", _LIFTED),
            Mutation("Replicas.fetch", "np.where(state.actives < state.ends, state.actives, lengths)", "lengths"),
            Mutation("Replicas.fetch", "replica.further.refuse_lost(state.rows, state.starts)", "pass"),
        ],
    ),
)
