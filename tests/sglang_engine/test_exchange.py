"""Real schedulers of SGLang with their own event loops lend cached pages to each other, and fetch them.

The prompts' tokens are compared with those of SGLang's unchanged engine.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache import TextContext
from scheduler_adapters.hf.runner import HFRunner, attend_over_pages, kv_params_of, load_model, manager_for
from scheduler_adapters.loop import Request, ServingLoop
from scheduler_adapters.sglang.settings import Settings
from tests.sglang_engine.pd_pair import ANSWER_S, NEW, Options, Server, free_port
from transfer import Lent, PageExchange, PullEvent
from transfer.errors import InvalidEngineError

pytestmark = pytest.mark.timeout(600)
PROMPT = [3 + place % 90 for place in range(300)]
_names = map("r{}".format, itertools.count())
Peers = tuple[Server, Server]


def _server(model: Path, page_size: int, log: Path, **more: Any) -> Server:
    environment = {"PAGEWIRE_EXCHANGE": "tcp://127.0.0.1:0", "PAGEWIRE_ASK_S": "20", "PAGEWIRE_LEND": "0.75"}
    more = {"radix_cache_backend": "pagewire"} | more
    return Server(Options("null", str(model), page_size, str(log), environment=environment, more=more))


@pytest.fixture(scope="module")
def peers(model_dir: Path, page_size: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    logs = tmp_path_factory.mktemp("peers")
    made = (
        _server(model_dir, page_size, logs / "a.log", sleep_on_idle=True),
        _server(model_dir, page_size, logs / "b.log"),
    )
    try:
        for server in made:
            server.wait_ready()
        yield made
    finally:
        for server in made:
            server.close()


@pytest.fixture
def empty(peers: Peers) -> Iterator[Peers]:
    """Both servers, with empty caches. After the test they hold no pages."""
    for server in peers:
        clear(server)
    yield peers
    for server in peers:
        server.wait_usage()


def hints(*sources: dict[str, Any]) -> dict[str, Any]:
    """Returns `kv_sources` in the form in which SGLang's requests can have them."""
    action = {"action_id": "a", "action_type": "pagewire.kv_sources", "action_version": "1.0"}
    payload = {"kv_sources": list(sources)}
    return {"protocol_version": "0.1", "message_id": "m", "actions": [action | {"payload": payload}]}


def clear(server: Server) -> None:
    server.wait_usage()  # SGLang refuses to flush while a request runs
    server.flush()
    server.unmeasure()


def source_of(server: Server) -> dict[str, Any]:
    return server.exchange()["source"]


def asked(server: Server, prompt: list[int], **fields: Any) -> dict[str, Any]:
    """Runs a prompt. Returns its tokens, how many of its tokens were found cached, and the sources that it names."""
    name = next(_names)
    server.ask("generate", name=name, prompt=prompt, new=NEW, **fields)
    return server.answer(name)


def whole(prompt: list[int], page_size: int) -> int:
    """Returns how many tokens of a prompt a cache can have."""
    return (len(prompt) - 1) // page_size * page_size


def test_a_prompt_that_a_peer_has_cached_is_pulled(
    empty: Peers, page_size: int, expected: Callable[[list[int]], list[int]]
) -> None:
    one, other = empty
    asked(one, PROMPT)
    before, lent = other.exchange(), one.exchange()["lent_pages"]
    answer = asked(other, PROMPT, kv_hints=hints(source_of(one)))
    assert (answer["tokens"], answer["cached"]) == (expected(PROMPT), whole(PROMPT, page_size))
    after = other.exchange()
    assert after["peer_prefix_tokens"] - before.get("peer_prefix_tokens", 0) == whole(PROMPT, page_size)
    assert one.exchange()["lent_pages"] - lent == whole(PROMPT, page_size) // page_size
    # the answer says where its KV is, and then who else may have some
    assert [found["address"] for found in answer["sources"]] == [source_of(other)["address"], source_of(one)["address"]]
    # the next turn goes back, and finds what the second server has computed since
    longer = PROMPT + answer["tokens"] + [7] * 20
    back = asked(one, longer, kv_hints=hints(*answer["sources"]))
    assert back["tokens"] == expected(longer)
    assert back["cached"] > whole(PROMPT, page_size)


def test_a_request_without_hints_computes_its_prompt(empty: Peers, expected: Callable[[list[int]], list[int]]) -> None:
    one, other = empty
    asked(one, PROMPT)
    answer = asked(other, PROMPT)
    assert (answer["tokens"], answer["cached"], answer["sources"]) == (expected(PROMPT), 0, None)


def test_routers_hints_are_read_and_their_hashes_say_how_many_pages_to_ask_for(
    empty: Peers, page_size: int, expected: Callable[[list[int]], list[int]]
) -> None:
    one, other = empty
    asked(one, PROMPT)
    payload = {"source_control_endpoint": source_of(one)["address"], "block_hashes": [12345]}
    action = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
    envelope = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
    assert asked(other, PROMPT, kv_hints=envelope)["cached"] == 0  # the hash is of none of its pages
    clear(other)
    payload["block_hashes"] = page_numbers(PROMPT, page_size)[:3]
    answer = asked(other, PROMPT, kv_hints=envelope)
    assert (answer["tokens"], answer["cached"]) == (expected(PROMPT), 3 * page_size)


def page_numbers(prompt: list[int], page_size: int) -> list[int]:
    """Returns the hashes of a prompt's pages, signed as in SGLang's events."""
    import numpy as np

    from kvcache.replica.hashing import PrefixHasher

    digests = PrefixHasher("sha256", page_size, None, ()).digests(np.array(prompt), 0, len(prompt) // page_size)
    return digests[:, 0].view(np.int64).tolist()


@pytest.mark.parametrize("named", [{"cache_salt": "tenant"}, {"extra_key": "adapter"}])
def test_salts_and_extra_keys_are_part_of_the_question(
    empty: Peers, page_size: int, expected: Callable[[list[int]], list[int]], named: dict[str, str]
) -> None:
    one, other = empty
    asked(one, PROMPT)
    answer = asked(other, PROMPT, kv_hints=hints(source_of(one)), **named)
    assert (answer["tokens"], answer["cached"]) == (expected(PROMPT), 0)
    clear(other)
    asked(one, PROMPT, **named)
    answer = asked(other, PROMPT, kv_hints=hints(source_of(one)), **named)
    assert (answer["tokens"], answer["cached"]) == (expected(PROMPT), whole(PROMPT, page_size))


def test_a_source_that_is_gone_or_no_source_costs_computed_tokens_only(
    empty: Peers, expected: Callable[[list[int]], list[int]]
) -> None:
    other = empty[1]
    gone = {"address": f"tcp://127.0.0.1:{free_port()}", "engines": ["gone"]}
    far = {"address": "tcp://192.0.2.1:5800", "engines": ["not allowed"]}
    for sources in ((gone,), (far,), ({"address": 7},), ()):
        answer = asked(other, PROMPT, kv_hints=hints(*sources))
        assert answer["tokens"] == expected(PROMPT), sources
        clear(other)


def test_a_flush_ends_leases_and_no_request_waits_for_a_pull_that_does_not_end(
    empty: Peers, expected: Callable[[list[int]], list[int]]
) -> None:
    one, other = empty
    asked(one, PROMPT)
    other.hold(on=True)
    try:
        other.ask("generate", name="held", prompt=PROMPT, new=NEW, kv_hints=hints(source_of(one)))
        other.wait_reads()
        assert one.usage()["locked"]  # the leased pages
        one.flush()
        asked(one, [5] * 290)  # overwrites the pages
        answer = other.answer("held")
        assert (answer["tokens"], answer["cached"]) == (expected(PROMPT), 0)
        assert other.usage()["locked"]  # the READ may still write to these pages
    finally:
        other.hold(on=False)
    other.wait_usage()
    assert asked(other, PROMPT)["tokens"] == expected(PROMPT)


def test_pages_of_other_weights_are_not_found(
    empty: Peers, model_dir: Path, other_model_dir: Path, other_reference: Any
) -> None:
    one, other = empty
    asked(one, PROMPT)
    other.update(other_model_dir, flush=False)
    try:
        answer = asked(other, PROMPT, kv_hints=hints(source_of(one)))
        assert (answer["tokens"], answer["cached"]) == (other_reference(PROMPT, NEW), 0)
        one.update(other_model_dir, flush=False)
        asked(one, PROMPT)
        clear(other)
        answer = asked(other, PROMPT, kv_hints=hints(source_of(one)))
        assert answer["tokens"] == other_reference(PROMPT, NEW)
        assert answer["cached"] > 0  # both have loaded the same checkpoint
    finally:
        for server in empty:
            server.update(model_dir, flush=False)


def test_a_server_that_was_started_with_other_weights_lends_nothing(
    empty: Peers,
    other_model_dir: Path,
    model_dir: Path,
    page_size: int,
    tmp_path: Path,
    expected: Callable[[list[int]], list[int]],
) -> None:
    """The name of the model says nothing about its weights."""
    stranger = _server(other_model_dir, page_size, tmp_path / "stranger.log", served_model_name=str(model_dir))
    try:
        stranger.wait_ready()
        asked(stranger, PROMPT)
        answer = asked(empty[1], PROMPT, kv_hints=hints(source_of(stranger)))
        assert (answer["tokens"], answer["cached"]) == (expected(PROMPT), 0)
        assert "weights at the start" in empty[1].log.read_text()
    finally:
        stranger.close()


class HFSide:
    """A serving loop over a Hugging Face model, which reads pages of SGLang, and lends its own."""

    def __init__(self, model_dir: Path, page_size: int, told: dict[str, Any]) -> None:
        model = load_model(model_dir)
        attend_over_pages(model)
        params = kv_params_of(model.config, page_size=page_size, enable_prefix_caching=True)
        params = replace(params, weights=told["weights"] or None)
        self.manager = manager_for(model, params, 4, 512, ["cpu"], available_cache_memory=1 << 20)
        self.loop = ServingLoop(self.manager, HFRunner(model, self.manager.states), 64)
        self.exchange = PageExchange(self.manager, "hf", compatibility=told["compatibility"], lend=1.0)

    def event(self, kind: type) -> Any:
        end = time.monotonic() + ANSWER_S
        while time.monotonic() < end:
            for happened in self.exchange.poll():
                if isinstance(happened.event, kind):
                    return happened
            time.sleep(1e-3)
        raise TimeoutError(kind)

    def run(self, source: dict[str, Any]) -> tuple[list[int], int, str]:
        """Returns the prompt's next tokens, how many tokens were pulled, and why none were."""
        request = Request("r", PROMPT, NEW)
        context = self.loop.context_for(request)
        self.manager.external_claim("r")
        wanted = self.manager.contents.digests(context)
        self.exchange.ask(0, "k", source["address"], source["engines"][0], wanted, timeout_s=20.0)
        lent = self.event(Lent).event
        if lent.source is not None:
            pending = self.manager.import_block_table(context, lent.table)
            self.exchange.pull("k", lent.source, pending, 20.0)
            happened = self.event(PullEvent)
            assert not happened.event.error, happened.event.error
            self.manager.commit_import(context, pending, happened.proof)
        found = context.start_idx
        return self._finished(request, context), found, lent.error

    def compute(self, prompt: list[int]) -> list[int]:
        """Returns the next tokens of a prompt, whose pages are cached afterwards."""
        request = Request("c", prompt, NEW)
        context = self.loop.context_for(request)
        self.manager.external_claim("c")
        return self._finished(request, context)

    def _finished(self, request: Request, context: TextContext) -> list[int]:
        assert self.manager.maybe_reserve(context)
        self.loop.adopt(request, context)
        tokens: list[int] = []
        while self.loop.has_work:
            tokens += [output.token for output in self.loop.step() if output.token is not None]
        return tokens

    @property
    def source(self) -> dict[str, Any]:
        return {"address": self.exchange.address, "engines": [self.exchange.engine_id(0)]}

    def poll_until(self, done: Callable[[], bool]) -> None:
        """Answers readers until a condition holds."""
        end = time.monotonic() + ANSWER_S
        while not done():
            self.exchange.poll()
            time.sleep(1e-4)
            assert time.monotonic() < end

    def close(self) -> None:
        self.exchange.close()


def test_a_hugging_face_loop_reads_what_sglang_has_computed(
    empty: Peers, model_dir: Path, page_size: int, reference: Any, expected: Callable[[list[int]], list[int]]
) -> None:
    one = empty[0]
    asked(one, PROMPT)
    told = one.exchange()
    reader = HFSide(model_dir, page_size, told)
    try:
        tokens, found, error = reader.run(told["source"])
    finally:
        reader.close()
    assert (tokens, found, error) == (expected(PROMPT), whole(PROMPT, page_size), "")
    assert tokens == reference(PROMPT, NEW)


def test_sglang_reads_what_a_hugging_face_loop_has_computed(
    empty: Peers, model_dir: Path, page_size: int, expected: Callable[[list[int]], list[int]]
) -> None:
    one = empty[0]
    before = one.exchange()
    lender = HFSide(model_dir, page_size, before)
    try:
        assert lender.compute(PROMPT) == expected(PROMPT)
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(asked, one, PROMPT, kv_hints=hints(lender.source))
            lender.poll_until(asking.done)
        answer = asking.result()
        assert (answer["tokens"], answer["cached"]) == (expected(PROMPT), whole(PROMPT, page_size))
        pulled = one.exchange()["peer_prefix_tokens"] - before.get("peer_prefix_tokens", 0)
        assert pulled == whole(PROMPT, page_size)
        assert lender.exchange.lending.pages_lent == whole(PROMPT, page_size) // page_size
        lender.poll_until(lambda: lender.manager.num_leased_blocks == 0)
    finally:
        lender.close()


@pytest.mark.parametrize("name", ["model", "weights at the start", "computed in", "rope", "group 0"])
def test_what_must_agree_with_a_hugging_face_loop_is_named(
    empty: Peers, model_dir: Path, page_size: int, expected: Callable[[list[int]], list[int]], name: str
) -> None:
    one = empty[0]
    asked(one, PROMPT)
    told = one.exchange()
    assert name in told["compatibility"]
    told["compatibility"][name] = "another one"
    reader = HFSide(model_dir, page_size, told)
    try:
        tokens, found, error = reader.run(told["source"])
    finally:
        reader.close()
    assert (tokens, found) == (expected(PROMPT), 0)
    assert name in error
    assert "another one" in error


def test_a_question_wakes_a_scheduler_that_sleeps(empty: Peers) -> None:
    assert [server.exchange()["is_woken"] for server in empty] == [True, False]  # the second one does not sleep


@pytest.mark.parametrize(
    ("ranks", "place", "words"),
    [
        (2, "tcp://127.0.0.1:0", "does not support --tp-size 2"),
        (1, "127.0.0.1:0", "'127.0.0.1:0': tcp://HOST:PORT is needed"),
    ],
)
def test_what_is_not_supported_is_named_at_startup(engine: Any, ranks: int, place: str, words: str) -> None:
    from scheduler_adapters.sglang.exchange import exchange_pages

    context: Any = SimpleNamespace(tp_size=ranks, server_args=engine.scheduler.server_args)
    with pytest.raises(InvalidEngineError, match=words):
        exchange_pages(engine.cache, context, Settings(exchange=place))
    assert engine.cache.exchange is None
