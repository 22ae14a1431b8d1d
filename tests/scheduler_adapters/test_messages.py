import msgspec
import pytest

from kvcache.block_table import BlockTable
from scheduler_adapters import messages as msg
from scheduler_adapters.errors import WorkerError
from transfer.metadata import TransferReqData

TABLE = BlockTable(
    request_id="r",
    replica_idx=0,
    num_tokens=17,
    page_size=16,
    groups=((3, 1),),
    fingerprint="f",
    hash_algorithm="sha256",
    digests=b"\x00" * 32,
)
TRANSFER = TransferReqData(
    dst_name="d",
    src_name="p",
    transfer_name="0" * 32,
    transfer_ids=[1],
    src_idxs=[3, 1],
    dst_idxs=[5, 6],
    src_replica_idx=0,
    dst_replica_idx=0,
    is_read=True,
)
MESSAGES = [
    msg.Submit(request_id="r", prompt=(1, 2), max_new_tokens=3),
    msg.Tokens(request_id="r", tokens=(4,), finished="eos"),
    msg.Tokens(request_id="r", finished="error", error="why"),
    msg.Prefill(request_id="r", prompt=(1, 2), cache_salt="s"),
    msg.Prefilled(request_id="r", token=4, table=TABLE),
    msg.PrefillFailed(request_id="r", error="why"),
    msg.Pulling(request_id="r", transfer=TRANSFER),
    msg.Done(request_id="r"),
    msg.Ready(role="prefill"),
    msg.Fatal(role="decode", error="why"),
    msg.Ask(),
    msg.Stats(role="decode", pages_held=1, open_requests=2, pull_seconds=0.5),
    msg.Stop(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_went(message: msg.AnyMessage) -> None:
    assert msg.decode(msg.encode(message)) == message
    if message.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(message, message.__struct_fields__[0], "changed")


@pytest.mark.parametrize("cut", [0, 1, 10])
def test_cut_or_foreign_bytes_are_an_error(cut: int) -> None:
    whole = msg.encode(MESSAGES[4])
    for data in (whole[:cut], whole[cut + 1 :], msgspec.msgpack.encode({"type": "Unknown"})):
        with pytest.raises(WorkerError, match=r"are no message"):
            msg.decode(data)
