"""Our source: a process with its own manager and exchange. It computes prompts and lends their pages.

Run `python -m benchmarks.rivals.lender SETTING`, with a `Setting` as JSON. Each line of standard input is a JSON array:
a method of `Lender`, and its arguments. Each answer is a line of standard output.
"""

from __future__ import annotations

import json
import logging
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Self

import msgspec
import numpy as np
import torch

from benchmarks.pools import LONGEST, Prompts, compute, expect, reserve, running
from kvcache import KVCacheParams, PagedKVCacheManager, TextContext
from transfer import PageExchange, Source

PAGE_SIZE = 16
NAME = "lender"
_LAYER_BYTES = 16 << 10  # the bytes of a layer in a page: two sides, 4 heads, 16 tokens, 64 elements of two bytes
_ROWS = 1024
_EVICTING = 32  # pages of each of the prompts that are computed to evict others
_POLL_S = 1e-3
_LONGEST_S = 30.0
_SUBNETS = ("10.213.7.0/24",)  # the subnets of the hosts in `tests.hosts.network`


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that both sides share.

    Attributes:
        page_bytes: bytes of a page; a multiple of 16 KiB.
        pool_bytes: bytes of the source's pool. The reader's pool is half as large, so that it evicts a prompt before it
            fetches that prompt again.
        scattered: whether pages that are allocated consecutively lie at random places in both pools.
        address: address of the source.
        reader: address of the reader.
        secret: secret for the sockets if the sides are on two hosts; empty otherwise.
    """

    page_bytes: int = 64 << 10
    pool_bytes: int = 512 << 20
    scattered: bool = True
    address: str = "127.0.0.1"
    reader: str = "127.0.0.1"
    secret: str = ""

    @property
    def pages(self) -> int:
        """The number of pages in the source's pool."""
        return self.pool_bytes // self.page_bytes


def quiet() -> None:
    """Suppress the warning that a longest request would not fit. Pools are small on purpose."""
    logging.getLogger("pagewire").setLevel(logging.ERROR)


def tokens_of(number: int, pages: int) -> np.ndarray:
    """The tokens of a prompt that fills this many pages, plus one token. No two prompts share a page."""
    tokens = np.arange(pages * PAGE_SIZE + 1, dtype=np.int32)
    tokens[0] = number
    return tokens


def stamp_of(number: int, column: int) -> int:
    """The 16-bit value of all elements of a page. Adjacent pages have different values."""
    return (number * 7919 + column * 31) % 32_749


def manager_of(setting: Setting, pages: int) -> PagedKVCacheManager:
    """A manager with `pages` pages."""
    layers, rest = divmod(setting.page_bytes, _LAYER_BYTES)
    expect(layers > 0 and not rest, f"pages are of multiples of {_LAYER_BYTES} bytes, not {setting.page_bytes}")
    params = KVCacheParams(torch.bfloat16, n_kv_heads=4, head_dim=64, page_size=PAGE_SIZE, enable_prefix_caching=True)
    memory = pages * setting.page_bytes
    return PagedKVCacheManager(params, _ROWS, LONGEST, layers, ["cpu"], available_cache_memory=memory)


def exchange_of(setting: Setting, manager: PagedKVCacheManager, name: str, address: str) -> PageExchange:
    """The manager's exchange, which may lend all pages."""
    bind = f"tcp://{address}:0"
    return PageExchange(manager, name, bind=bind, secret=setting.secret, allowed_peers=_SUBNETS, lend=1.0)


def use_up(manager: PagedKVCacheManager, prompts: Prompts, *, scattered: bool) -> None:
    """Fills the pool with prompts of one page.

    Later reservations evict these prompts in the order in which they came, or in random order if `scattered`.
    """
    rng = np.random.default_rng(1)
    for first in range(0, manager.total_num_pages, _ROWS):
        count = min(_ROWS, manager.total_num_pages - first)
        contexts = running(manager, prompts, [PAGE_SIZE] * count)
        for at in rng.permutation(count) if scattered else range(count):
            manager.release(contexts[at].request_id)


class Lender:
    """The source."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._prompts = Prompts()
        self.manager = manager_of(setting, setting.pages)
        self.exchange = exchange_of(setting, self.manager, NAME, setting.address)
        self._others = 1 << 20  # numbers of prompts that no reader asks for begin here

    def contact(self) -> tuple[str, str]:
        """The address of the source, and the id of the engine at that address."""
        return self.exchange.address, self.exchange.engine_id(0)

    def lay_out(self, count: int, pages: int) -> None:
        """Computes prompts 0 to `count - 1`. Afterwards only these are cached."""
        deadline = time.monotonic() + _LONGEST_S
        while self.manager.num_leased_blocks:  # the last reader's "done" notification may still be in flight
            self.exchange.poll()
            time.sleep(_POLL_S)
            expect(time.monotonic() < deadline, "leases that were read are over")
        self.manager.reset_prefix_cache()
        use_up(self.manager, self._prompts, scattered=self._setting.scattered)
        for number in range(count):
            self._compute(number, pages)

    def _compute(self, number: int, pages: int) -> None:
        context = TextContext(tokens_of(number, pages)[:-1], LONGEST)
        pool = self.manager.device_tensors[0][0]
        with self.manager.claim(context):
            reserve(self.manager, context)
            for column, page in enumerate(self.manager.get_req_blocks(context.request_id)):
                pool[page].view(torch.int16).fill_(stamp_of(number, column))
            compute(self.manager, context)

    def evict(self) -> int:
        """Evicts every prompt, by computing others in all available pages. Returns the number of these pages."""
        self.manager.reset_prefix_cache()
        free = self.manager.total_num_pages - self.manager.num_held_blocks
        for _ in range(free // _EVICTING):
            self._others += 1
            self._compute(self._others, _EVICTING)
        return free // _EVICTING * _EVICTING

    def revoke(self, source: str) -> None:
        """End a lease that its reader already knows."""
        self.exchange.revoke(msgspec.msgpack.decode(bytes.fromhex(source), type=Source), "revoked")

    def held(self) -> int:
        """The number of held pages, after a `check` of the manager."""
        self.manager.check()
        return self.manager.num_held_blocks

    def listen(self) -> int:
        """Open a bare socket that sends as many bytes as its peer asks for. Returns its port."""
        server = socket.create_server((self._setting.address, 0))
        threading.Thread(target=_send_bytes, args=(server,), daemon=True).start()
        return server.getsockname()[1]

    def serve(self) -> None:
        """Carry out commands until standard input is closed. Between commands, lend pages to readers that ask."""
        _say("ready")
        while True:
            self.exchange.poll()
            ready = select.select([sys.stdin, self.exchange.bell], [], [], _POLL_S)[0]
            if sys.stdin in ready:
                line = sys.stdin.readline()
                if not line:
                    return
                name, *arguments = json.loads(line)
                _say(getattr(self, name)(*arguments))


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _send_bytes(server: socket.socket) -> None:
    connection, _ = server.accept()
    data = bytes(1 << 20)
    with connection:
        while asked := connection.recv(8):
            left = int.from_bytes(asked, "big")
            while left:
                left -= connection.send(data[: min(left, len(data))])


class LenderProcess:
    """Starts and stops the source; a context manager. Its call takes the name of a `Lender` method and arguments.

    Args:
        setting: the settings that both sides share.
        prefix: a command that runs the source's command, for example on another host.
    """

    def __init__(self, setting: Setting, prefix: Sequence[str] = ()) -> None:
        command = [*prefix, sys.executable, "-m", "benchmarks.rivals.lender", msgspec.json.encode(setting).decode()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 - ours
        expect(self.answer() == "ready", "the source starts")

    def say(self, *command: object) -> None:
        """Sends a command."""
        if self._process.stdin is None:
            raise RuntimeError("the source process has no standard input")
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """The answer to the last command."""
        line = b"" if self._process.stdout is None else self._process.stdout.readline()
        expect(bool(line), "the source lives")
        return json.loads(line)

    def __call__(self, *command: object) -> Any:
        """Sends a command, and waits for the answer."""
        self.say(*command)
        return self.answer()

    def cpu_ns(self) -> int:
        """The processor time of all threads of the source so far."""
        # the kernel's id of the clock of a process
        return time.clock_gettime_ns(~self._process.pid << 3 | 2)

    def kill(self) -> None:
        """Kills the source with SIGKILL."""
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()  # the process exits when its standard input is closed
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def main() -> None:
    """Serve."""
    quiet()
    torch.set_num_threads(1)
    lender = Lender(msgspec.json.decode(sys.argv[1], type=Setting))
    lender.serve()
    lender.exchange.close()
    lender.manager.close()


if __name__ == "__main__":
    main()
