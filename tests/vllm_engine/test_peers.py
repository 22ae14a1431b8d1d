"""A request brings the address of its source. A connector therefore contacts only hosts that are listed and have the
key. If a request names another host, only this request fails, as the policy says, and all of its blocks are freed.
"""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

import scheduler_adapters.vllm.config as vllm_config
from tests.vllm_engine.engine import Engine, Shape, expected_tokens, run_until, secret_of
from tests.vllm_engine.test_bad_params import closed_port
from tests.vllm_engine.test_engine import PROMPT, assert_empty, prefilled, served
from transfer.connector.config import Timing

Make = Callable[..., Engine]
POLICIES = ("fail", "recompute")


def shape(policy: str = "fail", **extra: Any) -> Shape:
    return Shape(policy=policy, extra={"host": "127.0.0.1", "port": 0} | extra)


def assert_failed(decode: Engine, request_id: str, prompt: list[int], count: int) -> None:
    """Checks that a load has failed: there is no token, or decode has computed the tokens itself."""
    if decode.shape.policy == "fail":
        assert (decode.finish_reason(request_id), decode.tokens(request_id)) == ("error", [])
    else:
        assert decode.tokens(request_id) == expected_tokens(prompt, count, decode.shape)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduces the time until a silent peer is given up from 5 s to 1.5 s."""
    monkeypatch.setattr(vllm_config, "Timing", functools.partial(Timing, handshake=1.5))


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records every address that a socket is connected to."""
    addresses: list[str] = []
    connect = zmq.Socket.connect

    def spy(socket: Any, address: str) -> Any:
        addresses.append(address)
        return connect(socket, address)

    monkeypatch.setattr(zmq.Socket, "connect", spy)
    return addresses


@pytest.mark.parametrize("where", ["file", "env"])
def test_an_engine_with_the_same_secret_is_read_from(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    secret = secrets.token_hex(32)
    path = tmp_path / "secret"
    path.write_text(f"{secret}\n")
    path.chmod(0o600)
    monkeypatch.setenv("FLEET_SECRET", secret)
    named = f"file:{path}" if where == "file" else "env:FLEET_SECRET"
    # The two sides read the secret from different sources. Only the value of the secret counts.
    prefill, decode = make("kv_producer", shape(secret=named)), make("kv_consumer", shape(secret=f"file:{path}"))
    tokens = served([prefill, decode], "d", PROMPT, 3, prefilled(prefill, "p", PROMPT))
    assert tokens == expected_tokens(PROMPT, 3, decode.shape)
    assert sum(sum(step.values()) for step in decode.scheduled) == 3, "decode must not compute any token of the prompt"
    assert_empty(prefill, decode)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("left", "right"), [("a", "b"), ("a", ""), ("", "b")], ids=["other", "theirs", "ours"])
def test_a_source_with_another_secret_or_none_fails_one_request(
    make: Make, caplog: pytest.LogCaptureFixture, left: str, right: str, policy: str
) -> None:
    # No request reads the pages of this engine.
    stranger = make("kv_producer", shape(secret=secret_of(left * 32), kv_lease_duration=2))
    friend = make("kv_producer", shape(secret=secret_of(right * 32)))
    decode = make("kv_consumer", shape(policy, secret=secret_of(right * 32)))
    params = prefilled(stranger, "p", PROMPT)
    with caplog.at_level(logging.WARNING, "pagewire.vllm"):
        decode.add("bad", PROMPT, 3, params)
        run_until([stranger, decode], lambda: decode.finish_reason("bad"))
    assert_failed(decode, "bad", PROMPT, 3)
    (message,) = {record.getMessage() for record in caplog.records if "'bad'" in record.getMessage()}
    assert f"no answer from tcp://127.0.0.1:{params['remote_port']} in " in message
    assert ("a peer with other keys" in message) == bool(right), "an engine with keys names them as a cause"
    assert not left or left * 32 not in message
    good = PROMPT[::-1]
    assert served([friend, decode], "good", good, 3, prefilled(friend, "q", good)) == expected_tokens(
        good, 3, decode.shape
    )
    assert_empty(stranger, friend, decode)


OUTSIDE = ("192.0.2.7", "10.0.0.1", "peer.example", "[2001:db8::7]", "0.0.0.0")  # noqa: S104  (nothing binds here)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("host", OUTSIDE)
def test_an_address_outside_of_allowed_peers_fails_one_request_and_opens_no_socket(
    make: Make, caplog: pytest.LogCaptureFixture, connected: list[str], host: str, policy: str
) -> None:
    prefill, decode = make("kv_producer", shape()), make("kv_consumer", shape(policy, allowed_peers=["192.0.3.0/24"]))
    params = prefilled(prefill, "p", PROMPT)
    with caplog.at_level(logging.WARNING, "pagewire.vllm"):
        decode.add("bad", PROMPT, 3, params | {"remote_host": host})
        run_until([prefill, decode], lambda: decode.finish_reason("bad"))
    assert_failed(decode, "bad", PROMPT, 3)
    assert not connected
    address = f"tcp://{host}:{params['remote_port']}"
    assert any(f"{address} is not in allowed_peers: " in record.getMessage() for record in caplog.records)
    # The failure has left no state behind, because the same pages can still be read from the right address.
    assert served([prefill, decode], "good", PROMPT, 3, params) == expected_tokens(PROMPT, 3, decode.shape)
    assert {f"tcp://127.0.0.1:{params['remote_port']}"} == set(connected)
    assert_empty(prefill, decode)


@pytest.mark.usefixtures("impatient")
def test_allowed_peers_may_be_contacted(make: Make, connected: list[str]) -> None:
    """This shows that the refusals in the tests above are caused by the list."""
    decode = make("kv_consumer", shape(allowed_peers="192.0.2.0/24, 10.0.0.1"))
    params = prefilled(make("kv_producer", shape()), "p", PROMPT)
    decode.add("far", PROMPT, 3, params | {"remote_host": "192.0.2.7"})
    run_until([decode], lambda: decode.finish_reason("far"))
    assert connected == [f"tcp://192.0.2.7:{params['remote_port']}"]
    assert_empty(decode)


def elsewhere(make: Make, kind: str) -> int:
    """Returns a port at which the request's engine cannot be found: another incarnation answers, another engine
    answers, or no process answers.
    """
    if kind == "nobody":
        return closed_port()
    other = make("kv_producer", shape(), engine_id="source" if kind == "another start" else "other")
    return prefilled(other, "theirs", PROMPT[:5])["remote_port"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["another start", "another engine", "nobody"])
def test_another_address_under_a_known_engine_id_ends_no_load_of_others(
    make: Make, caplog: pytest.LogCaptureFixture, kind: str, policy: str
) -> None:
    """When the wrong address arrives, some of the other requests are reading, and one request waits for room. More
    requests arrive while the wrong address is asked.
    """
    prefill = make("kv_producer", Shape(blocks=80), engine_id="source")
    decode = make("kv_consumer", Shape(blocks=40, policy=policy))
    known = prefilled(prefill, "known", PROMPT[:20])
    served([prefill, decode], "known", PROMPT[:20], 1, known)
    port = elsewhere(make, kind)
    # Each request takes 7 blocks, so five requests have room.
    prompts = {f"d{number}": [number, *PROMPT] for number in range(7)}
    params = {name: prefilled(prefill, name, prompt) for name, prompt in prompts.items()}
    for name in list(prompts)[:3]:
        decode.add(name, prompts[name], 3, params[name])
    decode.step()
    bad = prompts["d0"]
    with caplog.at_level(logging.WARNING, "pagewire.vllm"):
        decode.add("bad", bad, 3, params["d0"] | {"remote_port": port})
        decode.step()
        for name in list(prompts)[3:]:
            decode.add(name, prompts[name], 3, params[name])
        run_until([prefill, decode], lambda: all(decode.finish_reason(name) for name in [*prompts, "bad"]))
    assert_failed(decode, "bad", bad, 3)
    # Only decode's log is checked, because prefill also logs that a returned lease was not read.
    told = [record.getMessage() for record in caplog.records if record.name == "pagewire.vllm"]
    failed = [text for text in told if "its pages were freed before they were read" not in text]
    assert len(failed) == 1, "no load of another request has failed"
    assert "'bad'" in failed[0]
    assert f"127.0.0.1:{port}" in failed[0]
    # Decode asks for the lease and for the identity of the engine at the same time. Either answer refuses the load.
    if kind == "another start":
        answers = ("has ended, or engine 'source' never had it", "an engine with this id still answers at ")
        assert any(answer in failed[0] for answer in answers), failed[0]
    for name, prompt in prompts.items():
        assert decode.tokens(name) == expected_tokens(prompt, 3, decode.shape), name
    assert_empty(prefill, decode)
