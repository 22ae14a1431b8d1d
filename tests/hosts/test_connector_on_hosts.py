"""vLLM's schedulers and workers on two hosts, with our connector, while the link between them is cut."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hosts.network import IPV4, Family, network
from tests.hosts.pair import DIRECTIONS, Pair, Side

PYTHON = Path(__file__).parents[2] / ".venvs/vllm-engine/bin/python"
pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM's environment is not set up (make test-vllm)"),
]
Record = Callable[[str, object], None]
TOKENS, COUNT, TRANSFER = 3200, 3, 1_638_400
HELD_S = 30.0
_numbers = itertools.count()


@contextmanager
def engines(
    folder: Path, ranks: tuple[int, int] = (1, 1), family: Family = IPV4
) -> Iterator[tuple[Pair, Callable[[], Side]]]:
    """Two engines, and a function that restarts the prefill engine after its host has lost power."""
    with network("source", "reader", families=(family,)) as (source, reader):

        def prefill() -> Side:
            told = ("kv_producer", source.address, str(folder), str(ranks[0]))
            return Side(source, told[0], folder, "tests.hosts.connected", *told[1:], python=PYTHON, wait=False)

        first = prefill()
        told = ("kv_consumer", reader.address, str(folder), str(ranks[1]))
        decode = Side(reader, told[0], folder, "tests.hosts.connected", *told[1:], python=PYTHON, wait=False)
        first.wait()
        decode.wait()
        yield Pair(first, decode, source, reader), prefill


@pytest.fixture(scope="module")
def connected(tmp_path_factory: pytest.TempPathFactory, family: Family) -> Iterator[Pair]:
    with engines(tmp_path_factory.mktemp("connected"), (1, 2), family) as (pair, _):
        yield pair


def prompt() -> tuple[str, list[int]]:
    """Returns a prompt that no engine has seen, and its name."""
    number = next(_numbers)
    return f"r{number}", [*range(1000 * number, 1000 * number + TOKENS)]


def served(pair: Pair) -> None:
    """Hands over a request from one host to the other."""
    name, tokens = prompt()
    params = pair.source("prefill", name, tokens)
    assert pair.reader("decode", name, tokens, params) == [True, COUNT]


def until_free(*sides: Side) -> float:
    begin = time.monotonic()
    while held := [side("held") for side in sides if side("held")]:
        assert time.monotonic() - begin < HELD_S, f"{held} blocks are held"
        time.sleep(0.02)
    return time.monotonic() - begin


@pytest.mark.both_families
def test_decode_reads_a_prompt_from_another_host_over_any_link(connected: Pair) -> None:
    for rate in ("5gbit", "1gbit", "100mbit"):
        connected.shape(rate)
        before = connected.reader_host.received()
        served(connected)
        assert connected.reader_host.received() - before > TRANSFER
    until_free(connected.source, connected.reader)


@pytest.mark.parametrize("seconds", [1, pytest.param(12, marks=pytest.mark.long)])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_link_that_is_cut_during_a_load_costs_no_wrong_token_and_no_block(
    connected: Pair, direction: str, seconds: int, record_property: Record
) -> None:
    """The lease lasts 5 seconds. After an outage of 12 seconds, the pages can no longer be read. Decode then computes
    the prompt itself.
    """
    connected.shape("1gbit")
    served(connected)  # The call makes the two engines known to each other.
    name, tokens = prompt()
    params = connected.source("prefill", name, tokens)
    connected.shape("20mbit")
    cut, restore = DIRECTIONS[direction]
    connected.until_received(TRANSFER // 4, lambda: connected.reader.say("decode", name, tokens, params))
    cut(connected)
    time.sleep(seconds)
    restore(connected)
    connected.shape("1gbit")
    back = time.monotonic()
    right, computed = connected.reader.answer()
    assert right
    record_property("answered_s", time.monotonic() - back)
    record_property("computed", computed)
    until_free(connected.source, connected.reader)
    record_property("free_s", time.monotonic() - back)
    served(connected)


def test_a_host_that_loses_power_during_a_load_costs_no_token_and_is_used_again(
    tmp_path: Path, record_property: Record
) -> None:
    with engines(tmp_path) as (pair, restarted):
        served(pair)
        name, tokens = prompt()
        params = pair.source("prefill", name, tokens)
        pair.shape("20mbit")
        pair.until_received(TRANSFER // 4, lambda: pair.reader.say("decode", name, tokens, params))
        gone = time.monotonic()
        pair.source_host.kill()
        right, computed = pair.reader.answer()
        record_property("answered_s", time.monotonic() - gone)
        assert (right, computed) == (True, TOKENS + COUNT - 1), "decode computes the prompt itself"
        until_free(pair.reader)
        pair.source_host.restore()
        back = pair._replace(source=restarted())
        back.source.wait()
        back.shape("1gbit")
        served(back)
        until_free(back.source, back.reader)
