from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvcache import InvalidParamsError, TextContext
from kvcache.endpoints.reset import ResetEndpoint
from tests.kvcache.build import run_once


def test_a_reset_message_makes_the_next_fetch_forget_cached_pages(make: Any, tmp_path: Path) -> None:
    base = f"ipc://{tmp_path}/pw"
    manager = make(16, page_size=4, zmq_endpoint_base=base)
    run_once(manager, range(9))
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(f"{base}-reset_prefix_cache")
        push.send(b"anything")
        probe = TextContext(range(9), 64)
        assert manager.get_or_recommend_replica(probe) == 0
        deadline = time.monotonic() + 5
        while manager._replicas.each[0].pool.idle.count and time.monotonic() < deadline:
            manager.fetch([])
    assert manager._replicas.each[0].pool.idle.count == 0
    manager.external_claim(probe.request_id)
    assert manager.maybe_reserve(probe)
    assert probe.start_idx == 0
    assert [run_once(manager, range(20, 29)) for _ in range(2)] == [0, 8], "one message causes one reset"


def test_an_address_that_cannot_be_bound_is_named(make: Any) -> None:
    with pytest.raises(InvalidParamsError, match="zmq_endpoint_base 'ipc:///no/such/folder/x'"):
        make(4, zmq_endpoint_base="ipc:///no/such/folder/x")


def listens() -> bool:
    return any(thread.name == "pagewire-reset" for thread in threading.enumerate())


def test_closing_twice_is_fine_and_frees_the_address(make: Any, tmp_path: Path) -> None:
    base = f"ipc://{tmp_path}/pw"
    manager = make(4, zmq_endpoint_base=base)
    assert listens()
    for _ in range(2):
        manager.close()
        assert not listens()
    make(4, zmq_endpoint_base=base).close()


def test_a_close_in_a_forked_process_does_not_end_the_thread_of_its_parent(tmp_path: Path) -> None:
    endpoint = ResetEndpoint(f"ipc://{tmp_path}/pw")
    if not (child := os.fork()):
        try:
            endpoint.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    endpoint._thread.join(0.3)
    assert endpoint._thread.is_alive()
    endpoint.close()
    assert not listens()


def test_without_caching_no_socket_is_opened_and_the_log_says_so(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(4, caching=False, zmq_endpoint_base=f"ipc://{tmp_path}/pw")
    assert "zmq_endpoint_base has no effect, because prefix caching is off" in caplog.messages
    assert [*tmp_path.iterdir()] == []
