"""Other programs for comparison, in processes of their own: NIXL alone, and vLLM's connector."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.frame import Row, progress
from benchmarks.peers.environment import PeerError, needed, scripts_folder
from benchmarks.peers.peers import interpreter
from benchmarks.pulls.as_shipped import AS_OURS
from transfer.nixl.settings import effective_settings

ROOT = Path(__file__).resolve().parents[2]
_VLLM_SCRIPT = "vllm_nixl_cpu_demo.py"


# makes torch allocate in huge pages, as our pools do; this is not torch's default
_HUGE = {"THP_MEM_ALLOC_ENABLE": "1"}
VLLM: dict[str, dict[str, str]] = {
    "vLLM": {"UCX_TLS": "all"},  # UCX's own default; without this, the script would choose another transport
    "vLLM, huge pages": {"UCX_TLS": "all", **_HUGE},
    "vLLM, UCX as ours": {**effective_settings(environ={}), **_HUGE, "PAGEWIRE_VLLM_NIXL_THREADS": "1"},
}
"""For each way to run vLLM's connector, the environment variables."""


def nixl(sizes: Sequence[tuple[int, int]], *, as_ours: bool) -> list[Row]:
    """A row for each (bytes of a page, pages), contiguous and random, with agents as shipped or like ours."""
    command = [sys.executable, "-m", "benchmarks.pulls.as_shipped", *([AS_OURS] if as_ours else [])]
    name = "nixl as ours" if as_ours else "nixl as shipped"
    found = _run(name, [*command, *(f"{size},{pages}" for size, pages in sizes)], {})
    return [_row(name, "huge pages", row["page_bytes"], row) | {"runs": _runs(row)} for row in found]


def _runs(row: Row) -> int:
    """Counts the runs as for `process_vm_readv`: pages that are adjacent on both sides form one run."""
    return 1 if row["access"] == "contiguous" else row["pages"]


def vllm(sizes: Sequence[tuple[int, int, int]], way: str) -> list[Row]:
    """A row for each (layers, heads, blocks): random blocks of 16 tokens, a tensor for each layer, head_dim of 64.

    Args:
        sizes: the sizes to pull, as (layers, heads, blocks).
        way: key of `VLLM`.

    Raises:
        PeerError: vLLM's environment or script is missing, or the script failed.
    """
    folder = scripts_folder(None)
    needed(folder, _VLLM_SCRIPT)
    python = interpreter("vllm", folder)
    script = str(Path(__file__).with_name("vllm_worker.py"))
    lists = [f"{layers},{heads},64,{blocks},{max(blocks * 5 // 4, 512)}" for layers, heads, blocks in sizes]
    memory = "4 KiB pages" if way == "vLLM" else "huge pages"
    rows: list[Row] = []
    for found in _run(way, [str(python), script, str(folder), *lists], VLLM[way]):
        page_bytes = found["layers"] * found["heads"] * 4096
        one = {**found, "pages": found["blocks"], "access": "random"}
        rows.append(_row(way, memory, page_bytes, one) | {"runs": found["layers"] * found["blocks"]})
    return rows


def _row(program: str, memory: str, page_bytes: int, found: Row) -> Row:
    return {
        "program": program,
        "topology": "equal",
        "order": "a tensor a layer" if "layers" in found else "head-major",
        "access": found["access"],
        "memory": memory,
        "page_bytes": page_bytes,
        "pages": found["pages"],
        "gbps": round(page_bytes * found["pages"] / found["us_min"] / 1e3, 2),
        "host_us": round(found["host_us"], 1) if "host_us" in found else None,
        "us": round(found["us_min"], 1),
        "us_median": round(found["us_median"], 1),
    }


def _run(name: str, command: list[str], added: dict[str, str]) -> list[Row]:
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("UCX_", "NIXL_"))}
    environment = {**plain, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **added}
    done = subprocess.run(  # noqa: S603 - our own, in an interpreter that we made
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    rows: list[Row] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not rows:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise PeerError(f"{name} gave no figures (exit status {done.returncode}):\n{last}")
    progress(f"{name}: {len(rows)} rows")
    return rows
