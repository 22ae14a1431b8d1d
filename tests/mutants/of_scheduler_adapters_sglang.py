"""Mutations of what SGLang's prefill and decode say to each other: leases, pulls, rooms and ranks."""

from tests.mutants.mutation import Module, Mutation

_ROOMS = "tests/scheduler_adapters/sglang/test_rooms.py"
_LEASES = "tests/scheduler_adapters/sglang/test_leases.py"

SCHEDULER_ADAPTERS_SGLANG: tuple[Module, ...] = (
    Module(
        "scheduler_adapters.sglang.leases",
        [_ROOMS],
        [
            Mutation("_over", "if error", "if not error"),
            Mutation("_tell_end", 'if reason == "read":', "if reason:"),
            Mutation("RoomLeases.open", "self._unopened.pop(room, None)", "pass"),
            Mutation("RoomLeases.close", "while known.offered:", "while False:"),
            Mutation("RoomLeases.close", "self._scheduler.abort(str(room), reason)", "pass"),
            Mutation("RoomLeases.close", "if not isinstance(known.answer, RoomReady):", "if known:"),
            Mutation("RoomLeases.close", "self._failed[room] = reason", "pass"),
            Mutation("RoomLeases.step", "self._waiting.remove(room)", "pass"),
            Mutation("RoomLeases.step", "self._leader.tell(metadata)", "pass"),
            Mutation("RoomLeases._hear_decode", 'known.dropped = ""', "pass"),
            Mutation("RoomLeases._hear_decode", "if known.answer is not None:", "if room < 0:"),
            Mutation("RoomLeases._tell_wishes", "elif known.readers:", "else:"),
            Mutation("RoomLeases._forget_unopened", "now - since < self._expect_s", "now < since"),
            Mutation("RoomLeases._forget_unopened", "now - since < self._expect_s", "since < now"),
            Mutation("FollowerLeases.offer", "self._computed.add(room)", "pass"),
            Mutation("FollowerLeases.close", "while room in self._offered:", "while False:"),
            Mutation("FollowerLeases.step", "if int(name) in self._computed", "if name"),
            Mutation("FollowerLeases.step", "ended.sent[name] = metadata", "metadata"),
            Mutation("FollowerLeases.step", "metadata.reqs_to_send = {}", "pass"),
        ],
    ),
    Module(
        "scheduler_adapters.sglang.pulls",
        [_ROOMS, _LEASES],
        [
            Mutation("RoomPulls.is_over", "and known.is_loading", "and known.is_held"),
            Mutation("RoomPulls.step", "known.endpoint == endpoint and", "known.endpoint != endpoint and"),
            Mutation("RoomPulls._hold", "self._scheduler.hold(known.key, wanted)", "pass"),
            Mutation("RoomPulls._begin", "firsts[-1] + len(blocks) != end or", "False or"),
            Mutation("RoomPulls._begin", "end - len(blocks) if first is None else first", "end - len(blocks)"),
            Mutation("RoomPulls._received", "del self._rooms[known.room]", "pass"),
            Mutation("RoomPulls._drop", "self._scheduler.cancel(known.key, reason)", "pass"),
            Mutation("RoomPulls._drop", "if not is_told:", "if is_told:"),
        ],
    ),
    Module(
        "scheduler_adapters.sglang.ranks",
        [_ROOMS],
        [
            Mutation("RankLeader.tell", "self._unsaid.append(data)", "pass"),
            Mutation("RankLeader.heard", "not hmac.compare_digest(message.token, self._token) or ", ""),
            Mutation("RankLeader.heard", "not 0 < message.rank < self._ranks", "not 0 <= message.rank < self._ranks"),
            Mutation("RankLeader.heard", "not 0 < message.rank < self._ranks", "message.rank < 1"),
            Mutation("RankFollower.__init__", "self.report(WorkerOutput())", "pass"),
        ],
    ),
    Module(
        "scheduler_adapters.sglang.rooms",
        [_LEASES, "tests/scheduler_adapters/sglang/test_ranks.py"],
        [
            Mutation("short", "reason[:_MAX_REASON]", "reason"),
            Mutation("endpoint", 'if ":" in host', "if not host"),
            Mutation("RoomServer.received", "self.malformed += 1", "pass"),
            Mutation("RoomClient._connect", "self._allowed.check(address)", "pass"),
            Mutation("RoomClient.lost", "del self._connections[address]", "pass"),
        ],
    ),
)
