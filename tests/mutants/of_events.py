"""Mutations of KV events: what is written down, what is told of it, and what happens where something is lost."""

from tests.mutants.mutation import Module, Mutation

_EVENTS = "tests/kvcache/events/test_events.py"
_BOOK = "tests/kvcache/events/test_book.py"

EVENTS: tuple[Module, ...] = (
    Module(
        "kvcache.events.wire",
        ["tests/kvcache/events/test_wire.py"],
        [
            Mutation("hashes_of", ".byteswap()", ""),
            Mutation("hashes_of", "[:, -1]", "[:, 0]"),
            Mutation("keys_of_block", "block == 0 and salt", "salt"),
            Mutation("keys_of_block", "position % block_size", "position"),
            Mutation("adapter_of", "None if position else", ""),
        ],
    ),
    Module(
        "kvcache.events.book",
        [_BOOK],
        [
            Mutation("EventBook._come", "if not orphaned.size:", "if ids.size:"),
            Mutation("EventBook._come", "ids[~np.isin(ids, below)]", "ids"),
            Mutation("EventBook._come", "if source < 0:", "if source < -9:"),
            Mutation("EventBook._go", "np.subtract.at(self._kids[source]", "np.add.at(self._kids[source]"),
            Mutation("EventBook._go", "self._left.append(ids)", "pass"),
            Mutation("EventBook._go", "last.source == source and", ""),
            Mutation("EventBook._describe", "self._left.append(ids)", "pass"),
            Mutation("EventBook._describe", "self._tell_known(ids)", "pass", [_EVENTS]),
            Mutation("EventBook._forget_left", "while (left :=", "while len(self._left) and (left :="),
            Mutation("EventBook._forget_left", "self._keys.pop(one, None)", "pass"),
            Mutation("EventBook._forget_left", "self._refs[left] == 0", "self._refs[left] >= 0"),
            Mutation("EventBook._chains", "| ~np.isin(parents, ids)", ""),
            Mutation("EventBook._chains", 'heads[np.argsort(self._depth[heads], kind="stable")]', "heads[::-1]"),
            Mutation("EventBook._below", "while ids.size:", "if ids.size:"),
            Mutation("EventBook._stored", "max(1,", "max(1 << 20,", ["tests/kvcache/events/test_publisher.py"]),
            Mutation("EventBook._stored", "parents[1:] != some[:-1]", "parents[1:] == some[:-1]"),
            Mutation("EventBook._stored", "if parents[first] else None", ""),
            Mutation("EventBook._describe", "np.arange(len(owners)) + owners", "np.arange(len(owners))", [_EVENTS]),
        ],
    ),
    Module(
        "kvcache.events.log",
        [_EVENTS],
        [
            Mutation("EventLog.watch", "if (there :=", "if not (there :="),
            Mutation("EventLog.end_call", "len(entries) > MOST_ENTRIES", "not self.entries"),
        ],
    ),
    Module(
        "kvcache.events.publisher",
        ["tests/kvcache/events/test_publisher.py"],
        [
            Mutation("_Stream.send", "len(self._ring) > self._most or", ""),
            Mutation("_Stream.send", "self._ring_bytes > _RING_BYTES", "self._ring_bytes < 0"),
            Mutation("_Stream.answer", "first >= oldest and", ""),
            Mutation("_Stream.answer", "len(asked[2]) != 8", "len(asked[2]) > 8"),
            Mutation("_Stream._state", "enumerate(parts, first)", "enumerate(parts)"),
            Mutation("_Stream._state", "min(len(parts), max(1, self.sequence - first))", "len(parts)"),
            Mutation("_Stream.reply", "room > 0", "room"),
            Mutation("_Stream.reply", "now - self._taken_at > _UNREAD_S", "self._taken_at > now"),
            Mutation("_Stream.reply", "except zmq.ZMQError:", "except zmq.ContextTerminated:"),
            Mutation("_Stream.answer", "self._taken_at = 0.0", "pass"),
            Mutation("_Worker.run", "asked = self._answer(dict(self._poller.poll(0)))", "asked = False"),
            Mutation("_Worker.turn", "self._is_owed, self._behind,", "self._behind, self._behind,"),
            Mutation("_Worker.turn", " and (now := time.monotonic()) >= self._anew_at", " and (now := 1e9)"),
            Mutation("_Worker._answer", " and not stream.is_answering", ""),
            Mutation("_Worker._poll", "stream.joins in ready and stream.take_joins()", "False"),
            Mutation("_Worker._poll", "max(self._anew_at, started + _JOIN_S)", "started"),
            Mutation("_Worker.turn", "self._begin_anew()", "pass", [_EVENTS]),
            Mutation("_Worker.turn", "told, self._untold = self._untold, []", "told = []", [_EVENTS]),
            Mutation("_Worker.run", "self._behind = True", "pass"),
            Mutation("_Worker.run", "stream.send([AllBlocksCleared()])", "pass", [_EVENTS]),
            Mutation(
                "_Worker._begin_anew", "self._book, self._behind = self._book.begun_anew(), True", "self._behind = True"
            ),
            Mutation("_Worker.catch_up", "self._untold += ", "", [_EVENTS]),
            Mutation("_Worker.catch_up", "self._take(_ENTRIES_OF_LOOP)", "self._take(len(entries))", [_EVENTS]),
            Mutation("_Worker.catch_up", "self._untold, self._behind = [], True", "pass", [_EVENTS]),
            Mutation("_Worker.catch_up", "entries.clear()", "pass", [_EVENTS]),
            Mutation("_Worker.catch_up", "self._lost = True", "pass", [_EVENTS]),
            Mutation("_Worker._poll", "self._replay_at = now +", "self._replay_at = 0 * now -"),
        ],
    ),
)
