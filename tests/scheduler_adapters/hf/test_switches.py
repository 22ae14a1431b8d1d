"""A real model whose weights change under load. Each token equals that of a fresh model of the versions that its
request has seen, and so do its logits.

    python -m tests.scheduler_adapters.hf.test_switches --requests 5000 [--without version]

`--without version` leaves the version out of the first seed of the digests. The run must then fail.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from kvcache import PagedKVCacheManager
from kvcache.replica import hashing
from kvcache.sizing import page_bytes
from kvcache.weights import Running
from scheduler_adapters.errors import ModelLoadError
from scheduler_adapters.hf.generate import PagedGenerator
from scheduler_adapters.hf.runner import (
    HFRunner,
    attend_over_pages,
    cache_argument_of,
    kv_params_of,
    load_model,
    manager_for,
    num_layers_of,
)
from scheduler_adapters.hf.tiny import tiny_llama
from scheduler_adapters.hf.weights import ModelWeights, SpareWeights, model_name
from scheduler_adapters.loop import Request, ServingLoop
from tests.scheduler_adapters.serving import assert_nothing_held

RUNNING: tuple[Running, ...] = get_args(Running)
VERSIONS = 4
CLOSE = 2e-3  # the largest difference of two logits, and the largest gap of a tie


def manager_of(model: Any, pages: int, weights: str, host_slots: int = 0) -> PagedKVCacheManager:
    params = kv_params_of(model.config, page_size=8, enable_prefix_caching=True)
    size = page_bytes(params, num_layers_of(model.config), 8)
    params = dataclasses.replace(
        params,
        weights=bytes.fromhex(weights),
        enable_kvcache_swapping_to_host=host_slots > 0,
        host_kvcache_swap_space_gb=host_slots * size / 2**30 or None,
    )
    return manager_for(model, params, 6, 256, ["cpu"], available_cache_memory=pages * size, enable_runtime_checks=True)


class Recorded(HFRunner):
    """A runner that keeps the logits of its last batch."""

    def run(self, batch: Any, inputs: Any) -> list[int]:
        self.last = self.logits(batch, inputs)
        self.ran = [(one.request_id, one.start_idx, one.active_idx) for one in batch]
        return self.last.argmax(-1).tolist()


class Fresh:
    """Models that never change, one of each version."""

    def __init__(self) -> None:
        self.models: list[Any] = [load_model(None, seed) for seed in range(VERSIONS)]
        self.names = [model_name(model) for model in self.models]
        self.argument = cache_argument_of(self.models[0])

    def logits(self, tokens: Sequence[int], versions: Sequence[int]) -> torch.Tensor:
        """Returns the logits after the last token, if each token is computed by the model of its version."""
        from transformers import DynamicCache

        cache, at, output = DynamicCache(), 0, None
        with torch.inference_mode():
            for version, run in groupby(versions):
                end = at + len(list(run))
                ids = torch.tensor([list(tokens[at:end])])
                output = self.models[version](ids, use_cache=True, **{self.argument: cache}).logits[0, -1]
                at = end
        assert output is not None
        return output


class Served:
    """A loop over a manager with a host tier, and what each request has seen."""

    def __init__(self, fresh: Fresh, seed: int, pages: int = 60) -> None:
        self.fresh, self.random = fresh, random.Random(seed)
        self.model: Any = copy.deepcopy(fresh.models[0])
        attend_over_pages(self.model)
        self.weights = ModelWeights(self.model, fresh.names[0])
        self.manager = manager_of(self.model, pages, fresh.names[0], host_slots=200)
        self.runner = Recorded(self.model)
        self.loop = ServingLoop(self.manager, self.runner, token_budget=32)
        self.version, self.made, self.told = 0, 0, 0
        self.seen: dict[str, list[int]] = {}  # the version of each computed token of each request
        self.contexts: dict[str, Any] = {}
        self.anew: set[str] = set()  # requests that begin anew in the next step, perhaps from a hit
        self.leases: list[tuple[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.loop.on_admit = self._on_admit

    def _on_admit(self, name: str, _replica: int, cached: int) -> None:
        self.seen[name], self.contexts[name] = [self.version] * cached, self.loop._running[name].context
        self.counts["hits"] += cached > 0

    def add(self) -> None:
        self.made += 1
        stem = self.random.randrange(6)
        prompt = [(stem * 37 + place * 11) % 256 for place in range(self.random.randrange(3, 60))]
        prompt[self.random.randrange(len(prompt)) :] = [self.random.randrange(256)]
        self.loop.add(Request(f"r{self.made}", prompt, self.random.randrange(1, 14), ignore_eos=True))

    def switch(self) -> None:
        """Changes the weights between two steps, whatever runs, is leased or is copied to the host."""
        running = self.random.choice(RUNNING)
        to = self.random.randrange(VERSIONS)
        self.counts["switches"] += to != self.version
        self.counts["switches with running requests"] += self.loop.num_running > 0
        self.counts["switches with leases"] += bool(self.leases)
        self.counts["switches back"] += to < self.version
        self.weights.put(SpareWeights(self.fresh.names[to], dict(self.fresh.models[to].state_dict())))
        self.manager.set_weights(bytes.fromhex(self.fresh.names[to]), running)
        if to != self.version and running == "recompute":
            self.anew |= {*self.loop._running}
        self.version = to

    def step(self) -> None:
        self.runner.ran = []
        outputs = self.loop.step()
        told = {output.request_id: output for output in outputs}
        for output in outputs:
            self.counts["stopped"] += output.token is None
            assert output.token is not None or "the weights changed" in output.error
        starts = {name: start for name, start, _ in self.runner.ran}
        for name in self.anew:
            self.seen[name] = [self.version] * starts.get(name, self.contexts[name].start_idx)
        self.counts["begun anew"] += len(self.anew)
        self.anew.clear()
        for (name, start, end), logits in zip(
            self.runner.ran, self.runner.last if self.runner.ran else [], strict=True
        ):
            seen = self.seen[name]
            if start < len(seen) or start > len(seen):  # it began anew, perhaps from a hit of the current version
                self.counts["begun anew"] += 1
                seen[:] = [self.version] * start
            seen += [self.version] * (end - start)
            if name in told:
                self._compare(name, self.contexts[name], seen, logits)
        self.counts["ended"] += sum(output.finished is not None for output in told.values())

    def _compare(self, name: str, context: Any, seen: Sequence[int], logits: torch.Tensor) -> None:
        right = self.fresh.logits(context.tokens[: len(seen)].tolist(), seen)
        self.counts["tokens"] += 1
        self.counts["tokens of several versions"] += len(set(seen)) > 1
        gap = (logits - right).abs().max().item()
        assert gap < CLOSE, f"{name}: the logits after {len(seen)} tokens of the versions {set(seen)} differ by {gap}"
        if (ours := int(logits.argmax())) != (theirs := int(right.argmax())):
            assert right[theirs] - right[ours] < CLOSE

    def lease(self) -> None:
        """Leases a running request's pages, or ends a lease."""
        if self.leases and self.random.random() < 0.6:
            self.manager.end_lease(self.leases.pop(self.random.randrange(len(self.leases)))[1])
        elif self.loop._running and len(self.leases) < 2:
            name = self.random.choice([*self.loop._running])
            self.leases.append((name, self.manager.lease(name)))
            self.counts["leases"] += 1

    def run(self, requests: int, a_switch_every: float, tell: Callable[[str], object] = lambda _: None) -> Counter[str]:
        while self.made < requests or self.loop.has_work:
            while self.made < requests and self.loop.num_running + self.loop.num_waiting < 6:
                self.add()
            if self.random.random() < 1 / a_switch_every:
                self.switch()
            if self.random.random() < 0.1:
                self.lease()
            self.step()
            if self.made >= self.told + 500:
                self.told = self.made
                tell(f"{self.made} requests, {self.counts['switches']} switches: 0 wrong\n")
        for _, lease in self.leases:
            self.manager.end_lease(lease)
        assert_nothing_held(self.manager)
        self.counts["loaded from the host"] = self.manager.metrics.h2d_blocks_copied
        self.manager.close()
        return self.counts


@pytest.fixture(scope="module")
def fresh() -> Fresh:
    return Fresh()


@contextmanager
def without_version() -> Iterator[None]:
    """Leaves the version of the weights out of the first seed of the digests."""
    seeded: Callable[..., Any] = hashing._seeded
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "_seeded", lambda algorithm, size, salt, _weights=None: seeded(algorithm, size, salt))
        yield


def test_each_token_is_that_of_the_versions_that_its_request_has_seen(fresh: Fresh) -> None:
    counts = Served(fresh, 1).run(120, 6)
    for what in (
        "switches with running requests",
        "switches with leases",
        "switches back",
        "hits",
        "tokens of several versions",
        "begun anew",
        "stopped",
        "loaded from the host",
    ):
        assert counts[what], counts


def test_without_the_version_in_the_chain_the_same_run_fails(fresh: Fresh) -> None:
    with without_version(), pytest.raises(AssertionError, match="the logits after"):
        Served(fresh, 1).run(120, 6)


@pytest.mark.long
def test_five_thousand_requests_and_hundreds_of_switches(fresh: Fresh) -> None:
    counts = Served(fresh, 2).run(5000, 20)
    assert counts["switches"] >= 200, counts


def test_a_generator_loads_other_weights_and_goes_back(fresh: Fresh, tmp_path: Path) -> None:
    model: Any = load_model(None, 0)
    manager = manager_of(model, 100, model_name(model))
    generator = PagedGenerator(model, manager)
    prompts = [[*range(40)], [*range(30), 7]]
    for seed in (0, 1, 0):
        tiny_llama(seed).save_pretrained(tmp_path / str(seed))
        assert generator.load_weights(tmp_path / str(seed)) == fresh.names[seed]
        before = manager.metrics.cache_tokens
        theirs = [fresh.models[seed].generate(torch.tensor([one]), max_new_tokens=9)[0, len(one) :] for one in prompts]
        assert generator.generate(prompts, 9) == [one.tolist() for one in theirs]
        found = manager.metrics.cache_tokens - before
    assert found > 40, "the pages of before are found again"
    (tmp_path / "0" / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError):
        generator.load_weights(tmp_path / "0")
    assert manager.weights == bytes.fromhex(fresh.names[0])
    manager.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scheduler_adapters.hf.test_switches")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--every", type=float, default=20, help="steps between two switches, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", choices=["version"])
    given = parser.parse_args()
    if given.without:
        with without_version():
            counts = Served(Fresh(), given.seed).run(given.requests, given.every)
    else:
        counts = Served(Fresh(), given.seed).run(given.requests, given.every, tell=sys.stderr.write)
    sys.stdout.write(f"{dict(counts)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
