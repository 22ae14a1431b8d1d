"""Inputs that end or hang vLLM's own connector. With this connector, each input fails only its own request, as the
policy says.
"""

import logging
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm_engine.engine import Engine, Shape, expected_tokens, run_until
from tests.vllm_engine.test_engine import PROMPT, assert_empty, prefilled, served

Make = Callable[..., Engine]
Params = dict[str, Any]


def closed_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def without(key: str) -> Callable[[Params], object]:
    return lambda params: {name: value for name, value in params.items() if name != key}


def with_(**changes: Any) -> Callable[[Params], object]:
    return lambda params: params | changes


# Each case is named after a row in 3.3 and 2.8 of `reference/vllm.md`, if it is listed there.
BAD: dict[str, Callable[[Params], object]] = {
    "remote_host missing": without("remote_host"),
    "remote_host that no host can be": with_(remote_host="tcp://a b"),
    "remote_port missing": without("remote_port"),
    "remote_port out of range": with_(remote_port=1 << 20),
    "dead port": lambda params: params | {"remote_port": closed_port()},
    "remote_engine_id missing": without("remote_engine_id"),
    "another engine's id": with_(remote_engine_id="nobody"),
    "remote_request_id missing": without("remote_request_id"),
    "lease_id missing": without("lease_id"),
    "another lease": with_(lease_id="0x1234"),
    "remote_num_tokens of zero": with_(remote_num_tokens=0),
    "do_remote_prefill that is no truth value": with_(do_remote_prefill="yes"),
    "a mode of transfer that there is not": with_(transfer_mode="push"),
    "both directions": with_(do_remote_decode=True),
}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_a_bad_input_fails_its_request_alone(make: Make, spoil: Callable[[Params], object], policy: str) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer", Shape(policy=policy))
    params = prefilled(prefill, "p", PROMPT)
    decode.add("bad", PROMPT, 3, spoil(params))
    run_until([prefill, decode], lambda: decode.finish_reason("bad"))
    if policy == "fail":
        assert (decode.finish_reason("bad"), decode.tokens("bad")) == ("error", [])
    else:
        assert decode.tokens("bad") == expected_tokens(PROMPT, 3, decode.shape)
    good = PROMPT[::-1]
    assert served([prefill, decode], "good", good, 3, prefilled(prefill, "q", good)) == expected_tokens(
        good, 3, decode.shape
    )
    # The lease of the wrong params was read or has ended. In both cases it ends long before it would expire.
    decode.add("again", PROMPT, 3, params)
    run_until([prefill, decode], lambda: decode.finish_reason("again"))
    assert decode.tokens("again") in ([], expected_tokens(PROMPT, 3, decode.shape))
    assert_empty(prefill, decode)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_prefill_offers_nothing_to_a_request_that_asks_for_both_directions(
    make: Make, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    prefill = make("kv_producer", Shape(policy=policy))
    with caplog.at_level(logging.WARNING, "pagewire.vllm"):
        prefill.add("both", PROMPT, 3, {"do_remote_decode": True, "do_remote_prefill": True})
        run_until([prefill], lambda: prefill.finish_reason("both"))
    assert prefill.tokens("both") == ([] if policy == "fail" else expected_tokens(PROMPT, 3, prefill.shape))
    (message,) = [text for record in caplog.records if "'both'" in (text := record.getMessage())]
    assert "kv_transfer_params['do_remote_decode'] is True: do_remote_prefill is true as well" in message
    assert not any(output.kv_transfer_params for output in prefill.outputs)
    assert_empty(prefill)


@pytest.mark.parametrize("params", [{}, {"do_remote_prefill": False}, {"strange": 1}], ids=str)
def test_params_that_ask_for_nothing_are_no_error(make: Make, params: Params) -> None:
    decode = make("kv_consumer")
    assert served([decode], "d", PROMPT, 2, params) == expected_tokens(PROMPT, 2, decode.shape)
    assert_empty(decode)


def test_two_readers_of_one_lease_do_not_disturb_prefill(make: Make) -> None:
    """When the second reader asks, the pages may belong to other requests. The second reader then fails, unless it has
    read the pages before.
    """
    prefill, decode = make("kv_producer"), make("kv_consumer")
    params = prefilled(prefill, "p", PROMPT)
    assert served([prefill, decode], "first", PROMPT, 2, params) == expected_tokens(PROMPT, 2, decode.shape)
    run_until([prefill], lambda: prefill.free_blocks == prefill.free_at_start)
    other = make("kv_consumer")
    other.add("second", PROMPT, 2, params)
    run_until([prefill, other], lambda: other.finish_reason("second"))
    assert other.finish_reason("second") == "error"
    assert_empty(prefill, decode, other)


@pytest.mark.parametrize(("policy", "level"), [("fail", logging.ERROR), ("recompute", logging.WARNING)])
@pytest.mark.parametrize("name", ["remote_num_tokens of zero", "another lease", "both directions"])
def test_a_bad_input_is_logged_and_counted_once_and_is_a_warning_if_the_prompt_is_computed(
    make: Make, caplog: pytest.LogCaptureFixture, name: str, policy: str, level: int
) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer", Shape(policy=policy, tp_size=2))
    params = prefilled(prefill, "p", PROMPT)
    decode.add("bad", PROMPT, 3, BAD[name](params))
    with caplog.at_level(logging.INFO, "pagewire.vllm"):
        run_until([prefill, decode], lambda: decode.finish_reason("bad"))
        decode.step()
    told = [record for record in caplog.records if record.getMessage().startswith("request 'bad'")]
    assert [record.levelno for record in told] == [level]
    assert told[0].getMessage().endswith("; its prompt is computed here instead") == (policy == "recompute")
    counts: Counter[str] = Counter()
    for stats in decode.reported:
        counts.update({key: stats[key] for key in ("failed_pulls", "malformed_params")})
    assert +counts == Counter(failed_pulls=1, malformed_params=int(name != "another lease"))


def test_prefill_says_that_it_offers_nothing_if_do_remote_decode_is_no_boolean(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = make("kv_producer")
    with caplog.at_level(logging.WARNING, "pagewire.vllm"):
        prefill.add("strange", PROMPT, 1, {"do_remote_decode": "yes"})
        run_until([prefill], lambda: prefill.finish_reason("strange"))
    (text,) = [record.getMessage() for record in caplog.records if "'strange'" in record.getMessage()]
    assert "kv_transfer_params['do_remote_decode'] is 'yes': true or false is expected" in text
    assert sum(stats["malformed_params"] for stats in prefill.reported) == 1
    assert_empty(prefill)
