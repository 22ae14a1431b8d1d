import msgspec
import pytest

from kvcache.replica.block_table import BlockTable
from scheduler_adapters.errors import MessageError
from scheduler_adapters.service import messages as msg
from transfer.pull.lease import LeaseRef
from transfer.pull.source import Source

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
ROOM = {"request_id": "r", "attempt": 3}
SOURCE = Source("tcp://127.0.0.1:1", "p/0", LeaseRef((1 << 64) - 1, 0, 10.0), "i")
MESSAGES = [
    msg.Hello(reader="d", incarnation="i"),
    msg.Welcome(name="p", incarnation="i", engines=("p/0", "p/1"), address="tcp://127.0.0.1:5"),
    msg.Rejected(reason="why", stranger=True),
    msg.Submit(request_id="r", prompt=(1, 2), max_new_tokens=3),
    msg.Abort(request_id="r"),
    msg.Tokens(request_id="r", tokens=(4,), finished="eos"),
    msg.Tokens(request_id="r", finished="error", error="why"),
    msg.Prefill(**ROOM, prompt=(1, 2), within_s=1.5, cache_salt="s", chunkwise=True),
    msg.Prefill(**ROOM, prompt=(1, 2), within_s=1.5, kv_sources=(msg.KVSource("tcp://127.0.0.1:5", ("p/0",)),)),
    msg.PagesOffer(**ROOM, source=SOURCE, table=TABLE, prompt_digest=b"d", token=4),
    msg.Failed(**ROOM, reason="why", final=True),
    msg.Cancel(**ROOM, reason="why"),
    msg.Ready(name="prefill"),
    msg.Fatal(name="decode", error="why"),
    msg.Ask(),
    msg.Stats(name="decode", role="decode", pages_held=1, open_requests=2, pull_seconds=0.5),
    msg.Stop(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_decoded_message_equals_the_encoded_one(message: msg.AnyMessage) -> None:
    assert msg.decode(msg.encode(message)) == message
    if message.__struct_fields__:
        with pytest.raises(AttributeError, match="immutable type"):
            setattr(message, message.__struct_fields__[0], "changed")


@pytest.mark.parametrize("cut", [0, 1, 10])
def test_cut_or_foreign_bytes_are_an_error(cut: int) -> None:
    whole = msg.encode(MESSAGES[8])
    for data in (whole[:cut], whole[cut + 1 :], msgspec.msgpack.encode({"type": "Unknown"}), b"\x81" * 5000):
        with pytest.raises(MessageError, match="are not a message"):
            msg.decode(data)


BAD = [
    ("Submit", {"prompt": []}),
    ("Submit", {"prompt": [-1]}),
    ("Submit", {"prompt": [1 << 31]}),
    ("Submit", {"request_id": ""}),
    ("Submit", {"request_id": "r" * 257}),
    ("Submit", {"max_new_tokens": 0}),
    ("Submit", {"cache_salt": "s" * 257}),
    ("Prefill", {"within_s": 0.0}),
    ("Prefill", {"within_s": float("nan")}),
    ("Prefill", {"attempt": 0}),
    *(
        ("PagesOffer", {"source": SOURCE._replace(lease=lease)})
        for lease in ((0, 0, 1.0), (1, -1, 1.0), (1, 0, 0.0), (1, 0))
    ),
    ("PagesOffer", {"token": -1}),
    ("PagesOffer", {"source": SOURCE._replace(address="")}),
    ("PagesOffer", {"source": SOURCE._replace(engine_id="e" * 257)}),
    ("Cancel", {"reason": "x" * 2001}),
    ("Welcome", {"engines": []}),
]


@pytest.mark.parametrize(("kind", "change"), BAD)
def test_values_out_of_range_are_no_message(kind: str, change: dict[str, object]) -> None:
    whole = next(message for message in MESSAGES if type(message).__name__ == kind)
    fields = msgspec.msgpack.decode(msg.encode(whole))
    assert msg.decode(msgspec.msgpack.encode(fields)) == whole
    with pytest.raises(MessageError, match="are not a message"):
        msg.decode(msgspec.msgpack.encode({**fields, **change}))


def test_a_receiver_takes_only_single_frames_of_its_own_message_types() -> None:
    whole = msg.encode(MESSAGES[0])
    assert msg.decode_frames([whole], msg.ToPrefill) == MESSAGES[0]
    for frames, message in (([], "0 frames"), ([whole, b""], "2 frames"), ([msg.encode(msg.Stop())], "a Stop is not")):
        with pytest.raises(MessageError, match=message):
            msg.decode_frames(frames, msg.ToPrefill)


def test_a_reason_of_any_length_can_be_sent() -> None:
    for reason in ("why", "x" * 2000, "x" * 5000):
        cancel = msg.Cancel(**ROOM, reason=msg.clipped(reason))
        assert msg.decode(msg.encode(cancel)) == cancel
    assert msg.clipped("x" * 5000).endswith("x...")
