"""Measures on a GPU: kernels by page order, copies to the host tier and back, the loop, and pulls.

Kernels that are not installed are left out. The kernel rows have the time of a decode step of one layer, for each page
order. The step has 64 requests of 4,096 tokens in bfloat16, and 32 query heads of 128 elements on 8 key/value heads.
Its pages are at random places among those of 8 layers.
"""

# pyright: basic, reportMissingImports=false
# ruff: noqa: PLC0415 - a kernel is imported where it is asked for

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.frame import Row, header, now, progress, settle, summary, table, write
from benchmarks.pulls.devices import between
from kvcache import KVCacheParams, PagedKVCacheManager, RaggedKVCacheInputs, TextContext
from kvcache.copies import PageMover
from kvcache.layout import allocate_host_rows
from scheduler_adapters.base import RunTokens
from scheduler_adapters.loop import Request, ServingLoop
from scheduler_adapters.overlapped import OverlappedLoop, RunBatch

ORDERS = ("head,layer,side,token,dim", "layer,side,head,token,dim", "layer,side,token,head,dim")
REQUESTS, TOKENS, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 4096, 32, 8, 128, 8
KV_BYTES = 2 * REQUESTS * TOKENS * KV_HEADS * HEAD_DIM * 2
_STATISTICS = "us_min and us_median: of n samples; gbps: bytes by the median; *_ms: means over 32 steps"


def of_device(work: Callable[[int], object], repeats: int = 30) -> Row:
    """Returns the microseconds of the device work that `work` launches, measured by CUDA events."""
    for at in range(5):
        work(at)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for at, (start, end) in enumerate(events):
        start.record()
        work(at)
        end.record()
    torch.cuda.synchronize()
    return summary([1e3 * start.elapsed_time(end) for start, end in events])


# ---- kernels


class Decode:
    """A pool with one page order, and the tables of requests whose pages lie at random positions in the pool."""

    def __init__(self, order: str, page_size: int) -> None:
        self.page_size = page_size
        params = KVCacheParams(torch.bfloat16, KV_HEADS, HEAD_DIM, page_size=page_size, page_order=order)
        columns = TOKENS // page_size
        memory = (REQUESTS * columns + 1) * page_size * params.bytes_per_token(LAYERS)
        self.manager = PagedKVCacheManager(params, 8, TOKENS, LAYERS, ["cuda"], available_cache_memory=memory)
        self.blocks = self.manager.device_tensors[0][0]
        for layer in range(LAYERS):
            self.blocks[:, :, layer].normal_()
        pages = torch.randperm(REQUESTS * columns, device="cuda")[: REQUESTS * columns] + 1
        self.table = pages.to(torch.int32).view(REQUESTS, columns)
        self.lengths = torch.full((REQUESTS,), TOKENS, dtype=torch.int32, device="cuda")
        self.query = torch.randn(REQUESTS, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        self.output = torch.empty_like(self.query)

    def layer(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The key and value pages of a layer. The caller takes a different layer each time."""
        return self.blocks[:, 0, at % LAYERS], self.blocks[:, 1, at % LAYERS]


def flash_attention(batch: Decode) -> Callable[[int], object]:
    """FlashAttention 2."""
    from flash_attn import flash_attn_with_kvcache

    if batch.page_size % 256:
        raise ImportError("FlashAttention needs a page size that is a multiple of 256 tokens")
    query = batch.query[:, None]
    return lambda at: flash_attn_with_kvcache(
        query, *batch.layer(at), cache_seqlens=batch.lengths, block_table=batch.table, causal=True
    )


def _flash_infer(batch: Decode, *, tensor_cores: bool) -> Callable[[int], object]:
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    columns = batch.table.shape[1]
    ends = torch.arange(REQUESTS + 1, dtype=torch.int32, device="cuda") * columns
    last = torch.full_like(batch.lengths, batch.page_size)
    shape = (HEADS, KV_HEADS, HEAD_DIM, batch.page_size)
    kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(ends, batch.table.flatten(), last, *shape, **kinds)
    return lambda at: wrapper.run(batch.query, batch.layer(at), out=batch.output)


def flash_infer(batch: Decode) -> Callable[[int], object]:
    """FlashInfer's kernel for decoding."""
    return _flash_infer(batch, tensor_cores=False)


def flash_infer_tensor_cores(batch: Decode) -> Callable[[int], object]:
    """FlashInfer's kernel for prompts, which uses tensor cores."""
    return _flash_infer(batch, tensor_cores=True)


def vllm_triton(batch: Decode) -> Callable[[int], object]:
    """The Triton kernel of vLLM."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    first_rows = torch.arange(REQUESTS + 1, dtype=torch.int32, device="cuda")
    return lambda at: unified_attention(
        batch.query,
        *batch.layer(at),
        batch.output,
        cu_seqlens_q=first_rows,
        max_seqlen_q=1,
        seqused_k=batch.lengths,
        max_seqlen_k=TOKENS,
        softmax_scale=HEAD_DIM**-0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=batch.table,
        softcap=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )


def sglang_triton(batch: Decode) -> Callable[[int], object]:
    """SGLang's Triton kernel for decoding, with 8 splits of a context."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    keys, _ = batch.layer(0)
    page, token, head, element = keys.stride()
    stride, splits = page // token, 8
    places = torch.arange(TOKENS, device="cuda")
    slots = batch.table.long()[:, places // batch.page_size] * stride + places % batch.page_size
    ends = torch.arange(REQUESTS + 1, dtype=torch.int32, device="cuda") * TOKENS
    shape = ((len(keys) - 1) * stride + batch.page_size, KV_HEADS, HEAD_DIM)
    logits = torch.empty(REQUESTS, HEADS, splits, HEAD_DIM, device="cuda")
    lse = torch.empty(REQUESTS, HEADS, splits, device="cuda")
    counts = torch.full((REQUESTS,), splits, dtype=torch.int32, device="cuda")

    def run(at: int) -> None:
        flat = [one.as_strided(shape, (token, head, element), one.storage_offset()) for one in batch.layer(at)]
        decode_attention_fwd(
            batch.query,
            *flat,
            batch.output,
            ends,
            slots.flatten(),
            logits,
            lse,
            counts,
            splits,
            HEAD_DIM**-0.5,
            1.0,
            1.0,
        )

    return run


KERNELS = (flash_attention, flash_infer, flash_infer_tensor_cores, vllm_triton, sglang_triton)


def kernels() -> Iterator[Row]:
    """A row for each kernel, page size and page order, and one for a plain copy of the same number of bytes."""
    pair = [torch.randn(KV_BYTES // 4, device="cuda") for _ in range(2)]
    time_of = of_device(lambda _: pair[0].copy_(pair[1]))
    yield {"case": "kernel", "kernel": "copy", **time_of, "gbps": round(2 * KV_BYTES / time_of["us_median"] / 1e3)}
    pair.clear()
    for page_size in (16, 256):
        for order in ORDERS:
            batch = Decode(order, page_size)
            for kernel in KERNELS:
                try:
                    time_of = of_device(kernel(batch))
                except ImportError:
                    continue
                shape = {"case": "kernel", "kernel": kernel.__name__, "page": page_size, "page_order": order}
                yield {**shape, **time_of, "gbps": round(KV_BYTES / time_of["us_median"] / 1e3)}
            batch.manager.close()
            del batch
            torch.cuda.empty_cache()


# ---- copies


def copies() -> Iterator[Row]:
    """Copies of pages to pinned slots and back, with consecutive or shuffled slots, and a plain copy."""
    for kib, count in ((32, 256), (128, 256), (2048, 1), (2048, 16), (2048, 256)):
        for way, by, call in _calls(kib, count):
            whole, of_thread = list[float](), list[float]()
            for _ in range(13):
                torch.cuda.synchronize()
                start = now()
                call()
                called = now()
                torch.cuda.synchronize()
                whole.append((now() - start) / 1e3)
                of_thread.append((called - start) / 1e3)
            found = summary(whole[3:])
            gbps = round(count * (kib << 10) / found["us_median"] / 1e3, 1)
            thread_us = round(statistics.median(of_thread[3:]), 1)
            shape = {"case": "copy", "page_kib": kib, "pages": count, "way": way, "by": by}
            yield {**shape, **found, "gbps": gbps, "thread_us": thread_us}


def _calls(kib: int, count: int) -> Iterator[tuple[str, str, Callable[[], object]]]:
    pages = torch.zeros((1024, kib << 7), dtype=torch.int64, device="cuda")
    slots = allocate_host_rows(1024, kib << 10, pages)
    mover = PageMover([(pages, slots)], None)
    dense, host = torch.zeros(count, kib << 7, dtype=torch.int64, device="cuda"), slots.view(torch.int64)[:count]
    taken = np.sort(np.random.default_rng(0).choice(1024, count, replace=False)).astype(np.int32)
    yield "to the host", "cudaMemcpyAsync", lambda: host.copy_(dense, non_blocking=True)
    yield "to the device", "cudaMemcpyAsync", lambda: dense.copy_(host, non_blocking=True)
    for by, given in (
        ("run", np.arange(count, dtype=np.int32)),
        ("scattered", np.random.default_rng(1).permutation(taken)),
    ):
        yield "to the host", by, lambda given=given: mover.store(taken, given)
        yield "to the device", by, lambda given=given: mover.load(given, taken)


# ---- the loop


def loop() -> Iterator[Row]:
    """The host's part of a decode step, with pages on the CPU and on the GPU.

    In the rows `idle`, the loop waits after each step for the work that the step has launched.
    """
    for device in ("cpu", "cuda"):
        for count in (1, 64, 256, 1024):
            params = KVCacheParams(torch.bfloat16, 1, 8, enable_prefix_caching=True, page_size=16)
            memory = (count * 64 + 1) * 16 * params.bytes_per_token(1)
            manager = PagedKVCacheManager(params, count, 1024, 1, [device], available_cache_memory=memory)
            contexts = [TextContext(np.arange(at, at + 128 + at % 16), 1024) for at in range(count)]
            for context in contexts:
                manager.external_claim(context.request_id)
            batch, tokens = manager.batch(contexts), np.ones(count, np.int32)
            for kind in ("fetch", "fetch_ahead"):
                times = _steps(manager, batch, tokens, ahead=kind == "fetch_ahead")
                yield {"case": "step", "pages_on": device, "batch": count, "calls": kind, **summary(times)}
            manager.close()


def _steps(manager: PagedKVCacheManager, batch: Any, tokens: np.ndarray, *, ahead: bool) -> list[float]:
    def step() -> None:
        manager.reserve_batch(batch)
        if ahead:
            planned = manager.fetch_ahead(batch)
            planned.padded(len(tokens))
            batch.update(tokens)
            manager.step(batch)
            manager.end_step(planned)
        else:
            manager.fetch(batch)
            batch.update(tokens)
            manager.step(batch)

    times: list[float] = []
    settle()
    for at in range(16 + 160):
        start = now()
        step()
        if at >= 16:
            times.append((now() - start) / 1e3)
        torch.cuda.synchronize()
    return times


class Launch:
    """A running step: its tokens, and the event that follows it."""

    def __init__(self, tokens: torch.Tensor, count: int) -> None:
        self._tokens, self._count = tokens, count
        self._event: Any = torch.cuda.Event()
        self._event.record()

    def result(self) -> list[int]:
        """Waits for the tokens."""
        self._event.synchronize()
        return self._tokens[: self._count].tolist()


class Weights:
    """Stands for a model: reads its weights once in each step, and writes KV through the given tables.

    A graph is captured for each set of tables that the model gets: several from `fetch_ahead`, one from `fetch`.
    """

    eos_token_ids = frozenset[int]()

    def __init__(self, batch: int, gib: float, columns: int) -> None:
        self._batch, self._columns = batch, columns
        self._hidden = torch.randn(batch, 4096, device="cuda", dtype=torch.bfloat16)
        count = math.ceil(gib * 2**30 / (4096 * 4096 * 2))
        self._weights = torch.randn(count, 4096, 4096, device="cuda", dtype=torch.bfloat16) / 64
        self._graphs: dict[int, Any] = {}
        self._tokens = torch.zeros(batch, dtype=torch.int64, device="cuda")
        self._host = torch.zeros(batch, dtype=torch.int64).pin_memory()

    def run(self, batch: Sequence[RunTokens], inputs: Sequence[RaggedKVCacheInputs]) -> list[int]:
        """Returns one token for each request."""
        return self.launch([(batch, inputs)]).result()

    def launch(self, batches: Sequence[RunBatch]) -> Launch:
        """Begin a step."""
        ((batch, (entry,)),) = batches
        if len(batch) < self._batch or batch[0].active_length > 1:  # prompts
            return Launch(self._host, len(batch))
        key = entry.lookup_table.data_ptr()
        if key not in self._graphs:
            self._graphs[key] = self._capture(entry)
        lengths, graph = self._graphs[key]
        lengths.copy_(entry.cache_lengths)
        graph.replay()
        self._host.copy_(self._tokens, non_blocking=True)
        return Launch(self._host, len(batch))

    def _capture(self, entry: RaggedKVCacheInputs) -> tuple[torch.Tensor, Any]:
        full = entry.lookup_table.as_strided((self._batch, self._columns), entry.lookup_table.stride())
        lengths, graph = torch.zeros_like(entry.cache_lengths), torch.cuda.CUDAGraph()
        self._step(full, lengths, entry.blocks)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self._step(full, lengths, entry.blocks)
        return lengths, graph

    def _step(self, full: torch.Tensor, lengths: torch.Tensor, blocks: torch.Tensor) -> None:
        size = blocks.shape[3]
        pages = full.gather(1, (lengths // size)[:, None].long())[:, 0].long()
        states = self._hidden
        for layer, weight in enumerate(self._weights):
            states = states @ weight
            at = layer % blocks.shape[2]
            blocks[pages, :, at, (lengths % size).long()] = states[:, :8].view(self._batch, 1, 1, 8)
        self._tokens.copy_(states.float().argmax(1) * 0 + 1)


def overlap() -> Iterator[Row]:
    """A `ServingLoop` and an `OverlappedLoop` over a model that reads 15 GiB of weights in each step.

    An 8B model in bfloat16 has this size.
    """
    for count, gib in ((64, 15.0), (256, 15.0), (256, 2.0)):
        model = Weights(count, gib, 64)
        found: Row = {"case": "overlap", "batch": count, "weights_gib": gib}
        for name, kind in (("plain_ms", ServingLoop), ("overlapped_ms", OverlappedLoop)):
            params = KVCacheParams(torch.bfloat16, 1, 8, enable_prefix_caching=True, page_size=16)
            memory = (count * 64 + 1) * 16 * params.bytes_per_token(4)
            manager = PagedKVCacheManager(params, count, 1024, 4, ["cuda"], available_cache_memory=memory)
            running: Any = kind(manager, model, count * 129)
            for number in range(count):
                running.add(Request(f"r{number}", list(range(number, number + 128)), 200))
            for _ in range(16):
                running.step()
            settle()
            torch.cuda.synchronize()
            start = now()
            for _ in range(32):
                running.step()
            torch.cuda.synchronize()
            found[name] = round((now() - start) / 32e6, 3)
            if isinstance(running, OverlappedLoop):
                running.close()
        _, graph = next(iter(model._graphs.values()))  # noqa: SLF001
        alone = of_device(lambda _, graph=graph: graph.replay(), 20)
        yield {**found, "model_ms": round(alone["us_median"] / 1e3, 3)}
        del model, graph
        torch.cuda.empty_cache()


# ---- pulls


def pulls() -> Iterator[Row]:
    """Hand-overs between two processes, from the import to its commit. The first contact is not included."""
    for device, order, repeats in (("cuda", "same", 5), ("cpu", "same", 5), ("cuda", "other", 2)):
        sizes = (1, 16, 256, 2048) if order == "same" else (1, 16, 256)
        counts = [8, *[count for count in sizes for _ in range(repeats)]]
        found = between(device, device, counts, source=order == "same")
        for count in sizes:
            seconds = [took for pages, took, _ in found[1:] if pages == count]
            if any(wrong for pages, _, wrong in found if pages == count):
                raise RuntimeError(f"{device}: some of the {count} pulled pages have wrong bytes")
            times = summary([1e6 * one for one in seconds])
            gbps = round(count * (128 << 10) / times["us_min"] / 1e3, 2)
            shape = {"case": "pull", "pages_on": device, "order": order, "pages": count, "page_kib": 128}
            yield {**shape, **times, "gbps": gbps}


PARTS = {"kernels": kernels, "copies": copies, "loop": loop, "overlap": overlap, "pulls": pulls}


def main() -> None:
    """Runs the parts of the benchmark and reports their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows, and how, where and of what")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        progress("gpu: left out, for there is no CUDA device")
        return
    rows: list[Row] = []
    for part in chosen.only.split(","):
        found: list[Row] = []
        for row in PARTS[part]():
            found.append(row)
            print(row, flush=True)
        print(f"\n{part}\n{table(found)}", flush=True)
        rows += found
    if chosen.json:
        top = header("python -m benchmarks.gpu", _STATISTICS)
        top["machine"] |= {"gpu": torch.cuda.get_device_name()}
        write(chosen.json, {**top, "rows": rows})


if __name__ == "__main__":
    main()
