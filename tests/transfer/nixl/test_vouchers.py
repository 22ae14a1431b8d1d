"""A process on this host vouches for its agent's metadata, and the kernel identifies the process."""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from transfer.errors import AgentError
from transfer.nixl import vouchers
from transfer.nixl.vouchers import Voucher, is_vouched

NOBODY = 65534
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def metadata() -> bytes:
    return secrets.token_bytes(300)


@pytest.fixture
def voucher(metadata: bytes) -> Iterator[Voucher]:
    one = Voucher(metadata)
    yield one
    one.close()


def test_metadata_is_vouched_for_byte_by_byte_until_the_end(metadata: bytes, voucher: Voucher) -> None:
    assert is_vouched(metadata)
    for at in range(len(metadata)):
        assert not is_vouched(metadata[:at] + bytes([metadata[at] ^ 1]) + metadata[at + 1 :])
    voucher.close()
    voucher.close()
    assert not is_vouched(metadata)


def test_the_name_of_a_living_voucher_cannot_be_taken(metadata: bytes, voucher: Voucher) -> None:
    with pytest.raises(AgentError, match="vouching for 300 bytes of metadata: .*in use"):
        Voucher(metadata)
    voucher.poll()
    assert is_vouched(metadata)


def test_earlier_askers_leave_room_for_others(metadata: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vouchers, "_WAITING", 3)
    one = Voucher(metadata)
    while is_vouched(metadata):
        pass
    for _ in range(vouchers._EVERY):
        one.poll()
    assert is_vouched(metadata)
    one.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_vouches_for_nothing(metadata: bytes) -> None:
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        os.setuid(NOBODY)
        voucher = Voucher(metadata)
        os.write(tell, b"1")
        while True:
            voucher.poll()
    assert os.read(ready, 1) == b"1"
    try:
        assert not is_vouched(metadata)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)


def test_a_process_in_another_network_namespace_counts_as_on_another_host(metadata: bytes) -> None:
    """A container may share memory with its peer but have its own network. A peer could reach the container's agents
    through shared memory. The peer cannot reach the vouchers of the agents, because the sockets of the vouchers belong
    to another network.
    """
    with ThreadPoolExecutor(1) as elsewhere:  # The single thread of the pool gets its own network namespace.
        if elsewhere.submit(_LIBC.unshare, _CLONE_NEWNET).result():
            pytest.skip("the kernel gives this process no network of its own")
        voucher = elsewhere.submit(Voucher, metadata).result()
        assert elsewhere.submit(is_vouched, metadata).result()
        assert not is_vouched(metadata)
        voucher.close()
