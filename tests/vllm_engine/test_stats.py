import io
import logging
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from scheduler_adapters.vllm.connector import PagewireConnector, log_as_vllm
from scheduler_adapters.vllm.stats import PullStats
from tests.vllm_engine.engine import Engine, Shape, make_config, model_dir, run_until
from tests.vllm_engine.test_engine import PROMPT, prefilled, served


def test_what_is_moved_reaches_the_log_and_prometheus(make: Callable[..., Engine], tmp_path: Path) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer", Shape(tp_size=2))
    served([prefill, decode], "d", PROMPT, 2, prefilled(prefill, "p", PROMPT))
    total = PagewireConnector.build_kv_connector_stats()
    assert total.is_empty()
    for stats in decode.stats:
        sent = pickle.loads(pickle.dumps(stats)).to_dict()  # noqa: S301 - as vLLM's processes do
        total = total.aggregate(PagewireConnector.build_kv_connector_stats(sent))
    line = total.reduce()
    assert line["pulls"] == 2, "one of each rank"
    assert round(line["mean MB"], 6) == round(7 * 16 * 2 * 2 * 32 * 2 / 1e6, 3), (
        "half the heads of 7 blocks, of 2 layers"
    )

    registry = CollectorRegistry()
    kinds = {
        kind: lambda kind=kind, **options: kind(registry=registry, **options) for kind in (Counter, Gauge, Histogram)
    }
    config = make_config(model_dir(tmp_path, 4), "kv_consumer", "engine", Shape(), 0)
    metrics = PagewireConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
    metrics.observe(total.to_dict())
    text = generate_latest(registry).decode()
    assert 'vllm:pagewire_pull_seconds_count{engine="0"} 2.0' in text
    assert 'vllm:pagewire_failed_pulls_total{engine="0"} 0.0' in text


def test_stats_of_ranks_add_up() -> None:
    left, right = PullStats(), PullStats()
    left.data["failed_pulls"] = 2
    right.data["failed_pulls"] = 3
    right.data["leases_expired"] = 1
    assert left.aggregate(right).reduce() == {"failed_pulls": 5, "leases_expired": 1}
    left.reset()
    assert left.is_empty()


def test_a_request_that_cannot_be_loaded_counts_once_whatever_its_ranks(make: Callable[..., Engine]) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer", Shape(tp_size=2))
    params = prefilled(prefill, "p", PROMPT)
    prefill.close()
    decode.add("lost", PROMPT, 2, params)
    decode.add("bad", PROMPT[::-1], 2, params | {"lease_id": "none"})
    decode.add("left", PROMPT[:50], 2, params)
    decode.abort("left")
    run_until([decode], lambda: decode.finish_reason("lost") and decode.finish_reason("bad"), 30)
    total = PullStats()
    for reported in decode.reported:
        total.aggregate(PullStats(data=reported))
    assert total.data["failed_pulls"] == 2, "who gave up has not failed"


def test_our_lines_go_where_vllms_go_unless_somebody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, written = logging.getLogger("pagewire"), io.StringIO()
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [logging.StreamHandler(written)])
    for logger in (ours, logging.root):
        monkeypatch.setattr(logger, "handlers", [])
    log_as_vllm()
    logging.getLogger("pagewire.vllm").error("what happened")
    assert written.getvalue() == "what happened\n"
    ours.handlers, logging.root.handlers = [], [logging.NullHandler()]
    log_as_vllm()
    assert ours.handlers == []
