"""Some settings must be equal on both sides. They are compared with each rank of the remote engine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.transfer.fuzz import rank_metadata
from transfer.errors import HandshakeError, MetadataError, SettingsMismatchError
from transfer.pull.remote import RemoteEngine

MINE = rank_metadata(0, "d")


def remote(rank: int, **changes: Any) -> RemoteEngine:
    """Returns an engine of two ranks, one of which is changed."""
    ranks = [rank_metadata(0), rank_metadata(1)]
    ranks[rank] = msgspec.structs.replace(ranks[rank], **changes)
    return RemoteEngine(ranks, MINE, {})


def test_ranks_with_equal_settings_form_an_engine() -> None:
    assert remote(1).engine_id == "p"


@pytest.mark.parametrize("rank", [0, 1])
def test_settings_are_compared_with_every_rank_of_an_engine(rank: int) -> None:
    where = f"engine 'p' rank {rank} "
    settings = MINE.settings | {"UCX_TLS": "tcp"}
    with pytest.raises(SettingsMismatchError, match=f"{where}has other UCX or NIXL settings: UCX_TLS: 'tcp'"):
        remote(rank, settings=settings)
    with pytest.raises(SettingsMismatchError, match=f"{where}has other .* nixl: None at the source"):
        remote(rank, settings={key: value for key, value in MINE.settings.items() if key != "nixl"})
    with pytest.raises(HandshakeError, match=f"{where}is not compatible: model: 'm' at the source, None at the reader"):
        remote(rank, compatibility={"model": "m"})
    with pytest.raises(MetadataError, match=f"{where}is on host 'elsewhere'"):
        remote(rank, hostname="elsewhere")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_has_the_lease_words_that_all_of_its_ranks_have(rank: int) -> None:
    fewest = remote(1 - rank).words - 3
    assert remote(rank, words=fewest).words == fewest
