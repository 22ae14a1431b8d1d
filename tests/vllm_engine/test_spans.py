"""Under vLLM, the load of a request with a trace has a span. vLLM's scheduler passes the trace headers to the
connector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.spans import exported, parts_of
from tests.vllm_engine import engine as engines
from tests.vllm_engine.engine import Engine, Shape, make_request, run_until
from tests.vllm_engine.test_engine import PROMPT, assert_empty, prefilled
from transfer.spans import PARTS

TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Engine]) -> Callable[..., Engine]:
    """Makes engines that are started with `--otlp-traces-endpoint`."""
    plain = engines.make_config

    def make_config(*args: Any, **options: Any) -> Any:
        config = plain(*args, **options)
        config.observability_config.otlp_traces_endpoint = "http://127.0.0.1:4317"
        return config

    monkeypatch.setattr(engines, "make_config", make_config)
    return make


def ask(decode: Engine, name: str, params: Any, headers: dict[str, str] | None = TRACE) -> None:
    request = make_request(name, PROMPT, 2, decode.shape.block_size, params)
    request.trace_headers = headers
    decode.scheduler.add_request(request)


def test_each_load_of_a_traced_request_has_a_span_whose_parts_sum_to_it(traced: Callable[..., Engine]) -> None:
    prefill, decode = traced("kv_producer"), traced("kv_consumer", Shape(tp_size=2))
    with exported() as spans:
        ask(decode, "loaded", prefilled(prefill, "p", PROMPT))
        run_until([prefill, decode], lambda: decode.finish_reason("loaded"))
        ask(decode, "here", prefilled(prefill, "q", PROMPT))
        run_until([prefill, decode], lambda: decode.finish_reason("here"))
        ask(decode, "plain", prefilled(prefill, "s", PROMPT), None)
        run_until([prefill, decode], lambda: decode.finish_reason("plain"))
        ask(decode, "bad", prefilled(prefill, "t", PROMPT) | {"lease_id": "none"})
        ask(decode, "left", prefilled(prefill, "u", PROMPT))
        decode.abort("left")
        run_until([prefill, decode], lambda: decode.finish_reason("bad"))
    found = {span.attributes["gen_ai.request.id"]: span for span in spans()}
    assert found.keys() == {"loaded", "here", "left"}, "params that cannot be read give no span"
    loaded = found["loaded"]
    parts = parts_of(loaded)
    assert [part for part in PARTS if parts[part] > 0] == ["room", "read", "fence", "commit"]
    assert sum(parts.values()) == pytest.approx((loaded.end_time - loaded.start_time) / 1e9, abs=2e-6)
    assert f"{loaded.context.trace_id:032x}" == TRACE["traceparent"].split("-")[1]
    assert loaded.attributes["pagewire.tokens"] == len(PROMPT)
    assert loaded.status.is_unset
    assert found["here"].status.is_unset
    assert "the request has ended" in found["left"].status.description
    assert decode.connector._scheduler._spans == {}
    assert_empty(decode)


def test_a_load_that_fails_says_why(traced: Callable[..., Engine]) -> None:
    prefill, decode = traced("kv_producer"), traced("kv_consumer")
    params = prefilled(prefill, "p", PROMPT)
    prefill.close()
    with exported() as spans:
        ask(decode, "lost", params)
        run_until([decode], lambda: decode.finish_reason("lost"), 30)
    (span,) = spans()
    assert "no answer from" in span.status.description
    assert parts_of(span)["fence"] == 0
    assert decode.connector._scheduler._spans == {}


def test_without_an_endpoint_of_vllms_nothing_is_timed(make: Callable[..., Engine]) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    with exported() as spans:
        decode.add("r", PROMPT, 2, prefilled(prefill, "p", PROMPT))
        run_until([prefill, decode], lambda: decode.finish_reason("r"))
    assert spans() == []
    (thread,) = decode.workers[0]._worker.running.threads
    assert not thread.replica.timed
