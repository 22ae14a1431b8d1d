"""One secret for a fleet, and the list of who may be contacted, between two exchanges over real sockets and NIXL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from scheduler_adapters.service.exchange import Exchange
from tests.scheduler_adapters.service.test_ownership import MINE, Reader, Side, leased, manager_of
from transfer.errors import InvalidEngineError, MetadataError
from transfer.pull import directory
from transfer.pull.replica import Source
from transfer.wire.keys import make_keyrings
from transfer.wire.messages import MetadataQuery, encode_message, open_rank

SECRET, OTHER = "the secret of one fleet", "the secret of another one"
QUICK = {"handshake_timeout_s": 1.0}


@pytest.fixture
def side() -> Iterator[Callable[..., Any]]:
    made: list[Side] = []

    def make(kind: type[Side], name: str, **options: Any) -> Side:
        made.append(kind(name, exchange={"replica_options": QUICK, **options}))
        return made[-1]

    yield make
    for one in made:
        one.exchange.close()
        one.manager.close()


def test_with_one_secret_sockets_and_metadata_have_keys_and_nobody_is_asked_to_vouch(
    side: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(directory, "is_vouched", lambda _: pytest.fail("asked, with keys"))
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    source, reader = side(Side, "p", secret=SECRET), side(Reader, "d", secret=f"file:{path}")
    lease, context, pending = leased(source, reader)
    event, proof = reader.pull(source, lease, pending)
    assert event.error == ""
    reader.manager.commit_import(context, pending, proof)
    assert reader.values(pending) == {MINE}
    (rank,) = source.exchange._threads[0].call(lambda replica: replica.ranks)
    with pytest.raises(MetadataError, match="another key"):
        open_rank(rank.metadata)
    plain = zmq.Context.instance().socket(zmq.DEALER)
    plain.setsockopt(zmq.LINGER, 0)
    plain.connect(source.exchange.address)
    plain.send(encode_message(MetadataQuery(query_id=1, engine_id="p/0", compatibility={})))
    assert not plain.poll(500)
    plain.close()


@pytest.mark.parametrize(
    ("source_s", "reader_s", "said"),
    [
        (SECRET, OTHER, "in time (who has other keys than ours, or none, gives none)"),
        ("", SECRET, "in time (who has other keys than ours, or none, gives none)"),
        (SECRET, "", "no answer from"),
    ],
)
def test_with_another_secret_or_on_one_side_alone_a_pull_fails_and_says_so(
    side: Any, source_s: str, reader_s: str, said: str
) -> None:
    source, reader = side(Side, "p", secret=source_s), side(Reader, "d", secret=reader_s)
    lease, _, pending = leased(source, reader)
    event, proof = reader.pull(source, lease, pending)
    assert event.error.startswith("handshake with engine 'p/0'")
    assert source.exchange.address in event.error
    assert said in event.error
    assert SECRET not in event.error
    assert proof is None
    reader.manager.cancel_import(pending)


@pytest.mark.parametrize(("allowed", "said"), [((), "outside of allowed_peers"), (("10.2.0.0/16",), "no answer from")])
def test_only_who_is_listed_is_contacted(side: Any, allowed: tuple[str, ...], said: str) -> None:
    source, reader = side(Side, "p"), side(Reader, "d", allowed_peers=allowed)
    lease, _, pending = leased(source, reader)
    away = Source("tcp://10.2.255.1:9", "p/0", lease, source.exchange.incarnation)
    reader.exchange.open_pull(0, "k", away, 20.0)
    reader.exchange.read(0, "k", pending, last=True)
    event, _ = reader.end(source)
    assert said in event.error
    assert "10.2.255.1" in event.error
    reader.manager.cancel_import(pending)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"secret": "short"}, "has 5 bytes, at least 16 are needed"),
        ({"secret": "env:NO_SUCH_VARIABLE"}, "no environment variable 'NO_SUCH_VARIABLE'"),
        ({"secret": SECRET, "keyring": make_keyrings(1)[0]}, "exchange 'p': a keyring beside a shared secret"),
        ({"allowed_peers": ["10.0.0.0/33"]}, "allowed_peers"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidEngineError, match=message):
        Exchange(manager_of(), "p", **options)
