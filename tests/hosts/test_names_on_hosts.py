"""Names with addresses of both families, of which one is dead; link-local addresses; and binds to every address."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.hosts.network import IPV4, IPV6, LINK_LOCAL, Family, Host, network
from tests.hosts.pair import Side

pytestmark = pytest.mark.hosts
PAGES = 16
_numbers = itertools.count()


class Named(NamedTuple):
    """A host of sources and a reader, with addresses of all families. The reader knows the name `source`."""

    source_host: Host
    reader_host: Host
    reader: Side
    folder: Path

    def source_at(self, address: str) -> tuple[str, Side]:
        """Starts a source that listens at this address, and returns its name."""
        name = f"p{next(_numbers)}"
        return name, Side(self.source_host, name, self.folder, "tests.hosts.exchanged", address)

    def ask(self, source: tuple[str, Side], asked: str) -> str:
        """Asks for pages at `asked:port`. Returns the key under which they can be taken."""
        key, (name, side) = f"named {next(_numbers)}", source
        port = side("compute", key, PAGES)[0].rpartition(":")[2]
        assert self.reader("ask", key, PAGES, f"tcp://{asked}:{port}", 30.0, f"{name}/0")[1:] == ["", PAGES]
        return key

    def assert_read(self, source: tuple[str, Side], asked: str) -> None:
        """Asks for pages at `asked:port`, and pulls them."""
        assert self.reader("take", self.ask(source, asked), 30.0)[1:] == ["", True]


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Named]:
    folder = tmp_path_factory.mktemp("named")
    with network("source", "reader", families=(IPV4, IPV6, LINK_LOCAL)) as (source, reader):
        reader.knows("source", [address.strip("[]") for address in source.addresses[:2]])
        yield Named(source, reader, Side(reader, "d", folder), folder)


@pytest.mark.parametrize("dead", [IPV4, IPV6], ids=lambda family: family.name)
def test_a_name_of_both_families_is_reached_while_one_is_dead(named: Named, dead: Family) -> None:
    """The network drops the data of one family. UCX does not change the family, so the pages are read afterwards."""
    source = named.source_at("*")
    named.source_host.deafen(named.reader_host, (dead,))
    key = named.ask(source, "source")
    named.source_host.hear(named.reader_host)
    assert named.reader("take", key, 30.0)[1:] == ["", True]


@pytest.mark.parametrize("at", [0, 1], ids=["ipv4", "ipv6"])
def test_a_name_of_both_families_is_reached_where_its_source_listens_on_one(named: Named, at: int) -> None:
    """The other family refuses at once."""
    named.assert_read(named.source_at(named.source_host.addresses[at]), "source")


def test_a_source_that_listens_at_every_address_is_reached_at_each(named: Named) -> None:
    everywhere = named.source_at("*")
    for address in named.source_host.addresses:
        named.assert_read(everywhere, address)


def test_pages_are_read_from_a_link_local_address(named: Named) -> None:
    """NIXL moves the pages over the addresses of the other families: UCX uses no link-local ones."""
    address = named.source_host.addresses[2]
    assert address.endswith("%net0]")
    named.assert_read(named.source_at(address), address)


def test_a_link_local_address_without_its_interface_says_what_is_missing(named: Named) -> None:
    asked = named.source_host.addresses[2].replace("net0", "net7")
    _, error, _ = named.reader("ask", "nowhere", PAGES, f"tcp://{asked}:5600", 30.0)
    assert f"tcp://{asked}:5600" in error
    assert "this host has no network interface 'net7'" in error


def test_every_address_of_a_host_without_ipv6_is_bound(tmp_path: Path) -> None:
    with network("source", "reader") as (source, reader):
        for host in (source, reader):
            host.disable_ipv6()
        named = Named(source, reader, Side(reader, "d", tmp_path), tmp_path)
        named.assert_read(named.source_at("*"), source.address)
