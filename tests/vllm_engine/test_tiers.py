"""vLLM's blocks in our host slots, files and objects: vLLM's real scheduler and offloading connector, and our spec."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_offload.base import LookupResult, OffloadingManager, ReqContext, make_offload_key

from kvcache.tiers import file_tier
from scheduler_adapters.vllm import shared_slots, tier_manager, tiers
from scheduler_adapters.vllm.tier_manager import TierManager
from scheduler_adapters.vllm.tiers import read_tier_options
from tests.kvcache.tiers.stored_objects import StoredObjects
from tests.vllm_engine import engine as engines
from tests.vllm_engine.engine import TIERS, Engine, Shape, expected_tokens, make_request, run_until
from transfer.errors import InvalidEngineError

Make = Callable[..., Engine]
PROMPT = list(range(1000, 1100))
BLOCK_BYTES = 4 * 16 * 32 * 2 * 2  # heads, tokens, keys and values, two bytes, layers
SPEC = {"spec_name": "PagewireTiers", "spec_module_path": "scheduler_adapters.vllm.tiers"}


def shape_of(
    folder: Path | None, slots: int = 200, most: int = 1000, extra: dict[str, Any] | None = None, **shape: Any
) -> Shape:
    """Returns the shape of an engine with `slots` host slots and room for `most` blocks in files."""
    size = BLOCK_BYTES * shape.get("block_size", 16) // 16
    given = SPEC | {"host_kvcache_swap_space_gb": (slots + 1.5) * size / 2**30}
    if folder is not None:
        given |= {"file_tier_dir": str(folder), "file_tier_max_gb": (most + 0.5) * (size + 100) / 2**30}
        given |= {"file_tier_key": "the model"}
    return Shape(connector=TIERS, extra=given | (extra or {}), **shape)


def manager_of(engine: Engine) -> TierManager:
    found = engine.connector.connector_scheduler.manager
    assert isinstance(found, TierManager)
    return found


def check(engine: Engine) -> None:
    with manager_of(engine).lock:
        manager_of(engine).check()


def answer(engine: Engine, request_id: str, prompt: list[int], count: int = 3) -> list[int]:
    engine.add(request_id, prompt, count)
    run_until([engine], lambda: engine.finish_reason(request_id))
    check(engine)
    return engine.tokens(request_id)


def computed(engine: Engine, request_id: str) -> int:
    """Returns how many tokens of the prompt the engine has computed, with those of its answer."""
    return sum(step.get(request_id, 0) for step in engine.scheduled)


def counts(engine: Engine) -> dict[str, int]:
    manager_of(engine).get_stats()
    return manager_of(engine).counts


def settle(engine: Engine) -> None:
    """Steps until all copies of blocks have ended."""
    run_until([engine], lambda: not engine.connector.has_pending_push_work())


def written(engine: Engine) -> None:
    """Waits until everything that the engine has stored is in files and objects."""
    settle(engine)
    with manager_of(engine).lock:
        for lower in manager_of(engine)._host.lower:
            lower.flush()


def filled(make: Make, shape: Shape, prompt: list[int] = PROMPT) -> None:
    """Lets an engine compute a prompt, and closes the engine."""
    engine = make("kv_both", shape)
    assert answer(engine, "first", prompt) == expected_tokens(prompt, 3, shape)
    settle(engine)
    engine.close()


def names_of_slots() -> set[Path]:
    named = "[0-9a-f]" * 24  # of an engine; other tests beside these have folders there, too
    return set(shared_slots._FOLDER.glob(f"pagewire-{named}-*"))


SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "two ranks": {"tp_size": 2},
    "four ranks of two heads": {"tp_size": 4, "heads": 2},
    "blocks of 32": {"block_size": 32},
    "full and window": {"windows": (0, 40)},
    "two ranks, full and window": {"windows": (0, 40), "tp_size": 2},
    "window alone": {"windows": (40,)},
}


@pytest.mark.parametrize("given", SHAPES.values(), ids=SHAPES)
def test_a_restarted_engine_finds_its_blocks_in_files(make: Make, tmp_path: Path, given: dict[str, Any]) -> None:
    before, shape = names_of_slots(), shape_of(tmp_path / "kv", **given)
    filled(make, shape)
    engine = make("kv_both", shape)
    assert answer(engine, "again", PROMPT) == expected_tokens(PROMPT, 3, shape)
    assert computed(engine, "again") == 100 % shape.block_size + 2, "all full blocks must come from files"
    longer = [*PROMPT[:70], *range(5000, 5050)]
    assert answer(engine, "longer", longer) == expected_tokens(longer, 3, shape)
    settle(engine)
    check(engine)
    assert names_of_slots() == before, "the names of shared memory must be gone"


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "key": ({"file_tier_key": "another model"}, {}),
    "heads": ({}, {"heads": 8}),
    "ranks": ({}, {"tp_size": 2}),
    "block size": ({}, {"block_size": 32}),
    "window": ({}, {"windows": (64,)}),
    "group": ({}, {"windows": (0, 40)}),
}


@pytest.mark.parametrize(("extra", "given"), OTHERS.values(), ids=OTHERS)
def test_another_model_or_layout_finds_nothing(
    make: Make, tmp_path: Path, extra: dict[str, Any], given: dict[str, Any]
) -> None:
    filled(make, shape_of(tmp_path / "kv"))
    other = shape_of(tmp_path / "kv", extra=extra, **given)
    engine = make("kv_both", other)
    assert answer(engine, "again", PROMPT) == expected_tokens(PROMPT, 3, other)
    assert computed(engine, "again") == 102
    engine.close()
    engine = make("kv_both", other)
    assert answer(engine, "third", PROMPT) == expected_tokens(PROMPT, 3, other)
    assert computed(engine, "third") < 102, "both must lie in the folder"


@pytest.mark.parametrize("change", ["checkpoint", "config", "backend", "version", "adapter's salt"])
def test_other_weights_configs_kernels_and_salts_find_nothing(
    make: Make, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    shape = shape_of(tmp_path / "kv", heads=6)
    model = Path(engines.model_dir(tmp_path_factory.getbasetemp(), 6))
    (model / "model.safetensors").write_bytes(b"weights")
    filled(make, shape)
    if change == "checkpoint":
        (model / "model.safetensors").write_bytes(b"changed")
    elif change == "config":
        monkeypatch.setattr(engines, "_CONFIG", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    elif change == "backend":
        from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend

        shape = replace(shape, backend=FlexAttentionBackend)
    elif change == "version":
        monkeypatch.setattr(tiers, "VLLM", "0.99.0")
    engine = make("kv_both", shape)
    if change == "adapter's salt":
        engine.scheduler.add_request(make_request("again", PROMPT, 3, 16, None, cache_salt="tenant"))
        run_until([engine], lambda: engine.finish_reason("again"))
    else:
        answer(engine, "again", PROMPT)
    assert computed(engine, "again") == 102
    assert engine.tokens("again") == expected_tokens(PROMPT, 3, shape)


def damage(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    if how == "gone":
        file.unlink()
    elif how == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "zeros":
        file.write_bytes(bytes(len(content)))
    elif how == "folder":
        file.unlink()
        file.mkdir()
    else:
        content[len(content) // 3] ^= 1
        file.write_bytes(content)


@pytest.mark.parametrize("after", [False, True], ids=["before the start", "while it runs"])
@pytest.mark.parametrize("how", ["gone", "cut", "empty", "zeros", "folder", "one bit"])
def test_damaged_files_are_computed_again(make: Make, tmp_path: Path, how: str, after: bool) -> None:
    shape = shape_of(tmp_path / "kv")
    filled(make, shape)
    engine = make("kv_both", shape) if after else None
    for file in tmp_path.rglob("*.pages"):
        damage(file, how)
    engine = engine or make("kv_both", shape)
    assert answer(engine, "again", PROMPT) == expected_tokens(PROMPT, 3, shape)
    assert computed(engine, "again") > 6
    written(engine)
    engine.close()
    engine = make("kv_both", shape)
    assert answer(engine, "third", PROMPT) == expected_tokens(PROMPT, 3, shape)
    assert computed(engine, "third") == 6, "the blocks must have been written again"


def test_two_engines_share_a_folder(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_tier, "_RESCAN_S", 0.05)
    shape = shape_of(tmp_path / "kv")
    left, right = make("kv_both", shape), make("kv_both", shape)
    assert answer(left, "one", PROMPT) == expected_tokens(PROMPT, 3, shape)
    written(left)
    lower = manager_of(right)._host.lower[0]
    run_until([right], lambda: len(lower._index.names))  # type: ignore[attr-defined]
    assert answer(right, "two", PROMPT) == expected_tokens(PROMPT, 3, shape)
    assert computed(right, "two") == 6
    other = [*PROMPT[:50], *range(3000, 3050)]
    assert answer(right, "three", other) == expected_tokens(other, 3, shape)
    left.close()
    assert answer(right, "four", other) == expected_tokens(other, 3, shape)


def test_files_stay_within_their_limit(make: Make, tmp_path: Path) -> None:
    shape = shape_of(tmp_path / "kv", slots=12, most=16, blocks=20)
    engine = make("kv_both", shape)
    for number in range(12):
        prompt = list(range(1000 + 100 * number, 1080 + 100 * number))
        assert answer(engine, f"r{number}", prompt) == expected_tokens(prompt, 3, shape)
        written(engine)
        used = sum(file.stat().st_size for file in tmp_path.rglob("*.pages"))
        assert used <= shape.extra["file_tier_max_gb"] * 2**30
    assert counts(engine)["file_blocks_written"] > 16
    assert answer(engine, "again", prompt) == expected_tokens(prompt, 3, shape)


def test_a_full_disk_only_stops_writing(make: Make, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: each write then fails in the same system call."""
    shape = shape_of(tmp_path / "kv")
    engine = make("kv_both", shape)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES // 2, before[1]))
    try:
        assert answer(engine, "one", PROMPT) == expected_tokens(PROMPT, 3, shape)
        written(engine)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert counts(engine)["file_blocks_written"] == 0
    assert not list(tmp_path.rglob("*.pages"))
    assert not list(tmp_path.rglob("*.tmp"))
    assert answer(engine, "two", PROMPT) == expected_tokens(PROMPT, 3, shape)


def test_a_folder_that_is_gone_is_made_again(make: Make, tmp_path: Path) -> None:
    shape = shape_of(tmp_path / "kv")
    engine = make("kv_both", shape)
    answer(engine, "one", PROMPT)
    written(engine)
    shutil.rmtree(tmp_path / "kv")
    other = list(range(3000, 3100))
    answer(engine, "two", other)
    written(engine)
    engine.close()
    engine = make("kv_both", shape)
    assert answer(engine, "three", other) == expected_tokens(other, 3, shape)
    assert computed(engine, "three") == 6


def test_slots_serve_blocks_that_the_device_has_evicted(make: Make, tmp_path: Path) -> None:
    """Without files the slots are a host cache, also on a CPU, where vLLM's own offload refuses to run."""
    shape = shape_of(None, blocks=12)
    engine = make("kv_both", shape)
    others = [list(range(start, start + 100)) for start in (1000, 3000, 5000)]
    for number, prompt in enumerate(others * 2):
        assert answer(engine, f"r{number}", prompt) == expected_tokens(prompt, 3, shape)
    assert [computed(engine, f"r{number}") for number in range(6)] == [102] * 3 + [6] * 3
    assert counts(engine)["host_blocks_loaded"] == 18
    found = {name for stats in engine.reported for name in stats["data"]}
    assert "vllm:pagewire_host_blocks_stored" in found
    assert tmp_path.exists()


def test_few_slots_never_give_a_wrong_block_or_a_lost_one(make: Make, tmp_path: Path) -> None:
    shape = shape_of(tmp_path / "kv", slots=6, most=500, blocks=12)
    engine = make("kv_both", shape)
    for number in range(12):
        prompt = list(range(1000 + 100 * (number % 3), 1100 + 100 * (number % 3)))
        assert answer(engine, f"r{number}", prompt) == expected_tokens(prompt, 3, shape)
        written(engine)
    assert counts(engine)["host_blocks_loaded"]


def test_a_request_does_not_wait_long_for_a_disk_that_hangs(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = shape_of(tmp_path / "kv")
    filled(make, shape)
    engine = make("kv_both", shape)
    may = tmp_path / "may"
    lower = manager_of(engine)._host.lower[0]
    read = lower._read_file  # type: ignore[attr-defined]

    def slowly(*given: Any) -> Any:
        end = time.monotonic() + 30
        while not may.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return read(*given)

    monkeypatch.setattr(lower, "_read_file", slowly)
    monkeypatch.setattr(manager_of(engine), "_wait_s", 0.2)
    assert answer(engine, "again", PROMPT) == expected_tokens(PROMPT, 3, shape)
    assert computed(engine, "again") == 102
    may.touch()
    run_until([engine], lambda: not lower.held_slots or lower.tick())
    check(engine)


@pytest.mark.parametrize("below", [False, True], ids=["slots", "files"])
def test_a_reset_forgets_every_block(make: Make, tmp_path: Path, below: bool) -> None:
    shape = shape_of(tmp_path / "kv" if below else None)
    engine = make("kv_both", shape)
    answer(engine, "one", PROMPT)
    written(engine)
    engine.add("running", PROMPT[:90], 30)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    run_until([engine], lambda: engine.finish_reason("running"))
    assert engine.tokens("running")[-3:] == expected_tokens(PROMPT[:90], 30, shape)[-3:]
    settle(engine)
    check(engine)
    assert not manager_of(engine)._retired
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert answer(engine, "two", PROMPT) == expected_tokens(PROMPT, 3, shape)
    assert computed(engine, "two") == 102
    engine.close()
    if below:  # only what was computed after the last reset
        engine = make("kv_both", shape)
        longer = [*PROMPT[:90], 7, 8, 9]
        assert answer(engine, "three", longer) == expected_tokens(longer, 3, shape)
        assert computed(engine, "three") == 93 - 80 + 2


class Core:
    """vLLM's own engine as far as it changes the weights of its workers. Its real methods run, over our workers."""

    def __init__(self, engine: Engine, checkpoints: Path) -> None:
        self._engine, self._checkpoints = engine, checkpoints
        self._core: Any = object.__new__(EngineCore)
        self._core.model_executor = SimpleNamespace(collective_rpc=self._run)

    def _run(self, method: str, *_: Any) -> list[None]:
        for worker in self._engine.workers:
            watch = worker.connector_worker.spec._weights
            if method == "start_weight_update":
                watch.on_change()
            else:
                path = self._checkpoints / str(self._engine.weights) / "model.safetensors"
                watch.on_reload(str(path), from_memory=method == "finish_weight_update")
        return []

    def change(self, version: int, how: str, *, pauses: bool = True) -> None:
        """Gives the engine other weights, in vLLM's order: its pause empties the caches before they change."""
        if pauses:
            assert self._engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self._engine.weights = version
        if how == "checkpoint":
            self._core.collective_rpc("reload_weights")
            return
        self._core.collective_rpc("start_weight_update")
        self._core.collective_rpc("finish_weight_update")
        if how == "named":
            self._core.set_weight_version(f"step {version}")


@pytest.fixture
def checkpoints(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a checkpoint of each version. The engines of eight heads start from version 0."""
    model = Path(engines.model_dir(tmp_path_factory.getbasetemp(), 8))
    for version in range(3):
        (folder := tmp_path / "checkpoints" / str(version)).mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights %d" % version)
    shutil.copy(tmp_path / "checkpoints" / "0" / "model.safetensors", model)
    return tmp_path / "checkpoints"


def right(engine: Engine, request_id: str, prompt: list[int] = PROMPT) -> int:
    """Checks an answer. Returns how many tokens the engine has computed for it."""
    assert answer(engine, request_id, prompt) == expected_tokens(prompt, 3, engine.shape, engine.weights)
    return computed(engine, request_id)


@pytest.mark.parametrize("below", [False, True], ids=["slots", "files"])
@pytest.mark.parametrize("given", [{}, {"tp_size": 2}, {"windows": (0, 40)}], ids=["full", "two ranks", "window"])
@pytest.mark.parametrize("how", ["named", "checkpoint"])
def test_blocks_of_a_version_are_found_when_it_returns(
    make: Make, tmp_path: Path, checkpoints: Path, how: str, given: dict[str, Any], below: bool
) -> None:
    shape = shape_of(tmp_path / "kv", slots=400, heads=8, **given)
    engine = make("kv_both", shape)
    core = Core(engine, checkpoints)
    if how == "named":
        core.change(0, how)
    assert right(engine, "first") == 102
    written(engine)
    core.change(1, how)
    assert right(engine, "other weights") == 102, "no block of other weights may be found"
    written(engine)
    if below:
        manager_of(engine)._host.pool.forget()
    core.change(0, how)
    assert right(engine, "back") == 6
    core.change(1, how)
    assert right(engine, "on again") == 6
    engine.close()
    engine = make("kv_both", shape)
    if how == "named":
        assert right(engine, "unnamed") == 102, "the user has not said which weights these are"
        Core(engine, checkpoints).change(0, how)
    assert right(engine, "restarted") == 6
    Core(engine, checkpoints).change(1, how)
    assert right(engine, "restarted on other weights") == 6


def test_weights_without_a_name_match_nothing(make: Make, tmp_path: Path, checkpoints: Path) -> None:
    """They only have slots of their own, until they change."""
    shape = shape_of(tmp_path / "kv", blocks=12, heads=8)
    engine = make("kv_both", shape)
    core = Core(engine, checkpoints)
    assert right(engine, "first") == 102
    written(engine)
    files = sorted(tmp_path.rglob("*.pages"))
    for version in (1, 0, 1):
        core.change(version, "counted")
        assert right(engine, f"version {version}") == 102
        assert right(engine, f"evicts in {version}", list(range(5000, 5100))) == 102
        assert right(engine, f"again {version}") == 6, "slots serve blocks of the current weights"
        engine.outputs.clear()
        engine.scheduled.clear()
    written(engine)
    assert sorted(tmp_path.rglob("*.pages")) == files
    core.change(2, "checkpoint")
    assert right(engine, "by files") == 102
    core.change(0, "checkpoint")
    assert right(engine, "as at the start") == 6


@pytest.mark.parametrize("how", ["named", "checkpoint", "name alone"])
def test_blocks_that_may_be_of_two_versions_are_of_none(
    make: Make, tmp_path: Path, checkpoints: Path, how: str
) -> None:
    """A request goes on under other weights. Until vLLM's cache was empty, nothing that is stored has their name."""
    shape = shape_of(tmp_path / "kv", heads=8)
    engine = make("kv_both", shape)
    core = Core(engine, checkpoints)
    engine.add("in flight", PROMPT, 40)
    engine.step()
    engine.step()  # blocks of the old weights are on their way
    assert manager_of(engine)._storing
    if how == "name alone":
        engine.weights = 1
        core._core.set_weight_version("step 1")
    else:
        core.change(1, how, pauses=False)
    run_until([engine], lambda: engine.finish_reason("in flight"))
    written(engine)
    assert engine.scheduler.reset_prefix_cache()
    assert right(engine, "after") == 102
    written(engine)
    longer = PROMPT + engine.tokens("in flight")
    assert right(engine, "goes on", longer) == len(longer) - 96 + 2
    core.change(0, "checkpoint")
    assert right(engine, "as at the start", longer) >= len(longer) - 64 + 2


def test_a_reset_without_other_weights_forgets_every_version(make: Make, tmp_path: Path, checkpoints: Path) -> None:
    shape = shape_of(tmp_path / "kv", heads=8)
    engine = make("kv_both", shape)
    core = Core(engine, checkpoints)
    for version in (0, 1):
        core.change(version, "named")
        assert right(engine, f"version {version}") == 102
        written(engine)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert right(engine, "after") == 102
    core.change(0, "named")
    assert right(engine, "back") == 102
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.close()
    engine = make("kv_both", shape)
    Core(engine, checkpoints).change(0, "named")
    assert right(engine, "restarted") == 102


def test_an_update_that_has_begun_or_failed_has_no_version(make: Make, tmp_path: Path, checkpoints: Path) -> None:
    shape = shape_of(tmp_path / "kv", heads=8)
    engine = make("kv_both", shape)
    core = Core(engine, checkpoints)
    assert right(engine, "first") == 102
    written(engine)
    files = sorted(tmp_path.rglob("*.pages"))
    core._core.collective_rpc("start_weight_update")
    engine.weights = 2
    assert engine.scheduler.reset_prefix_cache()
    assert right(engine, "halfway") == 102
    written(engine)
    assert sorted(tmp_path.rglob("*.pages")) == files


def test_objects_outlive_the_engine(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StoredObjects()
    monkeypatch.setattr(tiers, "NixlObjects", lambda *_: store)
    extra = {"object_tier": {"bucket": "kv"}, "file_tier_key": "the model", "object_tier_timeout_s": 20}
    shape = shape_of(None, extra=extra)
    filled(make, shape)
    assert len(store.pages) == 6
    engine = make("kv_both", shape)
    assert answer(engine, "again", PROMPT) == expected_tokens(PROMPT, 3, shape)
    assert computed(engine, "again") == 6
    engine.close()
    for key in list(store.pages):
        store.objects[key] = store.objects[key][:-1] + b"?"
    engine = make("kv_both", shape)
    assert answer(engine, "damaged", PROMPT) == expected_tokens(PROMPT, 3, shape)
    assert computed(engine, "damaged") == 102
    engine.close()
    store.fails = True
    engine = make("kv_both", shape)
    assert answer(engine, "fails", PROMPT) == expected_tokens(PROMPT, 3, shape)
    assert computed(engine, "fails") == 102
    engine.close()
    assert store.open == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_aborts_and_resets(make: Make, tmp_path: Path, seed: int) -> None:
    """Prompts share prefixes, pools are tiny, and files are damaged now and then. Each answer must be right."""
    drawn = random.Random(seed)
    given = drawn.choice([{}, {"windows": (0, 40)}, {"tp_size": 2}])
    shape = shape_of(
        tmp_path / "kv", drawn.choice([3, 9, 60]), drawn.choice([5, 300]), blocks=drawn.choice([16, 40]), **given
    )
    engine, running = make("kv_both", shape), dict[str, list[int]]()
    for number in range(120):
        move = drawn.random()
        if move < 0.5 and len(running) < 4:
            start, length = drawn.randrange(3) * 1000, drawn.randrange(1, 130)
            prompt = list(range(start, start + length // 2)) + list(
                range(9000 + number % 3, 9000 + number % 3 + length - length // 2)
            )
            running[f"r{number}"] = prompt
            engine.add(f"r{number}", prompt, 4)
        elif move < 0.6 and running:
            engine.abort(drawn.choice(list(running)))
        elif move < 0.63:
            engine.scheduler.reset_prefix_cache(reset_running_requests=False, reset_connector=True)
        elif move < 0.66:
            for file in list(tmp_path.rglob("*.pages"))[:1]:
                with suppress(FileNotFoundError):  # the engine has just removed it
                    damage(file, drawn.choice(["gone", "one bit"]))
        elif move < 0.68:
            drain(engine)
            engine.close()
            finished(engine, running, shape)
            engine = make("kv_both", shape)
        for _ in range(drawn.randrange(4)):
            engine.step()
            check(engine)
        finished(engine, running, shape)
    drain(engine)
    finished(engine, running, shape)
    settle(engine)
    check(engine)


def drain(engine: Engine) -> None:
    run_until([engine], lambda: not engine.scheduler.requests)


def finished(engine: Engine, running: dict[str, list[int]], shape: Shape) -> None:
    for request_id in [one for one in running if engine.finish_reason(one) or one not in engine.scheduler.requests]:
        prompt, tokens = running.pop(request_id), engine.tokens(request_id)
        assert tokens == expected_tokens(prompt, 4, shape)[: len(tokens)]


def test_a_block_that_is_being_stored_is_waited_for(make: Make, tmp_path: Path) -> None:
    engine = make("kv_both", shape_of(tmp_path / "kv"))
    manager, context = manager_of(engine), ReqContext("r")
    key = make_offload_key(b"block", 0)
    manager.on_new_request(context)
    assert manager.lookup(key, context) is LookupResult.MISS
    assert manager.prepare_store([key], context).keys_to_store == [key]
    assert manager.prepare_store([key], context).keys_to_store == []
    assert manager.lookup(key, context) is LookupResult.HIT_PENDING
    manager.complete_store([key], context, success=False)
    assert manager.lookup(key, context) is LookupResult.MISS
    manager.prepare_store([key], context)
    manager.complete_store([key], context)
    assert manager.lookup(key, context) is LookupResult.HIT
    manager.check()
    manager.on_request_finished(context)
    manager.check()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no size": ({}, "host_kvcache_swap_space_gb"),
    "no room": ({"host_kvcache_swap_space_gb": 0}, "host_kvcache_swap_space_gb"),
    "no key": ({"file_tier_dir": "/d", "file_tier_max_gb": 1}, "file_tier_key"),
    "no limit": ({"file_tier_dir": "/d", "file_tier_key": "k"}, "file_tier_max_gb"),
    "unknown": ({"file_tier_directory": "/d"}, "there is no option 'file_tier_directory'"),
    "chunks": ({"blocks_per_chunk": 2}, "blocks_per_chunk"),
    "chunks by size": ({"block_size": 64}, "block_size"),
    "secret": ({"object_tier": {"bucket": "b", "settings": {"secret_key": "s"}}, "file_tier_key": "k"}, "secret_key"),
    "unknown of the store": ({"object_tier": {"bucket": "b", "region": "r"}, "file_tier_key": "k"}, "region"),
}


@pytest.mark.parametrize(("given", "named"), WRONG.values(), ids=WRONG)
def test_an_option_that_does_not_fit_is_named(given: dict[str, Any], named: str) -> None:
    size = {} if "host_kvcache_swap_space_gb" in given or named == "host_kvcache_swap_space_gb" else {
        "host_kvcache_swap_space_gb": 1}  # fmt: skip
    with pytest.raises(InvalidEngineError, match=named):
        read_tier_options(SPEC | size | given)


def test_a_version_that_does_not_guard_the_manager_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of vLLM never enter the manager's lock, so our thread would race with their scheduler."""
    monkeypatch.delattr(OffloadingManager, "lock")
    with pytest.raises(InvalidEngineError, match="has no lock"):
        make("kv_both", shape_of(None))


def test_too_little_shared_memory_is_refused_at_the_start(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    before = names_of_slots()
    with pytest.raises(InvalidEngineError, match="three slots"):
        make("kv_both", shape_of(None, slots=0))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InvalidEngineError, match="No space left"):
        make("kv_both", shape_of(None))
    assert names_of_slots() == before


def test_workers_on_another_host_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidEngineError, match="scheduler's host"):
        shared_slots.SharedSlots.join(tmp_path / "none")


def test_only_the_owner_may_read_the_shared_memory(tmp_path: Path) -> None:
    slots = shared_slots.SharedSlots.create(tmp_path / "slots", 3, 64, "what")
    assert (tmp_path / "slots").stat().st_mode & 0o777 == 0o600
    joined = shared_slots.SharedSlots.join(tmp_path / "slots")
    slots.memory[2] = 7
    slots.count_change()
    assert (joined.memory[2] == 7).all()
    assert (joined.num_slots, joined.changes, joined.digest) == (3, 1, slots.digest)
    assert not (tmp_path / "slots").exists()


def test_every_counter_is_declared() -> None:
    defined = tiers.PagewireTiers.build_metric_definitions(SPEC | {"host_kvcache_swap_space_gb": 1})
    assert set(defined) == {tier_manager.metric_of(name) for name in tier_manager.COUNTED}
