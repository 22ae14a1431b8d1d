"""Measures how much a kernel of `examples/kernels` differs from our own attention, for each dtype and page order.

python -m tests.kernel_errors vllm_triton --page-size 16 --dtypes float32,float16
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Each limit is twice the measured error (docs/guides/kernels.md), rounded up.
MOST = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}
SHAPES = ((8, 2, 64), (4, 4, 32))  # heads, kv_heads, head_dim


def measured(kernel: str, page_size: int, dtypes: str, python: str = sys.executable, **env: str) -> dict[str, float]:
    """Returns the largest errors, `"dtype page_order"` → error, measured in a separate process."""
    command = [python, "-m", "tests.kernel_errors", kernel, "--page-size", str(page_size), "--dtypes", dtypes]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])} | env,
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_within_tolerance(errors: dict[str, float], orders: int) -> None:
    """Asserts that every error is within its limit and that none is missing."""
    dtypes = {name.split()[0] for name in errors}
    assert len(errors) == orders * len(dtypes)
    assert {name: error for name, error in errors.items() if not error <= MOST[name.split()[0]]} == {}


def our_attention(batch: Any, layer: int) -> Any:
    """Returns the result of `scheduler_adapters.hf` over the same pages."""
    from scheduler_adapters.hf.paged_attention import PagedBatch

    batch.write(layer)
    layers = {at: (0, at) for at in range(batch.key.shape[0])}
    ours = PagedBatch([batch.inputs], batch.starts.tolist(), batch.counts, layers)
    return ours.attend(layer, batch.query, batch.key.shape[2], batch.query.shape[-1] ** -0.5)


def main() -> None:
    """Prints the largest errors as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "examples/kernels"))
    if options.kernel == "sglang_triton":
        from tests.sglang_engine import stand_ins

        stand_ins.install()
    import torch

    paged_batch = importlib.import_module("paged_batch")
    kernel = importlib.import_module(options.kernel)
    errors: dict[str, float] = {}
    orders: tuple[str, ...] = getattr(kernel, "SERVED", paged_batch.PAGE_ORDERS)
    shapes: tuple[tuple[int, int, int], ...] = getattr(kernel, "SHAPES", SHAPES)
    dtypes: list[str] = options.dtypes.split(",")
    cases = itertools.product(enumerate(dtypes), enumerate(orders))
    for (nth_dtype, dtype), (nth_order, order) in cases:
        # The interpreter is slow, so each page order runs only one shape with each of two dtypes.
        shape = shapes[(nth_dtype + nth_order) % 2]
        # Each kernel has its own batch, because a kernel may store what it writes in its own order.
        first, second = (
            paged_batch.make_batch(order, getattr(torch, dtype), options.page_size, *shape) for _ in range(2)
        )
        found = [
            (kernel.attend(first, layer).float() - our_attention(second, layer).float()).abs().max()
            for layer in (0, paged_batch.LAYERS - 1)
        ]
        errors[f"{dtype} {order}"] = max(map(float, found))
    sys.stdout.write(json.dumps(errors) + "\n")


if __name__ == "__main__":
    main()
