"""Both servers in one process, polled in turns; the engines, the sockets and the model are the real ones."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvcache.manager import PagedKVCacheManager
from scheduler_adapters import messages as msg
from scheduler_adapters.disagg import DecodeServer, PrefillServer, received
from scheduler_adapters.hf import HFRunner, kv_params_of, num_layers_of, reference_tokens
from scheduler_adapters.loop import ServingLoop
from scheduler_adapters.tiny import ByteTokenizer
from scheduler_adapters.transfer_thread import TransferThread
from transfer.engine import KVTransferEngine

HEAD = "What a page holds, who may write to it, and when it may be used again. " * 3
PROMPTS = [ByteTokenizer().encode(text) for text in (HEAD + "First?", "short", HEAD + "Second?", HEAD + "First?")]
NEW = 10


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Any]) -> Any:
    return make_model("llama")


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    return [reference_tokens(model, prompt, NEW) for prompt in PROMPTS]


class Service:
    """A prefill and a decode server, and the client's end."""

    def __init__(self, model: Any, directory: Path, pages: tuple[int, int], tp: int = 1, decode_page: int = 16) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        sockets = [self.context.socket(kind) for kind in (zmq.ROUTER, zmq.DEALER, zmq.PAIR, zmq.PAIR)]
        router, dealer, self.client, front = sockets
        for bound, connected, name in ((router, dealer, "p"), (self.client, front, "f")):
            bound.bind(f"ipc://{directory}/{name}")
            connected.connect(f"ipc://{directory}/{name}")
        self.loops, self.threads = [], []
        for name, count, page_size in (("prefill", pages[0], 16), ("decode", pages[1], decode_page)):
            params = kv_params_of(model.config, page_size=page_size, n_devices=tp)
            layers = num_layers_of(model.config)
            memory = count * page_size * params.bytes_per_token(layers)
            manager = PagedKVCacheManager(params, 4, 1024, layers, ["cpu"] * tp, available_cache_memory=memory)
            engine = KVTransferEngine(name, manager.device_tensors, total_num_pages=manager.total_num_pages + 1)
            self.loops.append(ServingLoop(manager, HFRunner(model), 128))
            self.threads.append(TransferThread(engine))
        self.prefill = PrefillServer(self.loops[0], self.threads[0], router)
        self.decode = DecodeServer(self.loops[1], self.threads[1], dealer, front)
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, msg.Tokens] = {}

    def close(self) -> None:
        for thread in self.threads:
            thread.close()
        self.context.destroy(linger=0)

    def submit(self, prompts: list[list[int]], new: int = NEW) -> None:
        for number, prompt in enumerate(prompts):
            self.decode.submit(msg.Submit(request_id=f"r{number}", prompt=tuple(prompt), max_new_tokens=new))
            self.tokens[f"r{number}"] = []

    def poll(self) -> None:
        for server in (self.prefill, self.decode):
            server.poll()
        for (data,) in received(self.client):
            message = msg.decode(data)
            assert isinstance(message, msg.Tokens)
            assert message.request_id not in self.ended, "a token after the end"
            self.tokens.setdefault(message.request_id, []).extend(message.tokens)
            if message.finished:
                self.ended[message.request_id] = message

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            self.poll()
            assert time.monotonic() < deadline, f"waited 30 s for {what}"

    def serve(self, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
        self.ended.clear()
        self.submit(prompts, new)
        self.until(lambda: len(self.ended) == len(prompts), "the last token")
        return [self.tokens[f"r{number}"] for number in range(len(prompts))]

    def assert_nothing_held(self) -> None:
        self.until(lambda: not (self.prefill.open_requests or self.decode.open_requests), "the last notification")
        assert [server.stats().pages_held for server in (self.prefill, self.decode)] == [0, 0]


@pytest.fixture
def start(model: Any, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    services = []

    def make(pages: tuple[int, int] = (100, 100), **options: Any) -> Service:
        services.append(Service(model, tmp_path, pages, **options))
        return services[-1]

    yield make
    for service in services:
        service.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_prompts_prefilled_here_and_decoded_there_give_the_models_own_tokens(
    start: Callable[..., Service], expected: list[list[int]], tp: int
) -> None:
    service = start(tp=tp)
    assert service.serve(PROMPTS) == expected
    service.assert_nothing_held()
    decode, prefill = service.decode.stats(), service.prefill.stats()
    pages = [-(-len(prompt) // 16) for prompt in PROMPTS]
    assert decode.pages_pulled + decode.pages_reused == sum(pages)
    assert decode.pages_pulled >= pages[0]
    page_bytes = service.threads[1].call(lambda engine: engine.bytes_per_page)
    assert decode.bytes_pulled == decode.pages_pulled * page_bytes * tp
    assert decode.pull_seconds > 0
    assert prefill.prompt_tokens == sum(map(len, PROMPTS))
    assert prefill.cached_tokens > 0


def test_decode_pulls_only_what_it_lacks(start: Callable[..., Service], expected: list[list[int]]) -> None:
    service = start()
    service.serve(PROMPTS[:1])
    before = service.decode.stats().pages_pulled
    assert service.serve(PROMPTS[:1]) == expected[:1]
    full, rest = divmod(len(PROMPTS[0]), 16)
    assert rest
    assert service.decode.stats().pages_pulled - before == 1  # the last page, which is not full
    assert service.decode.stats().pages_reused == full
    service.assert_nothing_held()


def test_a_prompt_that_is_cached_in_full_pages_needs_no_read(start: Callable[..., Service], model: Any) -> None:
    service = start()
    prompt = PROMPTS[0][:64]
    wanted = reference_tokens(model, prompt, NEW)
    assert service.serve([prompt]) == [wanted]
    before = service.decode.stats().pages_pulled
    assert service.serve([prompt]) == [wanted]
    assert service.decode.stats().pages_pulled == before
    service.assert_nothing_held()


@pytest.mark.parametrize("pages", [(100, 18), (18, 100), (18, 18)])
def test_pools_for_one_request_at_a_time_serve_them_all(
    start: Callable[..., Service], model: Any, pages: tuple[int, int]
) -> None:
    service = start(pages)
    prompts = [[number, *PROMPTS[0]] for number in range(4)]  # their first tokens differ: no page is shared
    assert service.serve(prompts) == [reference_tokens(model, prompt, NEW) for prompt in prompts]
    service.assert_nothing_held()


def test_decode_recomputes_what_it_preempted(start: Callable[..., Service], model: Any) -> None:
    service = start((100, 12))
    prompts = [[7] * 60, [8] * 60, [9] * 30]
    assert service.serve(prompts, 60) == [reference_tokens(model, prompt, 60) for prompt in prompts]
    assert service.decode.stats().preemptions > 0
    service.assert_nothing_held()


def test_what_was_preempted_comes_before_what_has_just_arrived(start: Callable[..., Service]) -> None:
    service = start((100, 12))
    service.submit([[7] * 60, [8] * 60], 60)
    service.until(lambda: service.decode.stats().preemptions, "a preemption")
    service.decode.submit(msg.Submit(request_id="late", prompt=(9,) * 20, max_new_tokens=4))
    service.until(lambda: len(service.ended) == 3, "the last token")
    assert [len(service.tokens[request_id]) for request_id in ("r0", "r1", "late")] == [60, 60, 4]
    assert next(iter(service.ended)) == "r0"
    service.assert_nothing_held()


def test_one_token_or_an_end_token_at_once_needs_no_decode(
    start: Callable[..., Service], expected: list[list[int]]
) -> None:
    service = start()
    assert service.serve(PROMPTS, 1) == [tokens[:1] for tokens in expected]
    service.loops[1].runner.eos_token_ids = frozenset({expected[0][0]})
    assert service.serve(PROMPTS[:1]) == [expected[0][:1]]
    assert service.ended["r0"].finished == "eos"
    assert service.decode.stats().pages_pulled == 0
    service.assert_nothing_held()


@pytest.mark.parametrize(("pages", "where"), [((100, 8), "decode"), ((8, 100), "prefill")])
def test_a_prompt_that_fits_only_one_side_fails_alone(
    start: Callable[..., Service], expected: list[list[int]], pages: tuple[int, int], where: str
) -> None:
    service = start(pages)
    tokens = service.serve(PROMPTS[:2])
    assert tokens == [[], expected[1]], where
    assert service.ended["r0"].finished == "error"
    assert "'r0'" in service.ended["r0"].error
    assert "128 tokens" in service.ended["r0"].error
    service.assert_nothing_held()


def test_an_id_that_is_on_its_way_is_refused(start: Callable[..., Service], expected: list[list[int]]) -> None:
    service = start()
    service.submit(PROMPTS[:1])
    service.decode.submit(msg.Submit(request_id="r0", prompt=(1,), max_new_tokens=1))
    (refusal,) = [msg.decode(data) for (data,) in wait_for_messages(service)]
    assert refusal == msg.Tokens(request_id="r0", finished="error", error=refusal.error)
    assert "on its way" in refusal.error
    service.until(lambda: service.ended, "the first request")
    assert service.tokens["r0"] == expected[0]
    service.assert_nothing_held()


def wait_for_messages(service: Service) -> list[list[bytes]]:
    assert service.client.poll(5000)
    return list(received(service.client))


def test_a_pull_that_fails_fails_its_request_and_gives_every_page_back(
    start: Callable[..., Service], expected: list[list[int]]
) -> None:
    service = start()
    service.until(lambda: service.decode.connected, "the hand-shake")
    service.threads[1].call(lambda engine: engine.disconnect("prefill"))  # as after the loss of the peer
    assert service.serve(PROMPTS[:1]) == [expected[0][:1]]
    assert service.ended["r0"].finished == "error"
    assert "prefill" in service.ended["r0"].error
    service.assert_nothing_held()


def test_pages_of_another_size_are_refused_before_a_byte_moves(start: Callable[..., Service]) -> None:
    service = start(decode_page=32)
    with pytest.raises(Exception, match="bytes"):
        service.until(lambda: service.decode.connected, "the hand-shake")
