"""Hosts on one machine.

Each host has its own network, name and shared memory, and a link that can be cut and slowed. A host is a network
namespace. Its programs also have their own UTS and IPC namespaces. The links end in a bridge, which is in a further
namespace. A link is cut at the bridge, so that the host does not notice: its own end stays up, as behind a failed
switch. Relayed hosts have one bridge each, and a program carries frames between the bridges, delays them and drops
some.
"""

import array
import ctypes
import fcntl
import itertools
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from kvcache.endpoints.addresses import in_endpoint


class Family(NamedTuple):
    """The addresses of a network's hosts, by the number of the host."""

    name: str
    pattern: str  # with a place for the number
    length: int  # the number of bits of the network's prefix
    peers: str  # the entry of `allowed_peers` that names all hosts
    scope: str = ""

    def address(self, number: int) -> str:
        """Returns the address of a host, without its scope."""
        return self.pattern.format(number)


IPV4 = Family("ipv4", "10.213.7.{}", 24, "10.213.7.0/24")
IPV6 = Family("ipv6", "fd13:7::{}", 64, "fd13:7::/64")
LINK_LOCAL = Family("link-local", "fe80::7:{}", 64, "fe80::/10", "%net0")
PEERS = [*(family.peers for family in (IPV4, IPV6, LINK_LOCAL)), "source"]
"""The hosts of every network, as entries of `allowed_peers`."""
# No host has this MAC address, so frames to it are dropped silently.
_NOBODY = "02:00:00:00:00:99"
_CLONE_NEWNET = 0x40000000
_SIOCETHTOOL, _ETHTOOL_STXCSUM = 0x8946, 0x17
_LIBC = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


@cache
def why_not() -> str:
    """Returns why hosts cannot be made here. The result is empty if they can be made."""
    for program in ("ip", "tc", "unshare", "setpriv"):
        if shutil.which(program) is None:
            return f"there is no program {program!r}"
    try:
        with network("a") as (host,):
            host.shape("100mbit")
            subprocess.run(host.command("true"), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"the kernel makes no network namespaces for this user ({error})"
    return ""


@contextmanager
def network(*names: str, relayed: bool = False, families: Sequence[Family] = (IPV4,)) -> "Iterator[tuple[Host, ...]]":
    """Makes one host for each of these names. The hosts are joined by one bridge, or by a relay.

    Each host has an address of each family. `Host.address` is that of the first family.

    At the end, everything that runs on them is killed.
    """
    wire = f"pw{os.getpid()}-{next(_numbers)}"
    with ExitStack() as made:
        _run("ip", "netns", "add", wire)
        made.callback(_run, "ip", "netns", "del", wire)
        bridges = {name: f"to-{number}" if relayed else "switch" for number, name in enumerate(names)}
        for bridge in dict.fromkeys(bridges.values()):
            _run("ip", "-n", wire, "link", "add", bridge, "type", "bridge")
            _run("ip", "-n", wire, "link", "set", bridge, "up", "promisc", "on" if relayed else "off")
        hosts = [made.enter_context(Host(wire, name, at, bridges[name], families)) for at, name in enumerate(names, 1)]
        if relayed:
            relay = made.enter_context(Cable(wire, [*bridges.values()]))
            for host in hosts:
                host.plug_in(relay)
        yield tuple(hosts)


class Cable:
    """The relay between hosts. Calling it with the name of a command of `tests.hosts.relay` and its arguments sends
    this command to the relay.
    """

    def __init__(self, wire: str, bridges: Sequence[str]) -> None:
        command = ["ip", "netns", "exec", wire, sys.executable, "-m", "tests.hosts.relay", *bridges]
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._answer() == ["ready"]

    def __call__(self, *command: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the relay has ended"
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            pipe.close()


class Host:
    """One host. Its interface has the name `net0`, and its `number` can change.

    `address` and `addresses` are in the form in which an endpoint has them: an IPv6 address is in brackets. `relay` is
    None if one bridge joins all hosts.
    """

    def __init__(self, wire: str, name: str, number: int, bridge: str, families: Sequence[Family]) -> None:
        self.relay: Cable | None = None
        self._bridge, self._families = bridge, families
        self.name, self.number = name, number
        self._wire, self._namespace, self._port = wire, f"{wire}{name}", f"of-{name}"
        self._files = Path("/etc/netns", self._namespace)  # `ip netns exec` lays these over the files in /etc
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        _run("ip", "netns", "add", self._namespace)
        try:
            _run(
                *("ip", "-n", self._wire, "link", "add", self._port, "type", "veth"),
                *("peer", "name", "net0", "netns", self._namespace),
            )
            _run("ip", "-n", self._wire, "link", "set", self._port, "master", self._bridge, "up")
            self._ip("link", "set", "dev", "net0", "addrgenmode", "none")  # no addresses beside those of `families`
            for device in ("lo", "net0"):
                self._ip("link", "set", "dev", device, "up")
            self._addresses("add")
        except OSError:
            _run("ip", "netns", "del", self._namespace)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        _run("ip", "netns", "del", self._namespace)
        shutil.rmtree(self._files, ignore_errors=True)

    def _ip(self, *arguments: str) -> None:
        _run("ip", "-n", self._namespace, *arguments)

    def _addresses(self, change: str) -> None:
        for family in self._families:
            place = f"{family.address(self.number)}/{family.length}"
            at_once = ("nodad",) if family is not IPV4 and change == "add" else ()
            self._ip("address", change, place, "dev", "net0", *at_once)

    @property
    def address(self) -> str:
        """The host's address of the first family."""
        return self.addresses[0]

    @property
    def addresses(self) -> list[str]:
        """The host's address of each family."""
        return [in_endpoint(family.address(self.number) + family.scope) for family in self._families]

    def plug_in(self, relay: Cable) -> None:
        """Sends frames through this relay.

        Checksum offload is turned off, so that each frame leaves this host complete and with its checksum.
        """
        self.relay = relay
        off = array.array("B", struct.pack("II", _ETHTOOL_STXCSUM, 0))
        request = struct.pack("16sP", b"net0", off.buffer_info()[0])
        with self.inside(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
            fcntl.ioctl(device, _SIOCETHTOOL, request)

    def command(self, *command: str) -> list[str]:
        """Returns the command line that runs a command on this host."""
        named = ["sh", "-c", f'hostname {self.name} && exec "$@"', "sh", *command]
        return [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "ip",
            "netns",
            "exec",
            self._namespace,
            "unshare",
            "--uts",
            "--ipc",
            *named,
        ]

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes], *, answers: bool = False
    ) -> subprocess.Popen[bytes]:
        """Starts a program that lives at most as long as this thread.

        With `answers`, there are pipes to the program and from it.
        """
        env = {**os.environ, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "net0", **environment}
        process = subprocess.Popen(
            self.command(*command), stdin=subprocess.PIPE if answers else subprocess.DEVNULL,
            stdout=subprocess.PIPE if answers else log, stderr=log, env=env,
        )  # fmt: skip
        self._running.append(process)
        return process

    def knows(self, name: str, addresses: Sequence[str]) -> None:
        """Gives programs that are started later on this host a name for these addresses."""
        lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{address} {name}" for address in addresses)]
        self._files.mkdir(parents=True, exist_ok=True)
        (self._files / "hosts").write_text("\n".join(lines) + "\n")

    def disable_ipv6(self) -> None:
        """Leaves this host without IPv6."""
        for place in ("all", "default"):
            setting = f"/proc/sys/net/ipv6/conf/{place}/disable_ipv6"
            _run("ip", "netns", "exec", self._namespace, "sh", "-c", f"echo 1 > {setting}")

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Yields a `with` block in which this thread opens its sockets on this host."""
        here_path, there_path = Path("/proc/thread-self/ns/net"), Path("/run/netns", self._namespace)
        with here_path.open() as here, there_path.open() as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(here.fileno())

    def received(self) -> int:
        """Returns the number of bytes that this host has received so far."""
        done = subprocess.run(
            ["ip", "-n", self._namespace, "-s", "-j", "link", "show", "dev", "net0"], capture_output=True, check=True
        )
        return json.loads(done.stdout)[0]["stats64"]["rx"]["bytes"]

    # # ---- faults of the link

    def cut(self) -> None:
        """Cuts the link in both directions."""
        _run("ip", "-n", self._wire, "link", "set", self._port, "nomaster")

    def restore(self) -> None:
        """Undoes `cut`, `deafen` and `kill`."""
        _run("ip", "-n", self._wire, "link", "set", self._port, "master", self._bridge)

    def deafen(self, other: "Host", families: Sequence[Family] = ()) -> None:
        """Drops all data from the other host to this host. Data from this host still arrives at the other host.

        With `families`, only data to the addresses of these families is dropped.
        """
        for family in families or self._families:
            address = family.address(self.number)
            other._ip("neighbour", "replace", address, "lladdr", _NOBODY, "dev", "net0", "nud", "permanent")

    def hear(self, other: "Host") -> None:
        """Undoes `deafen`."""
        for family in self._families:
            with suppress(OSError):
                other._ip("neighbour", "delete", family.address(self.number), "dev", "net0")

    def shape(self, rate: str, burst: str = "256kb") -> None:
        """Limits each direction of the link to a rate in the notation of `tc`. After a pause, `burst` bytes pass
        without a limit.
        """
        for namespace, device in ((self._namespace, "net0"), (self._wire, self._port)):
            bucket = ("burst", burst, "latency", "20ms")
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, *bucket)

    def move(self, number: int) -> None:
        """Replaces the host's addresses by those of another number."""
        self._addresses("del")
        self.number = number
        self._addresses("add")

    def kill(self) -> None:
        """Simulates a power loss: every program on this host dies without a message to any peer. The link stays cut
        until `restore`.
        """
        self.cut()
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in filter(None, (process.stdin, process.stdout)):
                with suppress(BrokenPipeError):  # The program has not read all of its input.
                    pipe.close()
        self._running.clear()


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "this thread may not enter the network namespace")
