"""An exchange refuses wrong arguments. The refusal names the argument, its value and the limit, and leaves no thread or
file behind.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache.errors import InvalidRequestError, KVCacheError
from kvcache.replica.block_table import PageDigests
from tests.alone import alone, open_files
from tests.transfer.pull.test_ownership import Side
from transfer.errors import AgentError, HandshakeError, InvalidEngineError, InvalidLeaseError
from transfer.memory import MemoryType
from transfer.nixl.agent import Agent
from transfer.pull import exchange
from transfer.pull.exchange import PageExchange
from transfer.pull.lease import LeaseRef
from transfer.pull.source import Source

SOURCE = Source("tcp://127.0.0.1:9", "p/0", LeaseRef(1, 0, 5.0))
PENDING = SimpleNamespace(replica_idx=0, request_id="r")
FOREIGN = SimpleNamespace(replica_idx=3, request_id="r")
DIGESTS = PageDigests(4, "sha256", bytes(32))


@pytest.fixture(scope="module")
def side() -> Iterator[Side]:
    made = Side("p", shards=2)
    yield made
    made.exchange.close()
    made.manager.close()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"manager": None}, "manager is None: a manager with a cache's pages is needed"),
        ({"manager": "m"}, "manager is 'm': a manager"),
        ({"name": ""}, "name is '': a string of 1 to 240 characters is needed"),
        ({"name": 7}, "name is 7: a string of 1 to 240 characters"),
        ({"name": "x" * 241}, "a string of 1 to 240 characters"),
        ({"bind": None}, "exchange 'q': bind is None: a string is needed"),
        ({"bind": b"tcp://127.0.0.1:0"}, "bind is b'tcp://127.0.0.1:0': a string"),
        ({"compatibility": "model"}, "compatibility is 'model': a mapping from strings to strings is needed"),
        ({"compatibility": {"model": 7}}, "compatibility is {'model': 7}: a mapping from strings"),
        ({"compatibility": {7: "model"}}, "compatibility is {7: 'model'}"),
        ({"replica_options": 5.0}, "replica_options is 5.0: a dict of options is needed"),
        (
            {"replica_options": {"idle": 1.0}},
            "replica_options has 'idle', which is no option: the options are handshake_timeout_s, heartbeat_s, ",
        ),
        ({"replica_options": {"idle_s": "1"}}, "replica_options['idle_s'] is '1': a finite number is needed"),
        ({"replica_options": {"idle_s": 0}}, "replica_options['idle_s'] is 0: more than 0 seconds are needed"),
        ({"replica_options": {"timed": 1}}, "replica_options['timed'] is 1: True or False is needed"),
        ({"verify": "yes"}, "verify is 'yes': True or False is needed"),
        ({"agent": None}, "agent is None: a function"),
        ({"keyring": "file:keys"}, "keyring is a str: a Keyring or None is needed"),
        ({"secret": b"0123456789abcdef"}, "secret is a bytes: a string is needed"),
        ({"secret": "short"}, "the shared secret has 5 bytes; at least 16"),
        ({"allowed_peers": "10.0.0.0/8"}, "allowed_peers is '10.0.0.0/8': a list of strings is needed"),
        ({"allowed_peers": [7]}, "allowed_peers is [7]: a list of strings"),
        ({"allowed_peers": ["a b"]}, "allowed_peers: 'a b' is not a host name"),
        ({"lend": 1.5}, "lend is 1.5: a number from 0.0 to 1.0 is needed"),
        ({"lend": "all"}, "lend is 'all': a number from 0.0 to 1.0"),
        ({"lend": float("nan")}, "lend is nan"),
    ],
)
def test_wrong_arguments_of_the_constructor_make_nothing(side: Side, wrong: dict[str, Any], said: str) -> None:
    def makes_nothing() -> None:
        before = open_files()
        given: dict[str, Any] = {"manager": side.manager, "name": "q"} | wrong
        with pytest.raises(InvalidEngineError) as raised:
            PageExchange(given.pop("manager"), given.pop("name"), **given)
        assert said in str(raised.value)
        assert "0123456789abcdef" not in str(raised.value)
        assert threading.enumerate() == [threading.current_thread()]
        assert open_files() == before

    alone(makes_nothing)


def test_a_shard_or_an_endpoint_that_fails_leaves_nothing(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HandshakeError, match="cannot bind"):
        PageExchange(side.manager, "q", bind="tcp://203.0.113.7:1")
    made: list[Agent] = []

    def second_fails(name: str, kind: MemoryType) -> Agent:
        if name.startswith("q/0/1@"):
            raise AgentError("refused by the test")
        made.append(Agent(name, kind))
        return made[-1]

    before = threading.enumerate()
    with pytest.raises(AgentError, match="refused by the test"):
        PageExchange(side.manager, "q", agent=second_fails)
    assert made
    assert not any(agent.is_open for agent in made)
    assert set(threading.enumerate()) <= set(before)
    made.clear()
    monkeypatch.setattr(exchange, "ReplicaTransfer", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        PageExchange(side.manager, "r", agent=lambda *given: made.append(Agent(*given)) or made[-1])
    assert made
    assert not any(agent.is_open for agent in made)


@pytest.mark.parametrize(
    ("call", "given", "error", "said"),
    [
        *(
            (call, (bad, *rest), InvalidRequestError, f"replica is {bad!r}: an integer from 0 to 0 is needed")
            for call, rest in (
                ("ask", ("k", "tcp://127.0.0.1:9", "p/0", DIGESTS)),
                ("refuse", (SOURCE, "why")),
                ("open_pull", ("k", SOURCE, 1.0)),
                ("read", ("k", PENDING)),
                ("cancel_pull", ("k", "why")),
                ("record_checksums", ([[1]],)),
                ("wait", (0.0,)),
                ("engine_id", ()),
            )
            for bad in (-1, 1, "0", None, True)
            if call != "record_checksums"  # Without page checks, it does not use its arguments.
        ),
        ("ask", (0, 7, "tcp://127.0.0.1:9", "p/0", DIGESTS), InvalidRequestError, "key is 7: a string is needed"),
        ("ask", (0, "k", None, "p/0", DIGESTS), InvalidRequestError, "address is None: a string"),
        ("ask", (0, "k", "tcp://127.0.0.1:9", 5, DIGESTS), InvalidRequestError, "engine_id is 5: a string"),
        (
            "ask",
            (0, "k", "tcp://127.0.0.1:9", "p/0", b"digests"),
            InvalidRequestError,
            "wanted is b'digests': a result",
        ),
        ("ask", (0, "k", "tcp://127.0.0.1:9", "p/0", DIGESTS, "5"), InvalidRequestError, "timeout_s is '5': a finite"),
        ("refuse", (0, None, "why"), InvalidLeaseError, "source is None: a Source is needed"),
        ("refuse", (0, SOURCE, None), InvalidRequestError, "reason is None: a string"),
        ("offer", ("r", "30"), InvalidLeaseError, "duration_s is '30': a finite number is needed"),
        ("start_clock", ("r",), InvalidLeaseError, "source is 'r': a Source is needed"),
        ("revoke", (("r", 7), "why"), InvalidLeaseError, "source is ('r', 7): a Source"),
        ("revoke", (SOURCE._replace(lease=(1, 0, 5.0)), "why"), InvalidLeaseError, "a Source is needed"),  # type: ignore[arg-type]
        ("revoke", (SOURCE, 7), InvalidLeaseError, "reason is 7: a string"),
        ("pull", (7, SOURCE, PENDING, 1.0), InvalidRequestError, "key is 7: a string"),
        ("pull", ("k", "p", PENDING, 1.0), InvalidRequestError, "source is 'p': a Source"),
        ("pull", ("k", [SOURCE, None], PENDING, 1.0), InvalidRequestError, "source[1] is None: a Source"),
        ("pull", ("k", SOURCE, None, 1.0), InvalidRequestError, "pending is None: an open import of this manager"),
        (
            "pull",
            ("k", SOURCE, FOREIGN, 1.0),
            InvalidRequestError,
            "an open import",
        ),
        ("pull", ("k", SOURCE, PENDING, None), InvalidRequestError, "timeout_s is None: a finite number"),
        ("open_pull", (0, 7, SOURCE, 1.0), InvalidRequestError, "key is 7: a string"),
        ("open_pull", (0, "k", 7, 1.0), InvalidRequestError, "source is 7: a Source"),
        ("open_pull", (0, "k", SOURCE, "1"), InvalidRequestError, "timeout_s is '1'"),
        ("read", (0, "k", "r"), InvalidRequestError, "pending is 'r'"),
        ("read", (0, ["k"], PENDING), InvalidRequestError, "key is ['k']: a string"),
        ("cancel_pull", (0, "k", None), InvalidRequestError, "reason is None: a string"),
        ("cancel_pull", (0, None, "why"), InvalidRequestError, "key is None: a string"),
        ("wait", (0, "1"), InvalidRequestError, "timeout_s is '1': a finite number"),
    ],
)
def test_wrong_arguments_of_a_call_change_nothing(
    side: Side, call: str, given: tuple[Any, ...], error: type[KVCacheError], said: str
) -> None:
    options = {"last": True} if call == "read" else {}
    with pytest.raises(error) as raised:
        getattr(side.exchange, call)(*given, **options)
    assert said in str(raised.value)
    assert not side.exchange.open_pulls
    assert not side.exchange._asks._open
    assert len(side.exchange._words[0]._free) == len(side.exchange._words[0].words)
    assert side.exchange.poll() == []  # The poll succeeds, because the thread of the exchange still runs.
    side.exchange.threads[0].snapshot()
