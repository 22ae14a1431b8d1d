import pickle
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from scheduler_adapters.vllm.connector import PagewireConnector
from scheduler_adapters.vllm.stats import PullStats
from tests.vllm_engine.engine import Engine, Shape, make_config, model_dir
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
