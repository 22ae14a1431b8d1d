"""A reader trusts no value in `kv_transfer_params`. Each refusal names the request, the key and the value."""

from __future__ import annotations

import json
from typing import Any

import pytest

from transfer.connector.transfer_params import TransferParams, params_of, pointer_in, read_params
from transfer.errors import TransferError, TransferParamsError
from transfer.wire.messages import MAX_TOKENS, Wanted
from transfer.wire.prompt import Prompt

MADE = TransferParams(
    engine_id="p", request_id="r-1", host="10.0.0.7", port=5600, lease_id="0xffffffffffffffff", num_tokens=40
)
GOOD = params_of(MADE)


def test_a_reader_reads_the_params_that_a_source_makes_also_through_json() -> None:
    assert read_params("r", GOOD) == MADE
    assert read_params("r", json.loads(json.dumps(GOOD))) == MADE
    # The id is a string, because a JavaScript proxy would round a number.
    assert GOOD["lease_id"] == "0xffffffffffffffff"


def test_the_keys_are_those_that_other_connectors_and_proxies_know() -> None:
    assert GOOD == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p",
        "remote_request_id": "r-1",
        "remote_host": "10.0.0.7",
        "remote_port": 5600,
        "remote_num_tokens": 40,
        "transfer_mode": "pull",
        "lease_id": "0xffffffffffffffff",
    }


@pytest.mark.parametrize(("tokens", "wanted"), [(39, 39), (40, 40), (41, 40)])
def test_a_reader_asks_for_the_pages_of_its_own_prompt(tokens: int, wanted: int) -> None:
    prompt = Prompt(range(tokens), "salt")
    assert MADE.wanted(prompt) == Wanted("tcp://10.0.0.7:5600", "p", (1 << 64) - 1, wanted, prompt.digest(wanted))


def test_an_ipv6_address_and_a_host_name_are_addresses() -> None:
    for host in ("[::1]", "node-7.rack.local", "a", "host_1"):
        read = read_params("r", GOOD | {"remote_host": host})
        assert read is not None
        assert read.wanted(Prompt([1])).address == f"tcp://{host}:5600"


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"do_remote_decode": True}, {"other": 1}])
def test_params_that_ask_for_nothing_are_none(params: object) -> None:
    assert read_params("r", params) is None


def test_params_that_say_where_the_pages_are_have_no_effect() -> None:
    """The params of other connectors also name blocks, ranks, slots and incarnations. A reader ignores these values,
    because the source itself names its pages.
    """
    few = {key: value for key, value in GOOD.items() if key not in {"transfer_mode", "do_remote_decode"}}
    more = {"remote_block_ids": [[1]], "tp_size": -1, "lease_slot": 7, "remote_incarnation": 5, "later": object()}
    assert read_params("r", few) == read_params("r", GOOD | more) == MADE


class Strange:
    def __repr__(self) -> str:
        raise ZeroDivisionError


BAD: list[tuple[str, Any, str]] = [
    ("do_remote_prefill", "yes", "'yes': Expected `bool`"),
    ("do_remote_prefill", 1, "1: Expected `bool`"),
    ("do_remote_decode", True, "True: do_remote_prefill is true as well"),
    ("transfer_mode", "push", "'push': Invalid enum value"),
    ("transfer_mode", ["pull"], "['pull']: Expected `str`"),
    ("remote_engine_id", None, "None: Expected `str`"),
    ("remote_engine_id", "", "'': Expected `str` of length >= 1"),
    ("remote_engine_id", "x" * 513, "x': Expected `str` of length <= 512"),
    ("remote_engine_id", 7, "7: Expected `str`"),
    ("remote_request_id", "\n", "'\\n': printable text"),
    ("remote_host", None, "None: Expected `str`"),
    ("remote_host", "a b", "'a b': a host name or an IP address is expected"),
    ("remote_host", "10.0.0.1:99;tcp://evil", ": a host name or an IP address is expected"),
    ("remote_host", "*", "'*': a host name"),
    ("remote_host", "\ud800", ": a host name"),
    ("remote_host", "-x", "'-x': a host name"),
    ("remote_port", None, "None: Expected `int`"),
    ("remote_port", "5600", "'5600': Expected `int`"),
    ("remote_port", 0, "0: Expected `int` >= 1"),
    ("remote_port", 65536, "65536: Expected `int` <= 65535"),
    ("remote_port", True, "True: Expected `int`"),
    ("remote_port", 5600.0, "5600.0: Expected `int`"),
    ("remote_port", 10**5000, "an object of int: Expected `int` <= 65535"),
    ("remote_num_tokens", 0, "0: Expected `int` >= 1"),
    ("remote_num_tokens", -5, "-5: Expected `int` >= 1"),
    ("remote_num_tokens", 1 << 40, f": Expected `int` <= {MAX_TOKENS}"),
    ("lease_id", None, "None: Expected `str`"),
    ("lease_id", 12, "12: Expected `str`"),
    ("lease_id", "12", "'12': 0x and up to 16 digits of 0-9 and a-f, not all 0, are expected"),
    ("lease_id", "0x0", "'0x0': 0x and up to 16 digits"),
    ("lease_id", "0x1" + "0" * 16, ": 0x and up to 16 digits"),
    ("lease_id", "0x_1", ": 0x and up to 16 digits"),
    ("lease_id", "-0x1", ": 0x and up to 16 digits"),
    ("lease_id", Strange(), "<Strange instance"),
]


@pytest.mark.parametrize(
    ("key", "value", "message"), BAD, ids=[f"{key}-{number}" for number, (key, *_) in enumerate(BAD)]
)
def test_a_bad_value_is_refused_with_the_request_the_key_and_the_value(key: str, value: Any, message: str) -> None:
    with pytest.raises(TransferParamsError) as raised:
        read_params("r-9", GOOD | {key: value})
    text = str(raised.value)
    assert text.startswith(f"request 'r-9': kv_transfer_params[{key!r}]")
    assert message in text
    assert len(text) < 500


@pytest.mark.parametrize(
    "key",
    [
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "remote_num_tokens",
        "lease_id",
    ],
)
def test_a_missing_value_is_reported_as_missing(key: str) -> None:
    few = {name: value for name, value in GOOD.items() if name != key}
    with pytest.raises(TransferParamsError, match=rf"request 'r': kv_transfer_params\['{key}'\] is missing: "):
        read_params("r", few)


POINTER = {"remote_engine_id", "remote_host", "remote_port", "lease_id"}


@pytest.mark.parametrize(("key", "value"), [bad[:2] for bad in BAD], ids=[str(number) for number in range(len(BAD))])
def test_a_lease_can_be_given_back_by_params_that_name_it_whatever_else_they_say(key: str, value: Any) -> None:
    found = pointer_in(GOOD | {key: value})
    assert found == (None if key in POINTER else Wanted("tcp://10.0.0.7:5600", "p", (1 << 64) - 1, 0, b""))


@pytest.mark.parametrize("missing", GOOD)
def test_params_name_a_lease_unless_a_key_of_the_pointer_is_missing(missing: str) -> None:
    few = {key: value for key, value in GOOD.items() if key != missing}
    assert (pointer_in(few) is None) == (missing in POINTER | {"do_remote_prefill"})


@pytest.mark.parametrize(
    "params", [None, {}, [], "text", {"do_remote_prefill": True}, GOOD | {"do_remote_prefill": False}, {1: 2}], ids=str
)
def test_params_that_ask_for_no_pages_name_no_lease(params: object) -> None:
    assert pointer_in(params) is None


@pytest.mark.parametrize("params", [[], "text", 7, [("do_remote_prefill", True)], Strange()])
def test_params_that_are_no_dict_are_refused(params: object) -> None:
    with pytest.raises(TransferParamsError, match="request 'r': kv_transfer_params is .*; a dict is expected"):
        read_params("r", params)


def test_the_error_is_a_value_error_of_our_tree() -> None:
    with pytest.raises(ValueError, match="a dict"):
        read_params("r", 1)
    assert issubclass(TransferParamsError, TransferError)
