"""What a reader makes of `kv_transfer_params`: nothing in them is trusted, and refusals name request, key and value."""

from __future__ import annotations

import json
from typing import Any

import pytest

from transfer.connector.transfer_params import MAX_TOKENS, RemotePages, params_of, read_params
from transfer.errors import TransferError, TransferParamsError
from transfer.pull.pull_state import LeaseRef

PAGES = RemotePages(
    engine_id="p",
    request_id="r-1",
    address="tcp://10.0.0.7:5600",
    incarnation="i",
    ranks=4,
    lease=LeaseRef((1 << 64) - 1, 7, 30.0),
    block_ids=((3, 4, 5), (9,)),
    num_tokens=40,
    total_tokens=64,
)
GOOD = params_of(PAGES, 2, 2)


def test_what_a_source_makes_is_what_a_reader_reads_also_through_json() -> None:
    assert read_params("r", GOOD, 2) == PAGES
    assert read_params("r", json.loads(json.dumps(GOOD)), 2) == PAGES
    assert GOOD["lease_id"] == "0xffffffffffffffff"  # as a number, a proxy in JavaScript would round it


def test_an_ipv6_address_and_a_host_name_are_addresses() -> None:
    for host in ("[::1]", "node-7.rack.local", "a", "host_1"):
        assert read_params("r", GOOD | {"remote_host": host}, 2).address == f"tcp://{host}:5600"


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"do_remote_decode": True}, {"other": 1}])
def test_params_that_ask_for_nothing_are_none(params: object) -> None:
    assert read_params("r", params, 2) is None


def test_what_may_be_absent_has_the_meaning_of_one_rank_and_a_whole_prompt() -> None:
    few = {
        key: value
        for key, value in GOOD.items()
        if key
        not in {"tp_size", "pp_size", "remote_total_tokens", "remote_incarnation", "transfer_mode", "do_remote_decode"}
    }
    read = read_params("r", few, 2)
    assert (read.ranks, read.total_tokens, read.incarnation) == (1, 40, "")
    assert read_params("r", GOOD | {"dcp_size": 1, "from_the_future": object()}, 2) == PAGES


class Strange:
    def __repr__(self) -> str:
        raise ZeroDivisionError


BAD: list[tuple[str, Any, str]] = [
    ("do_remote_prefill", "yes", "'yes': true or false is expected"),
    ("do_remote_prefill", 1, "1: true or false is expected"),
    ("do_remote_decode", True, "True: do_remote_prefill is true as well"),
    ("transfer_mode", "push", "'push': 'pull' is the only one"),
    ("transfer_mode", ["pull"], "['pull']: 'pull' is the only one"),
    ("remote_engine_id", None, "None: printable text of 1 to 512 characters is expected"),
    ("remote_engine_id", "", "'': printable text"),
    ("remote_engine_id", "x" * 513, "x': printable text"),
    ("remote_engine_id", 7, "7: printable text"),
    ("remote_request_id", "\n", "'\\n': printable text"),
    ("remote_host", None, "None: printable text"),
    ("remote_host", "a b", "'a b': a host name or an IP address is expected"),
    ("remote_host", "10.0.0.1:99;tcp://evil", ": a host name or an IP address is expected"),
    ("remote_host", "*", "'*': a host name"),
    ("remote_host", "\ud800", ": printable text"),
    ("remote_host", "-x", "'-x': a host name"),
    ("remote_port", None, "None: an integer from 1 to 65535 is expected"),
    ("remote_port", "5600", "'5600': an integer"),
    ("remote_port", 0, "0: an integer from 1 to 65535"),
    ("remote_port", 65536, "65536: an integer"),
    ("remote_port", True, "True: an integer"),
    ("remote_port", 5600.0, "5600.0: an integer"),
    ("remote_port", 10**5000, "an object of int: an integer"),
    ("tp_size", 0, "0: an integer from 1 to 4096"),
    ("tp_size", 4097, "4097: an integer"),
    ("tp_size", 4096, "4096: times pp_size is 8192, at most 4096 ranks may be"),
    ("pp_size", "2", "'2': an integer"),
    ("remote_num_tokens", 0, f"0: an integer from 1 to {MAX_TOKENS}"),
    ("remote_num_tokens", -5, "-5: an integer"),
    ("remote_num_tokens", 1 << 40, ": an integer from 1"),
    ("remote_total_tokens", 39, f"39: an integer from 40 to {MAX_TOKENS} is expected"),
    ("remote_block_ids", None, "None: a list of blocks for each of 2 groups is expected"),
    ("remote_block_ids", [], "[]: a list of blocks for each of 2 groups"),
    ("remote_block_ids", [[1]], "[[1]]: a list of blocks for each of 2 groups"),
    ("remote_block_ids", [[1], [2], [3]], "a list of blocks for each of 2 groups"),
    ("remote_block_ids", "12", "'12': a list of blocks"),
    ("remote_block_ids", {"0": [1], "1": [2]}, "a list of blocks"),
    ("remote_block_ids", [[], []], "[[], []]: no block at all, for 40 tokens"),
    ("remote_block_ids", [[1], 5], "5: group 1 is no list of at most 40 blocks"),
    ("remote_block_ids", [[1], "5"], "'5': group 1 is no list"),
    ("remote_block_ids", [[*range(41)], []], "group 0 is no list of at most 40 blocks, one for each token"),
    ("remote_block_ids", [[1, -1], []], "group 0 names block -1, 0 to 2147483647 may be"),
    ("remote_block_ids", [[1], [1 << 31]], "group 1 names block 2147483648"),
    ("remote_block_ids", [[1.0], []], "group 0 names block 1.0"),
    ("remote_block_ids", [[True], []], "group 0 names block True"),
    ("remote_block_ids", [[None], []], "group 0 names block None"),
    ("remote_block_ids", [[Strange()], []], "group 0 names block <Strange instance"),
    ("lease_id", None, "None: printable text"),
    ("lease_id", 12, "12: printable text"),
    ("lease_id", "12", "'12': a hexadecimal number of 64 bits above 0 is expected"),
    ("lease_id", "0x0", "'0x0': a hexadecimal number"),
    ("lease_id", "0x1" + "0" * 16, ": a hexadecimal number"),
    ("lease_id", "0x_1", ": a hexadecimal number"),
    ("lease_id", "-0x1", ": a hexadecimal number"),
    ("lease_slot", -1, "-1: an integer from 0"),
    ("lease_slot", None, "None: an integer from 0"),
    ("lease_duration_s", 0, "0: seconds above 0"),
    ("lease_duration_s", float("nan"), "nan: seconds above 0"),
    ("lease_duration_s", float("inf"), "inf: seconds above 0"),
    ("lease_duration_s", "30", "'30': seconds above 0"),
    ("lease_duration_s", True, "True: seconds above 0"),
]


@pytest.mark.parametrize(
    ("key", "value", "message"), BAD, ids=[f"{key}-{number}" for number, (key, *_) in enumerate(BAD)]
)
def test_a_bad_value_is_refused_with_the_request_the_key_and_the_value(key: str, value: Any, message: str) -> None:
    with pytest.raises(TransferParamsError) as raised:
        read_params("r-9", GOOD | {key: value}, 2)
    text = str(raised.value)
    assert text.startswith(f"request 'r-9': kv_transfer_params[{key!r}] is ")
    assert message in text
    assert len(text) < 500


@pytest.mark.parametrize(
    "key",
    [
        "remote_engine_id",
        "remote_request_id",
        "remote_block_ids",
        "remote_host",
        "remote_port",
        "remote_num_tokens",
        "lease_id",
        "lease_slot",
        "lease_duration_s",
    ],
)
def test_a_missing_value_is_said_to_be_missing(key: str) -> None:
    few = {name: value for name, value in GOOD.items() if name != key}
    with pytest.raises(TransferParamsError, match=rf"request 'r': kv_transfer_params\['{key}'\] is missing: "):
        read_params("r", few, 2)


@pytest.mark.parametrize("params", [[], "text", 7, [("do_remote_prefill", True)], Strange()])
def test_what_is_no_dict_is_refused(params: object) -> None:
    with pytest.raises(TransferParamsError, match="request 'r': kv_transfer_params is .*, a dict is expected"):
        read_params("r", params, 2)


def test_the_error_is_a_value_error_of_our_tree() -> None:
    with pytest.raises(ValueError, match="a dict"):
        read_params("r", 1, 1)
    assert issubclass(TransferParamsError, TransferError)
