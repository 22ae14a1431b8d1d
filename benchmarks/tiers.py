"""What do lower tiers gain, and what do they cost a step?

    serving   hits and time to the first token of a small real model, whose prompts need three times the device's pages
    step      a step with copies to the host waiting and without, for that model and for the manager alone
    files     GB/s of the file tier beside `dd` to the same folder, and beside NIXL's POSIX plugin where that is there
    killed    a process killed while it writes: is every page right that is served from what it leaves?

Files go to PAGEWIRE_TIER_DIR, or to a temporary folder.
"""

from __future__ import annotations

import ast
import dataclasses
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.frame import Row, header, options, pin, progress, table, timed, write
from benchmarks.pools import LONGEST, Prompts, claimed, expect
from kvcache import KVCacheParams, PagedKVCacheManager
from kvcache.tiers.file_tier import FileTier
from kvcache.tiers.host_tier import HostTier
from kvcache.tiers.page_files import FileFormat, SystemIO
from kvcache.tiers.page_folder import PageFolder, namespace_of
from kvcache.types import PageIO
from scheduler_adapters.hf.runner import HFRunner, kv_params_of, load_model, num_layers_of
from scheduler_adapters.loop import Request, ServingLoop

PAGE = 16
PROMPT = 1008  # 63 pages
_GIB = 2**30
_WINDOW = 24  # number of steps in each idle or busy window
_STATISTICS = "columns *_min, *_max, *_median and *_mean: of the samples of a row; GB/s are maxima, times minima"
_WAITING = 3500  # pages that wait to be copied at the start of a busy window, 110 MiB


def loop_of(model: Any, pages: int, host_pages: int, rows: int = 32) -> ServingLoop:
    """A loop whose manager has these numbers of pages on the device and in host memory."""
    params = kv_params_of(model.config, page_size=PAGE)
    layers = num_layers_of(model.config)
    size = params.bytes_per_token(layers) * PAGE
    if host_pages:
        space = host_pages * size / _GIB
        params = dataclasses.replace(params, enable_kvcache_swapping_to_host=True, host_kvcache_swap_space_gb=space)
    manager = PagedKVCacheManager(params, rows, 1 << 16, layers, ["cpu"], available_cache_memory=pages * size)
    runner = HFRunner(model)
    runner.eos_token_ids = frozenset()  # a random model could end a request at any token
    return ServingLoop(manager, runner, token_budget=2048)


# ---- serving


def serving(model: Any, host_times: int, requests: int) -> Row:
    """Serves 24 prompts of 63 pages in random order, one after another, on a device that holds 8 of them."""
    pages, prompts = 8 * (PROMPT // PAGE + 1), 24
    rng = np.random.default_rng(5)
    texts = rng.integers(0, 256, (prompts, PROMPT + 1)).tolist()
    loop = loop_of(model, pages, host_times * pages)
    first_token: list[float] = []
    for number in range(prompts + requests):
        if number == prompts:  # every prompt has been served once, so counting begins
            loop.manager.reset_metrics()
            first_token.clear()
        chosen = texts[number if number < prompts else int(rng.integers(prompts))]
        start = time.perf_counter()
        loop.add(Request(str(number), chosen, 2))
        while not any(output.token is not None for output in loop.step()):
            pass
        first_token.append(time.perf_counter() - start)
        while loop.has_work:
            loop.step()
    metrics = loop.manager.metrics
    loop.manager.check()
    expect(host_times == 0 or metrics.h2d_blocks_copied > 0, "pages come back from the host")
    return {
        "case": "serving",
        "working set": "3 x device",
        "host": f"{host_times} x device" if host_times else "none",
        "requests": requests,
        "hit_pct": round(100 * metrics.cache_hit_rate, 1),
        "ttft_ms_median": round(1e3 * statistics.median(first_token), 2),
        "ttft_ms_mean": round(1e3 * statistics.mean(first_token), 2),
        "h2d_pages": metrics.h2d_blocks_copied,
    }


# ---- step


def fill_queue(manager: PagedKVCacheManager, prompts: Prompts) -> None:
    """Publish pages without running a model. They then wait to be copied to host memory."""
    context = claimed(manager, prompts.tokens(_WAITING * PAGE + 1))
    expect(manager.maybe_reserve(context), "the pool has room for the pages that wait")
    context.update(1)
    manager.step([context])
    manager.release(context.request_id)


def busy_and_idle(manager: PagedKVCacheManager, step: Callable[[], object], windows: int) -> list[Row]:
    """Times steps in alternating windows: busy ones, with thousands of pages to be copied, and idle ones."""
    prompts, times = Prompts(), {"idle": list[float](), "busy": list[float]()}
    done = 0
    copied = 0
    for _ in range(3):
        step()
    gc.collect()
    gc.freeze()
    for _ in range(windows):
        for case in ("idle", "busy"):
            manager.flush_tiers()
            if case == "busy":
                fill_queue(manager, prompts)
            before = manager.metrics.d2h_blocks_copied
            step()
            for _ in range(_WINDOW):
                times[case].append(timed(lambda _: step(), None))
                done = manager.metrics.d2h_blocks_copied - before
                if case == "busy" and done > 0.9 * _WAITING:
                    break  # the queue is used up, so later steps would have nothing to copy
            copied += done if case == "busy" else 0
    mean = {case: statistics.mean(each) for case, each in times.items()}
    return [
        {
            "tier": case,
            "us_min": round(min(each), 1),
            "us_median": round(statistics.median(each), 1),
            "us_mean": round(mean[case], 1),
            "us_p99": round(float(np.percentile(each, 99)), 1),
            "mean_ratio": round(mean[case] / mean["idle"], 3),
            "pages_per_step": round(copied / len(each), 1) if case == "busy" else 0.0,
        }
        for case, each in times.items()
    ]


def model_steps(model: Any, batch: int, windows: int) -> list[Row]:
    """Times steps of the loop in which `batch` requests decode."""
    loop = loop_of(model, 12_000, 24_000)
    for number in range(batch):
        loop.add(Request(str(number), [number, *range(100)], 60_000))
    loop.step()
    rows = busy_and_idle(loop.manager, loop.step, windows)
    return [{"case": "step", "of": f"small Llama, batch {batch}", "page_kib": 32, **row} for row in rows]


def manager_steps(batch: int, windows: int) -> list[Row]:
    """Times steps of the manager alone, through a `Batch`. Without model time, no cost is hidden."""
    params = KVCacheParams(
        torch.float32,
        2,
        32,
        enable_prefix_caching=True,
        page_size=PAGE,
        enable_kvcache_swapping_to_host=True,
        host_kvcache_swap_space_gb=1.2,
    )
    size = params.bytes_per_token(4) * PAGE
    manager = PagedKVCacheManager(params, batch, LONGEST, 4, ["cpu"], available_cache_memory=40_000 * size)
    prompts = Prompts()
    contexts = [claimed(manager, prompts.tokens(100 + at % PAGE)) for at in range(batch - 1)]
    for context in contexts:
        expect(manager.maybe_reserve(context), "the pool has room")
    manager.fetch(contexts)
    for context in contexts:
        context.update(1)
    manager.step(contexts)
    bound, tokens = manager.batch(contexts), np.ones(len(contexts), np.int32)

    def step() -> None:
        manager.reserve_batch(bound)
        manager.fetch(bound)
        bound.update(tokens)
        manager.step(bound)

    rows = busy_and_idle(manager, step, windows)
    return [{"case": "step", "of": f"manager alone, batch {batch - 1}", "page_kib": 32, **row} for row in rows]


# ---- files


def nixl_io() -> Callable[[Any], PageIO] | None:
    """The `PageIO` over NIXL's POSIX plugin; None if nixl is not installed."""
    try:
        from transfer.nixl.file_io import NixlFileIO  # noqa: PLC0415 - the file tier is measured without it, too
    except ImportError:
        return None
    return NixlFileIO


@contextmanager
def empty_folder() -> Generator[Path]:
    """An empty folder on the measured disk."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("PAGEWIRE_TIER_DIR")) as folder:
        yield Path(folder)


def drop_cache(folder: Path) -> None:
    """Drop these files from the kernel's page cache, so that the next read comes from the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def rates_of_dd(folder: Path, size: int) -> Row:
    """GB/s of `dd`, once for writing a new file and once for reading it."""
    path, megabytes = folder / "dd", size >> 20

    def dd(*arguments: str) -> float:
        command = ["dd", *arguments, "bs=1M", f"count={megabytes}", "status=none"]
        start = time.perf_counter()
        subprocess.run(command, check=True)  # noqa: S603 - our own arguments
        return size / (time.perf_counter() - start) / 1e9

    write, warm = dd("if=/dev/zero", f"of={path}"), dd(f"if={path}", "of=/dev/null")
    drop_cache(folder)
    cold = dd(f"if={path}", "of=/dev/null")
    path.unlink()
    os.sync()
    return {"by": "dd bs=1M", "write": write, "read": warm, "read_cold": cold}


def rates_of_tier(folder: Path, page_bytes: int, size: int, make_io: Callable[[Any], PageIO], name: str) -> Row:
    """GB/s of the file tier, including checksums: pages go from the host tier to files, and back."""
    pages = size // page_bytes
    host = HostTier([page_bytes], pages, 4, pinned=False)
    host.memory[0].view(torch.int64).random_()
    digests = np.random.default_rng(0).integers(0, 1 << 63, (pages, 4), np.uint64)
    slots = host.pool.allocate(pages)
    host.pool.index.publish(slots, digests)
    host.pool.release(slots)
    layout = FileFormat(namespace_of("benchmark"), page_bytes, 32)
    tier = FileTier(PageFolder(folder, layout), 2 * size, host, make_io)
    rates: Row = {"by": name}
    start = time.perf_counter()
    tier.offer(digests)
    tier.flush()
    rates["write"] = size / (time.perf_counter() - start) / 1e9
    expect(tier.written == pages, "every page was written")
    for case in ("read", "read_cold"):
        host.pool.forget()
        if case == "read_cold":
            drop_cache(folder)
        before = tier.read
        start = time.perf_counter()
        while tier.read < before + pages:
            have = tier.read - before
            tier.fetch(digests[None, have:], np.ones((1, pages - have), np.bool_), wait=True, gain=pages)
        rates[case] = size / (time.perf_counter() - start) / 1e9
    expect(not tier.refusals, "every page that was read is right")
    tier.reset()
    tier.close()
    return rates


def files(page_bytes: int, size: int, repeats: int) -> list[Row]:
    """Best and median of several rounds, each with a run of `dd` for comparison."""
    makers: dict[str, Callable[[Any], PageIO]] = {"file tier": lambda _: SystemIO()}
    through_nixl = nixl_io()
    if through_nixl is not None:
        makers["file tier, NIXL POSIX"] = through_nixl
    rounds: dict[str, list[Row]] = {}
    for _ in range(repeats):
        with empty_folder() as folder:
            rounds.setdefault("dd bs=1M", []).append(rates_of_dd(folder, size))
            for name, make_io in makers.items():
                rounds.setdefault(name, []).append(rates_of_tier(folder / name[-3:], page_bytes, size, make_io, name))
                os.sync()
    rows: list[Row] = []
    for name, each in rounds.items():
        row: Row = {"case": "files", "page_kib": page_bytes >> 10, "mib": size >> 20, "by": name}
        for what in ("write", "read", "read_cold"):
            row[f"{what}_gbps_max"] = round(max(one[what] for one in each), 2)
            row[f"{what}_gbps_median"] = round(statistics.median(one[what] for one in each), 2)
        rows.append(row)
    return rows


# ---- killed


def killed(rounds: int) -> Row:
    """Runs the test that kills writing processes, and checks every page that is served from their files."""
    command = [sys.executable, "-m", "tests.kvcache.killed_writers", "--rounds", str(rounds)]
    root = Path(__file__).resolve().parents[1]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)  # noqa: S603 - our own file
    expect(run.returncode == 0, f"every page served is right: {run.stderr[-500:]}")
    return {"case": "killed", **ast.literal_eval(run.stdout.strip().splitlines()[-1].split(":", 1)[1].strip())}


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    quick = chosen.quick
    progress("files")
    sizes = [(32 << 10, 128 << 20)] if quick else [(32 << 10, 512 << 20), (256 << 10, 512 << 20), (2 << 20, 512 << 20)]
    rows = [row for page_bytes, size in sizes for row in files(page_bytes, size, 2 if quick else 5)]
    progress("killed")
    rows.append(killed(2 if quick else 20))
    pin()
    model = load_model(None)
    progress("serving")
    rows += [serving(model, times, 30 if quick else 120) for times in (0, 4)]
    progress("step")
    rows += model_steps(model, 16, 4 if quick else 20)
    rows += manager_steps(257, 8 if quick else 20)
    for case in ("serving", "step", "files", "killed"):
        print(f"\n{table([row for row in rows if row['case'] == case])}", flush=True)
    if chosen.json:
        command = "python -m benchmarks.tiers" + (" --quick" if quick else "")
        write(chosen.json, {**header(command, _STATISTICS), "rows": rows})


if __name__ == "__main__":
    main()
