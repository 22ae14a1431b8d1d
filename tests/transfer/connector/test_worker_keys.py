"""`secret` and `allowed_peers` of a worker's config, over real sockets and NIXL."""

from __future__ import annotations

from typing import Any

import pytest

from tests.transfer.connector.test_worker import a_pair, load, offer
from tests.transfer.pair_ranks import run_until, transfer
from transfer.errors import MetadataError
from transfer.wire.messages import open_rank

SECRET, OTHER = "the secret of one fleet", "the secret of another one"


def test_engines_of_one_secret_read_from_each_other(engine: Any) -> None:
    source, reader = engine("p", secret=SECRET), engine("d", secret=SECRET)
    pair = a_pair()
    transfer(pair, source, reader)
    assert (reader.failed, source.sent) == ({}, {"r": "read"})
    assert reader.call("compare", pair) == [[]]
    with pytest.raises(MetadataError, match="another key"):
        open_rank(source.ranks[0].host.worker.get_handshake_metadata())


def test_with_another_secret_a_load_fails_with_that_reason(engine: Any) -> None:
    source, reader = engine("p", secret=SECRET), engine("d", secret=OTHER)
    pair = a_pair()
    load(reader, pair, offer(source, pair))
    run_until(lambda: "r" in reader.failed, source, reader)
    assert "s; a peer with other keys, or without keys, never answers" in reader.failed["r"]
    assert SECRET not in reader.failed["r"]


@pytest.mark.parametrize(("allowed", "said"), [((), "is not in allowed_peers"), (("10.2.0.0/16",), "no answer from")])
def test_only_listed_hosts_are_contacted(engine: Any, allowed: tuple[str, ...], said: str) -> None:
    source, reader = engine("p"), engine("d", allowed_peers=allowed)
    pair = a_pair()
    params = offer(source, pair) | {"remote_host": "10.2.255.1"}
    load(reader, pair, params)
    run_until(lambda: "r" in reader.failed, source, reader)
    assert said in reader.failed["r"]
    assert "10.2.255.1" in reader.failed["r"]
