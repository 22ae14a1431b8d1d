from __future__ import annotations

import pytest

from kvcache.errors import KVCacheError
from transfer import errors


@pytest.mark.parametrize("name", [name for name in vars(errors) if name.endswith("Error")])
def test_every_error_is_of_the_tree_and_reads_as_a_sentence(name: str):
    kind = getattr(errors, name)
    error = kind("page 7 of engine 'e'")
    assert isinstance(error, KVCacheError)
    assert not isinstance(error, AssertionError)
    assert str(error) == "page 7 of engine 'e'"


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("InvalidEngineError", ValueError),
        ("InvalidTransferError", ValueError),
        ("MetadataError", ValueError),
        ("SettingsMismatchError", ValueError),
        ("AlreadyConnectedError", ValueError),
        ("TransferIncompleteError", ValueError),
        ("UnknownPeerError", KeyError),
        ("UnknownPeerError", ValueError),
        ("UnknownTransferError", KeyError),
        ("TransferTimeoutError", TimeoutError),
        ("PeerFailedError", ConnectionError),
        ("NoFreePortError", RuntimeError),
    ],
)
def test_errors_are_the_builtins_that_callers_catch(name: str, builtin: type[Exception]):
    assert issubclass(getattr(errors, name), builtin)
