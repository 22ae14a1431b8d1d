"""Tests all of `pagewire serve` in separate processes, over TCP with keys, with OpenAI's own client."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import torch

from pagewire.cli import main
from scheduler_adapters.hf.tiny import EOS
from scheduler_adapters.service.fleet import PREFIX, RunFolder
from tests.forked import ForkedProgram
from tests.scheduler_adapters.front.served import COMMON, WITHIN_S, Served, complete, encoded, streamed, tokens_of
from tests.scheduler_adapters.hf.test_groups import MODELS as GROUPED
from tests.scheduler_adapters.leftovers import KILLED_IN_SHARED_MEMORY
from tests.scheduler_adapters.serving import own_tokens

pytestmark = pytest.mark.slow
HEAD = "What a page holds, who may write to it, and when it may be used again. " * 2


@contextmanager
def fleet(folder: Path, *more: str) -> Iterator[Served]:
    """Two processes of each kind with a shared secret. The front gets the other arguments."""
    served = Served(folder)
    secret = served.folder / "secret"
    secret.write_text("a secret of the tests, of enough bytes")
    secret.chmod(0o600)
    keys = ("--secret", f"file:{secret}")
    served.keys = keys  # type: ignore[attr-defined]
    try:
        served.start("front", "front", "--address-file", str(served.addresses), "--http-port", "0", *keys, *more)
        for number in (1, 2):
            served.join("prefill", f"p{number}", *keys)
            served.join("decode", f"d{number}", *keys)
        served.until_there(2, 2)
        yield served
    finally:
        served.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with fleet(tmp_path_factory.mktemp("served")) as found:
        yield found


def expected(model: Any, prompt: str, new: int) -> list[int]:
    return own_tokens(model, encoded(prompt), new)


def test_the_client_of_openai_gets_the_models_own_tokens(served: Served, tiny_model: Any) -> None:
    client = served.client
    assert [model.id for model in client.models.list()] == ["pagewire"]
    theirs = expected(tiny_model, HEAD + "First?", 24)
    for prompt in (HEAD + "First?", encoded(HEAD + "First?")):
        answer = complete(client, prompt)
        assert tokens_of(answer) == theirs
        assert answer.choices[0].finish_reason == ("stop" if theirs[-1] == EOS else "length")
        assert answer.usage.completion_tokens == len(theirs)
        assert answer.usage.prompt_tokens == len(encoded(HEAD + "First?"))
    assert answer.usage.prompt_tokens_details.cached_tokens > 100, "the same prompt again"
    tokens, text, last = streamed(client, HEAD + "Second?", 24)
    assert tokens == expected(tiny_model, HEAD + "Second?", 24)
    assert text == bytes(token for token in tokens if token < 256).decode(errors="replace")
    assert last.usage.completion_tokens == len(tokens)
    served.until_nothing_is_held()


def test_many_at_once_are_served_by_all(served: Served, tiny_model: Any) -> None:
    client, prompts = served.client, [f"{number}: {HEAD}" for number in range(24)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda prompt: tokens_of(complete(client, prompt, 12)), prompts))
    assert answers == [expected(tiny_model, prompt, 12) for prompt in prompts]
    stats = served.until_nothing_is_held()
    assert all(stats[name]["prompt_tokens"] for name in ("p1", "p2"))
    assert all(stats[name]["pages_pulled"] for name in ("d1", "d2"))


def test_with_ignore_eos_a_request_runs_to_its_length(served: Served, tiny_model: Any) -> None:
    prompt = "20 of those"
    ended = expected(tiny_model, prompt, 24)
    assert ended[-1] == EOS
    assert len(ended) < 24
    greedy = encoded(prompt)
    with torch.inference_mode():
        for _ in range(24):
            greedy.append(int(tiny_model(torch.tensor([greedy])).logits[0, -1].argmax()))
    extra = {"return_token_ids": True, "ignore_eos": True, "min_tokens": 24}
    answer = served.client.completions.create(model="pagewire", prompt=prompt, max_tokens=24, extra_body=extra)
    assert tokens_of(answer) == greedy[-24:]
    assert answer.choices[0].finish_reason == "length"
    assert tokens_of(complete(served.client, prompt)) == ended


def test_errors_have_openais_form(served: Served) -> None:
    client = served.client
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, "x", temperature=0.7)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="the model 'another' does not exist"):
        client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.BadRequestError, match="at most 2048 are allowed"):
        complete(client, "x", 2048)
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="pagewire", messages=[{"role": "user", "content": "x"}])


def test_a_request_may_name_the_processes_that_have_its_pages(served: Served, tiny_model: Any) -> None:
    """A router sends the next turn of a conversation to processes without its pages. The request names the processes
    that have the pages.
    """
    members = served.get("/fleet")

    def turn(prompt: list[int], decode: str, **params: Any) -> Any:
        client = served.client.with_options(base_url=f"{served.url}/processes/{decode}/v1")
        extra = {"return_token_ids": True, "ignore_eos": True, "kv_transfer_params": params}
        return client.completions.create(model="pagewire", prompt=prompt, max_tokens=64, extra_body=extra)

    sources = [members[name]["kv_source"] for name in ("d1", "p1")]
    for number in range(5):  # on a busy machine, a source may not answer within its second
        first = encoded(f"Conversation {number}. " + 5 * HEAD)
        answer = tokens_of(turn(first, "d1", prefill_process="p1"))
        second = [*first, *answer, *encoded("And then?")[1:]]
        before = served.get("/fleet")["p2"]["prefixes"].get("pulled", 0)
        found = turn(second, "d2", prefill_process="p2", kv_sources=sources)
        theirs = own_tokens(tiny_model, second, 64)
        assert tokens_of(found)[: len(theirs)] == theirs
        pulled = served.get("/fleet")["p2"]["prefixes"].get("pulled", 0) - before
        cached = found.usage.prompt_tokens_details.cached_tokens
        if (pulled, cached) == (1, (len(first) + len(answer) - 1) // 16 * 16):
            break
    else:
        pytest.fail(f"pages were pulled {pulled} times, {cached} tokens were cached")
    served.until_nothing_is_held()


def test_a_source_on_a_host_that_is_not_allowed_is_not_asked(served: Served, tiny_model: Any) -> None:
    far = [{"address": "tcp://192.0.2.1:9", "engines": ["p/0"]}]
    prompt = 7 * HEAD
    extra = {"return_token_ids": True, "kv_transfer_params": {"prefill_process": "p1", "kv_sources": far}}
    answer = served.client.completions.create(model="pagewire", prompt=prompt, max_tokens=24, extra_body=extra)
    assert tokens_of(answer) == expected(tiny_model, prompt, 24)
    assert served.get("/fleet")["p1"]["prefixes"]["unanswered"] == 1


@pytest.mark.parametrize(
    ("sources", "reason"),
    [
        ("p1", "array"),
        ([{"address": 1, "engines": ["p1/0"]}], r"`\$\[0\].address`"),
        ([{"address": "tcp://a:1", "engines": []}], r"`\$\[0\].engines`"),
        ([{"address": "ipc:///tmp/x", "engines": ["p1/0"]}], "'ipc:///tmp/x' is not tcp://host:port"),
        (9 * [{"address": "tcp://a:1", "engines": ["p1/0"]}], "length <= 8"),
    ],
)
def test_invalid_sources_are_refused_by_name(served: Served, sources: Any, reason: str) -> None:
    extra = {"kv_transfer_params": {"kv_sources": sources}}
    with pytest.raises(openai.BadRequestError, match=f"kv_sources: .*{reason}") as caught:
        served.client.completions.create(model="pagewire", prompt="x", extra_body=extra)
    assert caught.value.param == "kv_transfer_params"


def test_a_client_that_hangs_up_gives_its_pages_back(served: Served) -> None:
    parts = complete(served.client, HEAD, 1900, stream=True)
    assert next(iter(parts)).choices
    parts.close()
    url = urlsplit(served.url)
    assert url.hostname
    assert url.port
    body = b'{"model": "pagewire", "prompt": "to the end", "max_tokens": 1900}'
    with socket.create_connection((url.hostname, url.port)) as waiting:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        waiting.sendall(head.encode() + body)
        served.until(
            lambda: any(one["open_requests"] for one in served.get("/fleet").values()), "the request to be on its way"
        )
    stats = served.until_nothing_is_held()
    assert sum(one["failed"] for name, one in stats.items() if name.startswith("d")) == 0


def test_processes_that_die_or_drain_cost_no_request(tmp_path: Path, tiny_model: Any) -> None:
    """One process of each kind is killed, and all other initial processes drain. Processes that have joined meanwhile
    continue to serve.
    """
    figures = tmp_path / "figures.json"
    with fleet(tmp_path, "--json", str(figures)) as served:
        check_dying_and_draining(served, tiny_model)
        served.signal("front", signal.SIGTERM)
        assert served.ended("front") == 0
    found = json.loads(figures.read_text())
    assert sum(found["requests"].values()) > 0
    assert {"p2", "d2", "p3", "d3"} == set(found["processes"])
    assert all(one["pages_held"] == 0 for one in found["processes"].values())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_only_the_front_writes_the_figures(role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert main(["serve", role, "--front", "tcp://127.0.0.1:1", "--json", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"pagewire serve: error: --json {str(path)!r}: a {role} process writes no file; give --json to the front\n"
    )


def check_dying_and_draining(served: Served, tiny_model: Any) -> None:
    client, prompts = served.client, [f"{number} of those. {HEAD}" for number in range(8)]
    theirs = [expected(tiny_model, prompt, 150) for prompt in prompts]
    keys = served.keys  # type: ignore[attr-defined]

    def all_with(name: str, number: signal.Signals) -> None:
        done: list[bool] = []

        def at_part(part: int) -> None:
            # At this part of the answer, the prefill process has run one prompt, or the decode process has run all
            # prompts.
            if part == (0 if name.startswith("p") else 5) and not done:
                done.append(True)
                served.signal(name, number)

        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda prompt: streamed(client, prompt, 150, at_part)[0], prompts))
        assert done
        assert results == theirs

    all_with("d1", signal.SIGKILL)
    served.join("decode", "d3", *keys)
    all_with("p1", signal.SIGKILL)
    assert "p1 is gone, or silent" in served.log("front")
    served.join("prefill", "p3", *keys)
    served.until_there(2, 2)
    all_with("d2", signal.SIGTERM)
    assert served.ended("d2") == 0
    all_with("p2", signal.SIGTERM)
    assert served.ended("p2") == 0
    served.until_there(1, 1)
    for name in ("d2", "p2"):
        assert f"{name} has drained: 0 pages held" in served.log("front")
    assert tokens_of(complete(client, prompts[0], 150)) == theirs[0]
    assert set(served.until_nothing_is_held()) == {"p3", "d3"}


def test_a_process_that_is_stopped_costs_no_request_and_comes_back(served: Served, tiny_model: Any) -> None:
    prompts = [f"{number} to the stopped. {HEAD}" for number in range(6)]
    theirs = [expected(tiny_model, prompt, 100) for prompt in prompts]
    for name in ("d1", "p1"):
        stopped: list[str] = []

        def at_part(_: int, name: str = name, stopped: list[str] = stopped) -> None:
            if not stopped:
                stopped.append(name)
                served.signal(name, signal.SIGSTOP)

        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(lambda prompt: streamed(served.client, prompt, 100, at_part)[0], prompts))
        assert results == theirs
        served.until(lambda: f"{name} is gone, or silent" in served.log("front"), "the front to notice")  # noqa: B023
        served.signal(name, signal.SIGCONT)
        served.until_there(2, 2)
        served.until_nothing_is_held()


def test_one_command_starts_all_processes_and_ends_them_when_all_requests_have_ended(
    tmp_path: Path, tiny_model: Any
) -> None:
    served = Served(tmp_path)
    try:
        served.start("all", "all", "--address-file", str(served.addresses), "--http-port", "0", *COMMON)
        served.until_there(1, 1)
        theirs = expected(tiny_model, HEAD, 150)

        def at_part(part: int) -> None:
            if part == 3:
                served.signal("all", signal.SIGTERM)

        assert streamed(served.client, HEAD, 150, at_part)[0] == theirs
        assert served.ended("all") == 0
        for name in ("prefill-1", "decode-1"):
            assert f"{name} has drained: 0 pages held" in served.log("all")
    finally:
        served.close()


def answers_of_a_fleet_that_drains(folder: Path, prompts: list[str], *more: str) -> list[list[int]]:
    """Runs prompts in a pool that is so small that requests are preempted. One client hangs up. SIGTERM arrives while
    steps are in flight.
    """
    served, figures = Served(folder), folder / "figures.json"
    small = (*COMMON, "--cache-mb", "0.75", "--json", str(figures))
    is_signalled, accepted = threading.Event(), threading.Semaphore(0)

    def at_part(part: int) -> None:
        if part == 15 and not is_signalled.is_set():
            is_signalled.set()
            for _ in prompts:  # a front that drains refuses new connections
                assert accepted.acquire(timeout=60)
            served.signal("all", signal.SIGTERM)

    try:
        served.start("all", "all", "--address-file", str(served.addresses), "--http-port", "0", *small, *more)
        served.until_there(1, 1)
        client = served.client
        leaving = complete(client, "hangs up", 300, stream=True)
        assert next(iter(leaving)).choices
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = [pool.submit(streamed, client, prompt, 150, at_part, accepted.release) for prompt in prompts]
            leaving.close()
            answers = [one.result()[0] for one in asked]
        assert served.ended("all") == 0
        for name in ("prefill-1", "decode-1"):
            assert f"{name} has drained: 0 pages held" in served.log("all")
    finally:
        served.close()
    decode = json.loads(figures.read_text())["processes"]["decode-1"]
    assert decode.get("preemptions"), decode
    assert "failed" not in decode, "which is 0"
    return answers


@pytest.mark.ci
@pytest.mark.parametrize("more", [(), ("--overlap",)], ids=["each", "ahead"])
def test_steps_planned_ahead_give_the_same_tokens(more: tuple[str, ...], tmp_path: Path, tiny_model: Any) -> None:
    prompts = [f"{number} to the stopped. {HEAD}" for number in range(8)]  # Some of the answers are long.
    answers = answers_of_a_fleet_that_drains(tmp_path, prompts, *more)
    assert answers == [expected(tiny_model, prompt, 150) for prompt in prompts]


def test_recurrent_models_are_refused_with_overlap(tmp_path: Path, make_model: Any) -> None:
    make_model("bamba").save_pretrained(tmp_path / "model")
    served = Served(tmp_path)
    options = ("--front", "tcp://127.0.0.1:1", "--model", str(tmp_path / "model"), *COMMON)
    try:
        served.start("d1", "decode", *options, "--overlap")
        assert served.ended("d1") == 2
        assert "does not support recurrent states" in served.log("d1")
        assert "serve without --overlap" in served.log("d1")
    finally:
        served.close()


# A program that sends itself a signal when its address file or its log line appears.
SIGNALLED = """
import logging, os, signal, sys
from pathlib import Path
from pagewire.cli import main
number, moment, addresses = signal.Signals[sys.argv[1]], sys.argv[2], sys.argv[3]
replace = Path.replace
def left(self, target):
    found = replace(self, target)
    if moment == "file" and str(target) == addresses:
        os.kill(os.getpid(), number)
    return found
Path.replace = left
class Log(logging.Handler):
    def emit(self, record):
        if moment == "line" and " serves at " in record.getMessage():
            os.kill(os.getpid(), number)
logging.getLogger().addHandler(logging.StreamHandler())
logging.getLogger().addHandler(Log())
sys.exit(main(["serve", "front", "--http-port", "0", "--address-file", addresses, "--json", sys.argv[4]]))
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(("number", "moment"), [("SIGTERM", "line"), ("SIGINT", "line"), ("SIGTERM", "file")])
def test_a_signal_that_follows_at_once_when_the_front_says_that_it_serves_drains_it(
    tmp_path: Path, number: str, moment: str
) -> None:
    addresses, figures = tmp_path / "addresses", tmp_path / "figures.json"
    arguments = [number, moment, str(addresses), str(figures)]
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert json.loads(figures.read_text())["processes"] == {}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_next_run_removes_shared_memory_that_a_killed_process_left(tmp_path: Path, role: str) -> None:
    code = f"{KILLED_IN_SHARED_MEMORY}\nfrom pagewire.cli import main\nmain()"
    command = [sys.executable, "-c", code, "serve", role, "--front", "tcp://127.0.0.1:1", *COMMON]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "UCX_POSIX_DIR": str(tmp_path)}
    with tempfile.TemporaryFile() as log:
        process = ForkedProgram(command, log, environment)
        assert process.wait(WITHIN_S) == -signal.SIGXFSZ
        process.stdin.close()
    assert list(tmp_path.glob(f"{PREFIX}*/ucx_shm_posix_*"))
    RunFolder(tmp_path).close()
    assert not list(tmp_path.iterdir())


def test_serving_other_hosts_needs_keys(tmp_path: Path) -> None:
    served = Served(tmp_path)
    try:
        served.start("front", "front", "--host", "10.1.2.3", "--http-port", "0")
        assert served.ended("front") == 2
        assert "give --secret or --keyring" in served.log("front")
    finally:
        served.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["gemma3", "llama4"])
def test_layers_with_windows_and_chunks_are_served_over_tables_of_their_own(
    tmp_path: Path, make_model: Any, kind: str
) -> None:
    """For a long prompt, decode pulls all pages of the full layers. In the other layers it pulls the pages that the
    next query sees.
    """
    name, changes = GROUPED[kind]
    model = make_model(name, num_hidden_layers=4, **changes)
    model.save_pretrained(tmp_path / "model")
    served = Served(tmp_path)
    prompts = [f"{number}: {HEAD * 2}" for number in range(6)]
    options = (
        "--model",
        str(tmp_path / "model"),
        "--served-model-name",
        "pagewire",
        "--decodes",
        "2",
    )
    try:
        served.start("all", "all", "--address-file", str(served.addresses), "--http-port", "0", *COMMON, *options)
        served.until_there(1, 2)
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda prompt: tokens_of(complete(served.client, prompt, 12)), prompts))
        assert answers == [expected(model, prompt, 12) for prompt in prompts]
        stats = served.until_nothing_is_held()
        pulled = sum(one["pages_pulled"] for one in stats.values())
        whole = sum(-(-len(encoded(prompt)) // 16) for prompt in prompts)
        # One of the four tables is pulled whole. If the prompt ends together with a chunk, the other tables have no
        # page to pull.
        assert whole <= pulled < 2 * whole
        served.signal("all", signal.SIGTERM)
        assert served.ended("all") == 0
    finally:
        served.close()
