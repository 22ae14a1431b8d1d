"""What runs in processes of its own beside ours: NIXL as it comes, and vLLM's connector."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.frame import Row, progress
from benchmarks.peers.__main__ import PEERS
from benchmarks.peers.environment import PeerError, needed, python_of, scripts_folder

ROOT = Path(__file__).resolve().parents[2]
_VLLM_SCRIPT = "vllm_nixl_cpu_demo.py"


def as_shipped(sizes: Sequence[tuple[int, int]]) -> list[Row]:
    """A row for each (bytes of a page, pages), contiguous and random."""
    command = [sys.executable, "-m", "benchmarks.pulls.as_shipped", *(f"{size},{pages}" for size, pages in sizes)]
    return [_row("nixl as shipped", found["page_bytes"], found) for found in _run("NIXL as shipped", command, {})]


def vllm(sizes: Sequence[tuple[int, int, int]], *, huge: bool) -> list[Row]:
    """A row for each (layers, heads, blocks): random blocks of 16 tokens, a tensor for each layer, head_dim of 64.

    Args:
        sizes: what is pulled.
        huge: torch allocates in huge pages, as ours does, which is not its default.

    Raises:
        PeerError: vLLM's environment or script is missing, or it failed.
    """
    folder = scripts_folder(None)
    needed(folder, _VLLM_SCRIPT)
    path = needed(folder, PEERS["vllm"].requirements)
    python = python_of("vllm", ["--no-deps", "--requirement", str(path)], path.read_bytes())
    script = str(Path(__file__).with_name("vllm_worker.py"))
    lists = [f"{layers},{heads},64,{blocks},{max(blocks * 5 // 4, 512)}" for layers, heads, blocks in sizes]
    memory = {"THP_MEM_ALLOC_ENABLE": "1"} if huge else {}
    rows: list[Row] = []
    for found in _run("vLLM", [str(python), script, str(folder), *lists], memory):
        page_bytes = found["layers"] * found["heads"] * 4096
        one = {**found, "page_bytes": page_bytes, "pages": found["blocks"], "access": "random"}
        name = "vLLM, huge pages" if huge else "vLLM"
        rows.append(_row(name, page_bytes, one) | {"runs": found["layers"] * found["blocks"]})
    return rows


def _row(program: str, page_bytes: int, found: Row) -> Row:
    return {
        "program": program,
        "topology": "equal",
        "order": "a tensor a layer" if "layers" in found else "head-major",
        "access": found["access"],
        "memory": "4 KiB pages" if program == "vLLM" else "huge pages",
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
