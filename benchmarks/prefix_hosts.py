"""A fleet in which each server has its own host, behind links of a given rate (`tests.hosts.network`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import msgspec

from scheduler_adapters.service.fleet import Fleet
from scheduler_adapters.service.server import ServerConfig
from tests.hosts.network import IPV4, Host, network

WORKER = (sys.executable, "-m", "benchmarks.prefix_worker")


class HostedFleet(Fleet):
    """The servers of `benchmarks.prefix_worker`. They exchange files with their parent, and use TCP with each other.

    Args:
        configs: one for each server, with its name.
        rate: rate of each link, in the notation of `tc`.

    Attributes:
        hosts: the name of each server's host.
    """

    def __init__(self, configs: Sequence[ServerConfig], rate: str) -> None:
        self._rate = rate
        self._names = [config.name for config in configs]
        self.hosts: dict[str, Host] = {}
        self._links = ExitStack()
        allowed = (IPV4.peers,)
        super().__init__([msgspec.structs.replace(one, allowed_peers=allowed) for one in configs], WORKER, curve=True)

    def __enter__(self) -> Self:
        for host in self._links.enter_context(network(*self._names)):
            host.shape(self._rate)
            self.hosts[host.name] = host
        try:
            return super().__enter__()
        except BaseException:
            self._links.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._links:
            super().__exit__(kind, error, trace)

    def _filled_in(self, config: ServerConfig) -> ServerConfig:
        at = self.hosts[config.name].address
        return msgspec.structs.replace(super()._filled_in(config), handshake=f"tcp://{at}:0")

    def _start_one(self, name: str) -> None:
        variables = ("UCX_TLS=tcp,self", "UCX_NET_DEVICES=net0")
        self._program = self.hosts[name].command("env", *variables, *WORKER)
        super()._start_one(name)
