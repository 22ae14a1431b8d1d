"""A prefix that one engine has cached is found by another, and what fails costs computed tokens, never a wrong one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from scheduler_adapters.peers.hints import hints_of
from scheduler_adapters.vllm.weights import _digest_of_adapter
from tests.vllm_engine.engine import Engine, Shape, expected_tokens, make_request, run_until
from tests.vllm_engine.states import States
from tests.vllm_engine.test_engine import PROMPT, assert_empty, prefilled, served
from tests.vllm_engine.test_weights import made, reload
from transfer.connector import lending as block_lending
from transfer.pull import lending

Make = Callable[..., Engine]
EXTRA: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "ask_timeout": 5.0}


def source_of(engine: Engine) -> dict[str, Any]:
    connector = engine.connector._scheduling._connector
    return {"address": connector.address, "engines": [connector.config.engine_id]}


def computed(engine: Engine, request_id: str) -> int:
    """Returns how many tokens the engine has run for a request."""
    return sum(step.get(request_id, 0) for step in engine.scheduled)


def found(engine: Engine) -> int:
    """Returns how many tokens the engine has reported as found at its peers."""
    return sum(stats.get("peer_prefix_tokens", 0) for stats in engine.reported)


SHAPES = {
    "equal": ({}, {}),
    "TP 1 to 2": ({}, {"tp_size": 2}),
    "TP 2 to 1": ({"tp_size": 2}, {}),
    "full and window": ({"windows": (0, 40)}, {"windows": (0, 40)}),
    "window alone": ({"windows": (33,)}, {"windows": (33,)}),
    "two full groups": ({"windows": (0, 0)}, {"windows": (0, 0)}),
}


@pytest.mark.parametrize(("left", "right"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("length", [16, 17, 33, 97, 112, 113])
def test_a_prefix_of_another_engine_is_found(
    make: Make, left: dict[str, Any], right: dict[str, Any], length: int
) -> None:
    source, reader = (make("kv_both", Shape(extra=EXTRA, **shape)) for shape in (left, right))
    prompt = list(range(1000, 1000 + length))
    served([source], "s", prompt, 1, None)
    params = {"kv_sources": [source_of(source)]}
    assert served([source, reader], "r", prompt, 5, params) == expected_tokens(prompt, 5, reader.shape)
    pages = (length - 1) // 16 * 16
    assert found(reader) == pages
    assert computed(reader, "r") == length - pages + 4
    assert_empty(source, reader)
    assert served([reader], "again", prompt, 5, None) == expected_tokens(prompt, 5, reader.shape)
    assert computed(reader, "again") == length - pages + 4


def asked(
    engines: list[Engine], request_id: str, prompt: list[int], sources: Any, count: int = 3, **given: Any
) -> list[int]:
    """Runs a prompt on the last engine, with these sources. Returns its tokens."""
    engines[-1].scheduler.add_request(
        make_request(request_id, prompt, count, engines[-1].shape.block_size, {"kv_sources": sources}, **given)
    )
    run_until(engines, lambda: engines[-1].finish_reason(request_id))
    return engines[-1].tokens(request_id)


def pair(make: Make, **shape: Any) -> tuple[Engine, Engine]:
    """Returns two equal engines, the first of which has cached `PROMPT`."""
    extra = EXTRA | shape.pop("extra", {})
    source, reader = (make("kv_both", Shape(extra=extra, **shape)) for _ in range(2))
    served([source], "s", PROMPT, 1, None)
    return source, reader


def image(identifier: str) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=identifier, mm_position=PlaceholderRange(offset=5, length=8)
    )


@pytest.mark.parametrize("own", [True, False], ids=["same", "other"])
@pytest.mark.parametrize("kind", ["salt", "adapter", "files"])
def test_salts_and_adapters_are_part_of_the_question(make: Make, tmp_path: Path, kind: str, own: bool) -> None:
    """vLLM's hash has all of them except an adapter's files, which are compared beside it."""
    source, reader = (make("kv_both", Shape(extra=EXTRA)) for _ in range(2))
    for at in (0, 1):
        folder = made(tmp_path / str(at) / "poet", b"one" if own or not at else b"two")
    folders = [str(tmp_path / str(at) / "poet") for at in (0, 1)]
    given: dict[str, tuple[Any, Any]] = {
        "salt": ({"cache_salt": "a"}, {"cache_salt": "a" if own else "b"}),
        "adapter": (
            {"lora_request": LoRARequest("poet", 1, folders[0])},
            {"lora_request": LoRARequest("poet" if own else "clerk", 1, folders[0])},
        ),
    }
    if kind == "files":  # both have the same path, which vLLM's hash has, on two hosts
        folder.rename(tmp_path / "there")
        adapter = LoRARequest("poet", 7, folders[0])
        given["files"] = {"lora_request": LoRARequest("poet", 1, folders[0])}, {"lora_request": adapter}
        _digest_of_adapter.cache_clear()
    left, right = given[kind]
    source.scheduler.add_request(make_request("s", PROMPT, 1, 16, None, **left))
    run_until([source], lambda: source.finish_reason("s"))
    if kind == "files" and not own:
        (Path(folders[0]) / "adapter_model.safetensors").write_bytes(b"two")
    asked([source, reader], "r", PROMPT, [source_of(source)], **right)
    assert found(reader) == (96 if own else 0)
    assert_empty(source, reader)


def test_images_are_part_of_the_question() -> None:
    """The small model has no encoder, so this compares the hashes that are asked for."""
    hashes = {
        name: make_request("r", PROMPT, 1, 16, None, mm_features=[image(name)] if name else []).block_hashes
        for name in ("", "a", "b")
    }
    assert hashes["a"] == make_request("s", PROMPT, 1, 16, None, mm_features=[image("a")]).block_hashes
    assert all(len(set(three)) == 3 for three in zip(*hashes.values(), strict=True))


def test_what_the_source_has_evicted_is_computed(make: Make) -> None:
    source, reader = pair(make, blocks=14, extra={"lend": 1.0})
    served([source], "other", list(range(5000, 5130)), 1, None)  # takes the last blocks of the prompt first
    assert asked([source, reader], "r", PROMPT, [source_of(source)]) == expected_tokens(PROMPT, 3, reader.shape)
    assert 0 < found(reader) < 96
    assert_empty(source, reader)


def test_held_blocks_are_not_evicted(make: Make) -> None:
    """While a lease is open, vLLM gets other blocks for its own requests."""
    source, reader = pair(make, blocks=14, extra={"lend": 1.0})
    lend(source, reader)
    free = source.free_blocks
    served([source], "other", list(range(5000, 5000 + 16 * free - 1)), 1, None)
    pool = source.scheduler.kv_cache_manager.block_pool
    run_until([source, reader], lambda: reader.finish_reason("r"))
    assert reader.tokens("r") == expected_tokens(PROMPT, 3, reader.shape)
    assert found(reader) == 96
    assert_empty(source, reader)
    assert pool.get_num_free_blocks() == source.free_at_start


def lend(source: Engine, reader: Engine) -> None:
    """Steps both engines until the source holds blocks for the reader."""
    reader.add("r", PROMPT, 3, {"kv_sources": [source_of(source)]})
    run_until([reader, source], lambda: source.connector._scheduling._prefixes._lending.num_leases)


@pytest.mark.parametrize("who", ["source", "reader"])
def test_a_reset_ends_loans_and_pulls_and_then_finds_nothing(make: Make, who: str) -> None:
    source, reader = pair(make)
    peers = reader.connector._scheduling._prefixes._peers
    lend(source, reader)
    if who == "reader":
        run_until([source, reader], lambda: peers._pulls)
    resets = (source if who == "source" else reader).scheduler
    with pytest.raises(RuntimeError):
        resets.reset_prefix_cache(reset_running_requests=True)  # vLLM resets only if no block is held
    run_until([source, reader], lambda: reader.finish_reason("r"))
    assert reader.tokens("r") == expected_tokens(PROMPT, 3, reader.shape)
    assert found(reader) == 0
    assert_empty(source, reader)
    assert source.scheduler.reset_prefix_cache()
    reader.scheduler.reset_prefix_cache()
    before = found(reader)
    time.sleep(1.1)  # a source whose pull has failed is left alone for a second
    assert asked([source, reader], "again", PROMPT, [source_of(source)]) == expected_tokens(PROMPT, 3, reader.shape)
    assert found(reader) == before


NOWHERE = {"address": "tcp://127.0.0.1:9", "engines": ["gone"]}


@pytest.mark.parametrize(
    "source",
    [NOWHERE, {"address": "tcp://192.0.2.1:9", "engines": ["x"]}, {"address": "no address", "engines": ["x"]}],
    ids=["dead", "not allowed", "malformed"],
)
def test_a_source_that_does_not_answer_costs_a_bounded_time(make: Make, source: dict[str, Any]) -> None:
    reader = make("kv_both", Shape(extra=EXTRA | {"ask_timeout": 0.2}))
    begin = time.monotonic()
    assert asked([reader], "r", PROMPT, [source]) == expected_tokens(PROMPT, 3, reader.shape)
    assert time.monotonic() - begin < 1.5
    begin, steps = time.monotonic(), len(reader.scheduled)
    assert asked([reader], "r2", PROMPT[::-1], [source]) == expected_tokens(PROMPT[::-1], 3, reader.shape)
    assert len(reader.scheduled) - steps == 4, "a source that did not answer is left alone for a while"
    assert_empty(reader)


def test_a_dead_source_does_not_hide_the_next_one(make: Make) -> None:
    source, reader = pair(make, extra={"ask_timeout": 0.4})
    asked([source, reader], "r", PROMPT, [NOWHERE, source_of(source)])
    assert found(reader) == 96


def test_a_source_of_another_engine_id_or_model_lends_nothing(make: Make) -> None:
    source, reader = pair(make)
    other = make("kv_both", Shape(extra=EXTRA | {"model_id": "another model"}))
    served([other], "s", PROMPT, 1, None)
    wrong = source_of(source) | {"engines": ["another engine"]}
    assert asked([source, other, reader], "r", PROMPT, [wrong, source_of(other)]) == expected_tokens(
        PROMPT, 3, reader.shape
    )
    assert found(reader) == 0
    assert_empty(source, other, reader)


@pytest.mark.parametrize("reset", [False, True])
def test_weights_are_compared_and_a_cache_older_than_them_is_not_lent(make: Make, tmp_path: Path, reset: bool) -> None:
    source, reader = pair(make)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    reload(source, tmp_path)
    served([source], "step", [1, 2, 3], 1, None)
    asked([source, reader], "r", PROMPT, [source_of(source)])
    assert found(reader) == 0, "the source has reloaded its weights, the reader has not"
    reload(reader, tmp_path)
    served([reader], "step", [1, 2, 3], 1, None)
    if reset:
        assert source.scheduler.reset_prefix_cache()
        assert reader.scheduler.reset_prefix_cache()
        served([source], "s2", PROMPT, 1, None)
        time.sleep(1.1)  # a source that has refused is left alone for a second
    else:
        reader.scheduler.reset_prefix_cache()
    assert asked([source, reader], "r2", PROMPT, [source_of(source)]) == expected_tokens(PROMPT, 3, reader.shape)
    assert found(reader) == (96 if reset else 0)
    assert_empty(source, reader)


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_no_more_blocks_than_allowed_are_lent(make: Make, share: float) -> None:
    source, reader = pair(make, extra={"lend": share})
    assert asked([source, reader], "r", PROMPT, [source_of(source)]) == expected_tokens(PROMPT, 3, reader.shape)
    assert found(reader) == {0.0: 0, 0.1: 6 * 16, 1.0: 96}[share]
    served([source], "long", list(range(3000, 3200)), 1, None)
    asked([source, reader], "l", list(range(3000, 3200)), [source_of(source)])
    assert found(reader) == {0.0: 0, 0.1: 12 * 16, 1.0: 96 + 192}[share]


@pytest.mark.parametrize("when", ["asked", "lent", "pulling"])
def test_a_request_that_ends_while_it_waits_leaves_nothing_held(make: Make, when: str) -> None:
    source, reader = pair(make)
    peers = reader.connector._scheduling._prefixes._peers
    lender = source.connector._scheduling._prefixes._lending
    reader.add("r", PROMPT, 3, {"kv_sources": [source_of(source)]})
    reader.step()
    moments = {"asked": lambda: True, "lent": lambda: lender.num_leases, "pulling": lambda: peers._pulls}
    run_until([source, reader], moments[when])
    reader.abort("r")
    run_until([source, reader], lambda: not (lender.num_leases or peers._pulls))
    assert_empty(source, reader)
    assert asked([source, reader], "r2", PROMPT, [source_of(source)]) == expected_tokens(PROMPT, 3, reader.shape)
    assert_empty(source, reader)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_source_that_dies_during_a_pull_costs_computed_tokens(make: Make, policy: str) -> None:
    source, reader = pair(make, policy=policy)
    lend(source, reader)
    source.close()
    run_until([reader], lambda: reader.finish_reason("r"))
    assert reader.tokens("r") == expected_tokens(PROMPT, 3, reader.shape)
    assert_empty(reader)
    assert not sum(stats.get("failed_pulls", 0) for stats in reader.reported), "no request has failed"


def test_a_lease_that_ends_during_a_pull_costs_computed_tokens(make: Make, tmp_path: Path) -> None:
    source, reader = pair(make, policy="fail")
    lend(source, reader)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    reload(source, tmp_path)  # the source ends its leases, because the weights have changed
    run_until([source, reader], lambda: reader.finish_reason("r"))
    assert reader.tokens("r") == expected_tokens(PROMPT, 3, reader.shape)
    assert found(reader) == 0
    assert not sum(stats.get("failed_pulls", 0) for stats in reader.reported), "no request has failed"
    assert_empty(source, reader)


def test_requests_with_the_same_prefix_share_one_pull(make: Make) -> None:
    source, reader = pair(make)
    for name in "abc":
        reader.add(name, PROMPT, 3, {"kv_sources": [source_of(source)]})
    run_until([source, reader], lambda: all(reader.finish_reason(name) for name in "abc"))
    assert all(reader.tokens(name) == expected_tokens(PROMPT, 3, reader.shape) for name in "abc")
    assert found(reader) == 96
    assert all(computed(reader, name) == 4 + 2 for name in "abc")
    assert_empty(source, reader)


def test_blocks_that_are_not_computed_yet_are_not_lent(make: Make) -> None:
    """vLLM gives a block its hash when it schedules it, before the model has run."""
    source, reader = (make("kv_both", Shape(extra=EXTRA, max_batched=32)) for _ in range(2))
    prompt = list(range(1000, 1200))
    source.add("s", prompt, 1, None)
    source.step()
    assert asked([source, reader], "r", prompt, [source_of(source)]) == expected_tokens(prompt, 3, reader.shape)
    assert 0 < found(reader) < 192
    assert_empty(source, reader)


def test_recurrent_states_are_neither_lent_nor_asked_for(make: Make) -> None:
    source, reader = (make("kv_both", Shape(extra=EXTRA, states=States())) for _ in range(2))
    served([source], "s", PROMPT, 1, None)
    params = {"kv_sources": [source_of(source)]}
    assert served([source, reader], "r", PROMPT, 3, params) == expected_tokens(PROMPT, 3, reader.shape)
    assert found(reader) == 0


def test_the_next_turn_of_a_conversation_finds_the_answer_at_decode(make: Make) -> None:
    """The proxy keeps nothing: each answer's params go into the next request."""
    prefill = make("kv_producer", Shape(extra=EXTRA))
    decode = make("kv_consumer", Shape(extra=EXTRA | {"lend": 0.5}))
    prompt, params, computed_here = PROMPT, {}, []
    for turn in range(3):
        first = {"do_remote_decode": True, "do_remote_prefill": False, "kv_sources": params.get("kv_sources", [])}
        prefill.add(f"p{turn}", prompt, 1, first)
        run_until([prefill, decode], lambda turn=turn: prefill.finish_reason(f"p{turn}"))
        decode.add(f"d{turn}", prompt, 30, prefill.params(f"p{turn}"))
        run_until([prefill, decode], lambda turn=turn: decode.finish_reason(f"d{turn}"))
        answer, params = decode.tokens(f"d{turn}"), decode.params(f"d{turn}")
        assert answer == expected_tokens(prompt, 30, decode.shape)
        computed_here.append(computed(prefill, f"p{turn}"))
        prompt = [*prompt, *answer, *range(7000, 7010)]
    assert [source["engines"] for source in params["kv_sources"]] == [
        [decode.connector._scheduling._connector.config.engine_id],
        [prefill.connector._scheduling._connector.config.engine_id],
    ]
    assert computed_here == [100, 140 - 128, 180 - 160]
    assert_empty(prefill, decode)


def test_an_answer_says_where_its_kv_is_only_if_it_was_asked_to(make: Make) -> None:
    engine = make("kv_both", Shape(extra=EXTRA))
    asked([engine], "a", PROMPT, [])
    assert engine.params("a") == {"kv_sources": [source_of(engine) | {"tokens": 96}]}
    served([engine], "b", PROMPT, 3, {"do_remote_decode": False})
    assert not [output for output in engine.outputs if output.request_id == "b" and output.kv_transfer_params]


class Hinted:
    """The hints of a request."""

    def __init__(self, params: Any = None, kv_hints: Any = None) -> None:
        self.request_id, self.kv_transfer_params, self.kv_hints = "r", params, kv_hints


def envelope(hashes: list[int], version: str = "1.0", **more: Any) -> KvHintsEnvelope:
    payload = {"source_control_endpoint": "tcp://host:5", "block_hashes": hashes, **more}
    return KvHintsEnvelope("0.1", "m", [KvHintAction("a", "kv.fetch", version, payload)])


def test_hints_of_all_senders_are_read() -> None:
    read: Any = hints_of
    ours = {"kv_sources": [{"address": "tcp://a:1", "engines": ["x", "y"]}]}
    assert [hint.contact for hint in read(Hinted(ours))] == [("tcp://a:1", "x"), ("tcp://a:1", "y")]
    llm_d = {"remote_kv_source": {"kv_request_id": "q", "remote_host": "10.0.0.2", "remote_port": 5710}}
    assert [hint.contact for hint in read(Hinted(llm_d))] == [("tcp://10.0.0.2:5710", "")]
    low = [(1 << 64) - 5, 7]
    for sent in (low, [-5, 7]):
        for version in ("1.0", "2.7"):
            (hint,) = read(Hinted(kv_hints=envelope(sent, version, no_retain=True)))
            assert hint.contact == ("tcp://host:5", "")
            assert hint.pages([*low, 9]) == 2
    for bad in ({"kv_sources": 7}, {"kv_sources": [{"address": "", "engines": []}]}, {"remote_kv_source": {}}, 7):
        assert read(Hinted(bad)) == []
    assert read(Hinted(kv_hints=envelope([1], mode="move"))) == []
    assert read(Hinted(kv_hints=7)) == []


def test_a_hint_without_an_engine_id_finds_blocks_and_its_hashes_say_how_many(make: Make) -> None:
    source, reader = pair(make)
    request = make_request("r", PROMPT, 3, 16, None)
    request.kv_hints = envelope([int.from_bytes(one[-8:], "big") - (1 << 64) for one in request.block_hashes[:4]])
    request.kv_hints.actions[0].payload["source_control_endpoint"] = source_of(source)["address"]
    reader.scheduler.add_request(request)
    run_until([source, reader], lambda: reader.finish_reason("r"))
    assert reader.tokens("r") == expected_tokens(PROMPT, 3, reader.shape)
    assert found(reader) == 64


def test_a_pull_writes_only_when_earlier_steps_have_returned(make: Make) -> None:
    """A step in flight may still write to a block that was freed after it had been scheduled."""
    source, reader = pair(make)
    peers = reader.connector._scheduling._prefixes._peers
    reader.add("r", PROMPT, 3, {"kv_sources": [source_of(source)]})
    peers.returned, returned = lambda _: returned(0), peers.returned  # steps return, but not the one with the marker
    run_until([source, reader], lambda: peers._pulls)
    for _ in range(50):
        source.step()
        reader.step()
    (fetch,) = peers._pulls.values()
    assert fetch.marker == peers.marker == 1
    assert not fetch.is_pulling
    peers.returned = returned
    run_until([source, reader], lambda: reader.finish_reason("r"))
    assert found(reader) == 96
    assert_empty(source, reader)


@pytest.mark.parametrize("when", ["fenced", "pulling"])
def test_an_engine_whose_only_request_has_ended_runs_until_its_pull_holds_no_blocks(make: Make, when: str) -> None:
    """vLLM's loop runs a step only if there is work. Only the report of a step frees blocks."""
    source, reader = pair(make)
    peers = reader.connector._scheduling._prefixes._peers
    reader.add("r", PROMPT, 3, {"kv_sources": [source_of(source)]})
    run_until([source, reader], lambda: any(fetch.is_pulling or when == "fenced" for fetch in peers._pulls.values()))
    reader.abort("r")
    end = time.monotonic() + 20
    while busy := [engine for engine in (source, reader) if engine.scheduler.has_requests()]:
        assert time.monotonic() < end
        for engine in busy:
            engine.step()
    assert reader.scheduler.reset_prefix_cache(), "vLLM resets only if no block is held"
    assert source.scheduler.reset_prefix_cache()


def with_adapter(engines: list[Engine], name: str, params: Any, adapter: LoRARequest, prompt: list[int]) -> None:
    """Runs a request with an adapter on the last engine."""
    engines[-1].scheduler.add_request(make_request(name, prompt, 1, 16, params, lora_request=adapter))
    run_until(engines, lambda: engines[-1].finish_reason(name))


@pytest.mark.parametrize("changes", [False, True])
def test_the_adapter_of_blocks_that_were_handed_over_is_known(make: Make, tmp_path: Path, changes: bool) -> None:
    folder = made(tmp_path / "poet", b"one")
    prefill, decode, reader = (make("kv_both", Shape(extra=EXTRA)) for _ in range(3))
    if changes:
        with_adapter([decode], "old", None, LoRARequest("poet", 1, str(folder)), [1, 2, 3])
        (folder / "adapter_model.safetensors").write_bytes(b"two")
    adapter = LoRARequest("poet", 2, str(folder))
    with_adapter([prefill], "p", {"do_remote_decode": True, "do_remote_prefill": False}, adapter, PROMPT)
    with_adapter([prefill, decode], "d", prefill.params("p"), adapter, PROMPT)
    (folder / "adapter_model.safetensors").write_bytes(b"one")  # the reader's host has the old files
    adapter = LoRARequest("poet", 3, str(folder))
    asked([decode, reader], "r", PROMPT, [source_of(decode)], lora_request=adapter)
    assert found(reader) == (0 if changes else 96)


def test_a_lease_that_is_granted_by_the_first_step_with_new_weights_is_not_read(make: Make, tmp_path: Path) -> None:
    source, reader = pair(make)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    reload(reader, tmp_path)
    served([reader], "step", [1, 2, 3], 1, None)
    assert reader.scheduler.reset_prefix_cache()
    reader.add("r", PROMPT, 3, {"kv_sources": [source_of(source)]})
    run_until([reader], lambda: source.connector._scheduling._prefixes._lending.is_asked)
    reload(source, tmp_path)  # its cache is older
    run_until([source, reader], lambda: reader.finish_reason("r"))
    assert found(reader) == 0
    assert_empty(source, reader)


def test_a_pull_that_ends_in_the_first_step_with_new_weights_is_not_published(make: Make, tmp_path: Path) -> None:
    source, reader = pair(make)
    peers = reader.connector._scheduling._prefixes._peers
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    reader.add("r", PROMPT, 3, {"kv_sources": [source_of(source)]})
    run_until([source, reader], lambda: any(fetch.is_pulling for fetch in peers._pulls.values()))
    reader.step()
    for _ in range(30):  # the workers read meanwhile
        source.step()
        time.sleep(0.01)
    reload(reader, tmp_path)
    run_until([source, reader], lambda: reader.finish_reason("r"))
    assert found(reader) == 0
    assert_empty(source, reader)


def test_an_engine_id_that_no_message_can_have_is_left_out(make: Make) -> None:
    reader = make("kv_both", Shape(extra=EXTRA))
    sources = [{"address": "tcp://127.0.0.1:9", "engines": ["\ud800"]}]
    assert asked([reader], "r", PROMPT, sources) == expected_tokens(PROMPT, 3, reader.shape)
    assert reader.params("r")["kv_sources"] == [source_of(reader) | {"tokens": 96}]


def test_a_source_that_claims_more_blocks_than_were_asked_for_is_not_read(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the key, and lies in both of its answers: to the query, and to the reader's workers."""
    source, reader = pair(make, blocks=600)
    seal, offers = lending.sealed_pages, source.connector._scheduling._connector._offers
    blocks = (tuple(range(1, 193)),)
    prompt = SimpleNamespace(digest=lambda _: b"", named=())

    def lie(pages: Any, key: bytes) -> bytes:
        for offer in offers.values():
            offer.held = SimpleNamespace(num_tokens=192 * 16, block_ids=blocks, prompt=prompt)
        # the digest of one byte makes 192 pages of the 192 bytes that were asked for
        return seal(replace(pages, num_tokens=192 * 16, prompt_digest=pages.prompt_digest[-1:], block_ids=blocks), key)

    monkeypatch.setattr(lending, "sealed_pages", lie)
    assert asked([source, reader], "r", PROMPT, [source_of(source)]) == expected_tokens(PROMPT, 3, reader.shape)
    assert found(reader) == 0
    assert_empty(source, reader)


@pytest.mark.parametrize("when", ["none", "waits", "runs on", "ended"])
def test_new_files_of_an_adapter_are_lent_after_a_reset(make: Make, tmp_path: Path, when: str) -> None:
    """Unless a request that came before the reset may have computed blocks since."""
    folder = made(tmp_path / "poet", b"one")
    source, reader = (make("kv_both", Shape(extra=EXTRA)) for _ in range(2))
    old = LoRARequest("poet", 1, str(folder))
    with_adapter([source], "old", None, old, PROMPT)
    if when != "none":
        count = 300 if when == "runs on" else 1
        source.scheduler.add_request(make_request("waits", [1, 2, 3], count, 16, None, lora_request=old))
    assert source.scheduler.reset_prefix_cache()
    if when == "ended":
        run_until([source], lambda: source.finish_reason("waits"))
    (folder / "adapter_model.safetensors").write_bytes(b"two")
    new = LoRARequest("poet", 2, str(folder))
    with_adapter([source], "new", None, new, PROMPT)
    asked([source, reader], "r", PROMPT, [source_of(source)], lora_request=new)
    assert found(reader) == (96 if when == "none" else 0)
    assert bool(source.finish_reason("waits")) == (when in ("waits", "ended"))
    run_until([source], lambda: when == "none" or source.finish_reason("waits"))
    assert source.scheduler.reset_prefix_cache()
    with_adapter([source], "newer", None, new, PROMPT[::-1])
    time.sleep(1.1)  # a source that has refused is left alone for a second
    before = found(reader)
    asked([source, reader], "r2", PROMPT[::-1], [source_of(source)], lora_request=new)
    assert found(reader) - before == 96


def test_an_idle_reader_gives_back_what_is_lent_after_its_request_was_aborted(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's loop runs a step only if there is work, and the answer comes when no request is left."""
    monkeypatch.setattr(block_lending, "LENT_S", 600.0)
    source, reader = pair(make)
    lender, peers = (one.connector._scheduling._prefixes for one in (source, reader))
    reader.add("r", PROMPT, 3, {"kv_sources": [source_of(source)]})
    run_until([reader], lambda: lender._lending.is_asked)
    reader.abort("r")
    end, lent = time.monotonic() + 20, False
    while not lent or lender._lending.num_leases:
        assert time.monotonic() < end
        source.step()
        lent = lent or bool(lender._lending.num_leases)
        if reader.scheduler.has_requests():
            reader.step()
    assert not reader.finish_reason("r")
    assert not peers._peers._asking
    assert not reader.scheduler.has_requests()
    assert_empty(source, reader)


def test_a_source_gets_at_most_32_queries_and_prompts_beyond_them_are_computed_at_once(make: Make) -> None:
    prompts = [list(range(2000 + 100 * each, 2040 + 100 * each)) for each in range(40)]
    source, reader = (make("kv_both", Shape(extra=EXTRA, blocks=400, rows=64, max_batched=4000)) for _ in range(2))
    lender, peers = (one.connector._scheduling._prefixes for one in (source, reader))
    for each, prompt in enumerate(prompts):
        source.add(f"s{each}", prompt, 1, None)
    run_until([source], lambda: source.finish_reason("s39"))
    for each, prompt in enumerate(prompts):
        reader.add(f"r{each}", prompt, 3, {"kv_sources": [source_of(source)]})
    reader.step()
    assert sorted(int(name[1:]) for name in reader.scheduled[-1]) == list(range(32, 40))
    assert peers._peers.counts["busy"] == 8
    run_until([reader], lambda: len(lender._lending._lending._asked) == 32)
    run_until([source, reader], lambda: all(reader.finish_reason(f"r{each}") for each in range(40)))
    for each, prompt in enumerate(prompts):
        assert reader.tokens(f"r{each}") == expected_tokens(prompt, 3, reader.shape)
    assert found(reader) == 32 * 32
    assert_empty(source, reader)


@pytest.mark.parametrize("end", ["dies", "reloads"])
def test_after_a_failed_pull_the_next_source_is_asked(make: Make, tmp_path: Path, end: str) -> None:
    source, reader = pair(make)
    second = make("kv_both", Shape(extra=EXTRA))
    served([second], "s", PROMPT, 1, None)
    reader.add("r", PROMPT, 3, {"kv_sources": [source_of(source), source_of(second)]})
    run_until([reader, source], lambda: source.connector._scheduling._prefixes._lending.num_leases)
    engines = [second, reader]
    if end == "dies":
        source.close()
    else:
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        reload(source, tmp_path)  # its leases end
        engines.append(source)
    run_until(engines, lambda: reader.finish_reason("r"))
    assert reader.tokens("r") == expected_tokens(PROMPT, 3, reader.shape)
    assert found(reader) == 96
    assert computed(reader, "r") == 4 + 2
    assert_empty(*engines)


def test_samples_of_a_prompt_share_a_pull_and_each_of_several_prompts_has_its_own(make: Make) -> None:
    source, reader = pair(make)
    other = list(range(5000, 5100))
    served([source], "other", other, 1, None)
    prompts = {f"{sample}_cmpl-x-{at}-0a1b2c3d": [PROMPT, other][at] for at in range(2) for sample in range(3)}
    for name, prompt in prompts.items():
        reader.add(name, prompt, 3, {"kv_sources": [source_of(source)]})
    run_until([source, reader], lambda: all(map(reader.finish_reason, prompts)))
    for name, prompt in prompts.items():
        assert reader.tokens(name) == expected_tokens(prompt, 3, reader.shape)
        assert computed(reader, name) == 4 + 2
    assert found(reader) == 96 * 2
    assert_empty(source, reader)


@pytest.mark.parametrize("order", ["change, reset", "reset, change", "reset, step, change"])
def test_new_weights_are_lent_after_a_reset_that_left_no_block_of_the_old_ones(make: Make, order: str) -> None:
    """The workers tell of new weights in the next step only, when the cache has been reset and is filled again."""
    source, reader = pair(make)
    for engine in (source, reader):
        for call in order.split(", "):
            if call == "change":
                reload(engine, None)
            elif call == "reset":
                assert engine.scheduler.reset_prefix_cache()
            else:
                served([engine], "step", PROMPT, 1, None)
    served([source], "s2", PROMPT, 1, None)
    if order == "reset, step, change":
        reader.scheduler.reset_prefix_cache()
    assert asked([source, reader], "r", PROMPT, [source_of(source)]) == expected_tokens(PROMPT, 3, reader.shape)
    assert found(reader) == (0 if order == "reset, step, change" else 96)


def name_weights(engine: Engine, name: str) -> None:
    """Does what vLLM's engine does in its own process when the user names the weights."""
    engine.connector._scheduling._versions.named(name)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_weights_with_the_same_name_are_the_same(make: Make, reset: bool, tp_size: int) -> None:
    """One engine has got two updates, the other only one, as it started later."""
    source = make("kv_both", Shape(extra=EXTRA, tp_size=tp_size))
    reader = make("kv_both", Shape(extra=EXTRA))
    served([source], "s", PROMPT, 1, None)
    for engine in (source, source, reader):
        reload(engine, None)
    assert source.scheduler.reset_prefix_cache()
    name_weights(source, "v2")
    served([source], "s2", PROMPT, 1, None)
    asked([source, reader], "r", PROMPT, [source_of(source)])
    assert found(reader) == 0, "the reader's weights have no name"
    name_weights(reader, "v2")
    reader.scheduler.reset_prefix_cache()
    time.sleep(1.1)  # a source that has refused is left alone for a second
    asked([source, reader], "r2", PROMPT, [source_of(source)])
    assert found(reader) == 96
    for engine in (source, reader):
        name_weights(engine, "v3")
    reader.scheduler.reset_prefix_cache()
    if reset:
        assert source.scheduler.reset_prefix_cache()
        served([source], "s3", PROMPT, 1, None)
    time.sleep(1.1)
    asked([source, reader], "r3", PROMPT, [source_of(source)])
    assert found(reader) == (96 * 2 if reset else 96), "the source's blocks are of v2"
    reload(source, None)
    params = prefilled(source, "p", PROMPT[::-1])
    assert served([source, reader], "d", PROMPT[::-1], 3, params) == [], "an update after the name"
    name_weights(source, "v4")
    name_weights(reader, "v4")
    params = prefilled(source, "p2", PROMPT[3:])
    assert served([source, reader], "d2", PROMPT[3:], 3, params) == expected_tokens(PROMPT[3:], 3, reader.shape)


def test_vllms_engine_tells_the_name_of_its_weights(make: Make) -> None:
    engine = make("kv_both", Shape(extra=EXTRA))
    core = object.__new__(EngineCore)
    core.set_weight_version("step 7")
    assert core.get_weight_version() == "step 7"
    served([engine], "r", PROMPT, 1, None)
    assert engine.workers[0]._working._weights.weights.named == {"weights": "version 'step 7'"}
