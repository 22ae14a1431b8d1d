import io
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from scheduler_adapters.vllm.connector import PagewireConnector, log_as_vllm
from scheduler_adapters.vllm.stats import PullStats
from tests.scrape import parsed, value
from tests.vllm_engine.engine import Engine, Shape, make_config, model_dir, run_until
from tests.vllm_engine.test_engine import PROMPT, prefilled, served


def test_the_transferred_bytes_reach_the_log_and_prometheus(make: Callable[..., Engine], tmp_path: Path) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer", Shape(tp_size=2))
    served([prefill, decode], "d", PROMPT, 2, prefilled(prefill, "p", PROMPT))
    total = PagewireConnector.build_kv_connector_stats()
    assert total.is_empty()
    for stats in decode.stats:
        sent = pickle.loads(pickle.dumps(stats)).to_dict()  # noqa: S301 - as vLLM's processes do
        total = total.aggregate(PagewireConnector.build_kv_connector_stats(sent))
    line = total.reduce()
    assert line["pulls"] == 2, "there must be one pull for each rank"
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
    found = parsed(text)
    for theirs, ours in AS_THEIRS.items():
        assert value(found, f"vllm:{theirs}_sum") == value(found, f"vllm:pagewire_{ours}_sum") > 0
        assert value(found, f"vllm:{theirs}_count") == 2


AS_THEIRS = {
    "nixl_xfer_time_seconds": "pull_seconds",
    "nixl_post_time_seconds": "post_seconds",
    "nixl_bytes_transferred": "pull_bytes",
    "nixl_num_descriptors": "pull_runs",
}
# Runs in a process of its own, because importing vLLM's connector changes the environment that UCX reads.
COMPARE = """
from types import SimpleNamespace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from scheduler_adapters.vllm.stats import PullMetrics, PullStats
from tests.scrape import parsed
from tests.scrape import parsed, value
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics

config = SimpleNamespace(kv_transfer_config=None)

def samples(*made):
    registry = CollectorRegistry()
    kinds = {k: lambda k=k, **options: k(registry=registry, **options) for k in (Counter, Gauge, Histogram)}
    metrics = [one(config, kinds, ["engine"], {0: ["0"]}) for one in made]
    lists = [0.002, 0.2, 7.0]
    for one in metrics:
        if isinstance(one, PullMetrics):
            one.observe(PullStats(data={
                "pull_seconds": lists, "post_seconds": lists, "pull_bytes": lists, "pull_runs": lists,
                "failed_pulls": 2, "leases_expired": 3}).data)
        elif len(metrics) == 1:
            one.observe(NixlKVConnectorStats().data | {
                "transfer_duration": lists, "post_duration": lists, "bytes_transferred": lists,
                "num_descriptors": lists, "num_failed_transfers": [2], "num_kv_expired_reqs": [3]})
    found = parsed(generate_latest(registry).decode())
    return {key: figure for key, figure in found.items() if key[0].startswith("vllm:nixl") and "_created" not in key[0]}

ours, theirs = samples(PullMetrics), samples(NixlPromMetrics)
assert ours.items() <= theirs.items(), sorted(ours.items() - theirs.items())
only = {name for name, _ in theirs.keys() - ours.keys()}
assert only == {"vllm:nixl_num_failed_notifications_total", "vllm:nixl_num_notifications_after_expiry_total"}, only
assert not any(samples(NixlPromMetrics, PullMetrics).values()), "theirs, and none of ours is added"
"""


def test_the_metrics_of_vllms_own_connector_keep_their_names_buckets_and_meaning() -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", COMPARE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


def test_stats_of_one_connector_among_several_can_be_read_back_from_plain_data() -> None:
    """In this form the stats travel from vLLM's engine to the process that serves metrics."""
    found = MultiConnector.build_kv_connector_stats({PagewireConnector.__name__: {"failed_pulls": 2}})
    assert found is not None
    stats = found.data[PagewireConnector.__name__]
    assert isinstance(stats, PullStats)
    assert stats.data["failed_pulls"] == 2


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
    assert total.data["failed_pulls"] == 2, "a pull that its owner gave up does not count as failed"


def test_our_log_lines_go_where_vllms_go_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
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
