"""Starts, observes and ends `vllm serve` processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.vllm_serve.client import Answer, ask

OURS = {"kv_connector": "PagewireConnector", "kv_connector_module_path": "scheduler_adapters.vllm"}
THEIRS = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
LEASE = 20
"""In seconds. If no reader fetches the blocks of a lease, prefill keeps them for this long."""
START = 400
ON_GPU = shutil.which("nvidia-smi") is not None
"""Whether vLLM's wheel for CUDA runs (`make test-gpu`). Otherwise the wheel for CPUs runs."""
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""On a device, an engine of one rank runs its worker in its own process.

vLLM's build for CPUs replaces the name `uni` by `mp`, whose engine process spins while its worker computes (vLLM
0.32: `platforms/cpu.py`, `SpinCondition` in `shm_broadcast.py`). On two cores, two such servers spin for half of the
time, and first tokens take three times as long. vLLM does not replace the name of the class.
"""
_REPOSITORY = Path(__file__).resolve().parents[2]
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_ENGINE_READY_TIMEOUT_S": str(START),
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Settings:
    """The settings of a server.

    Attributes:
        model: folder of the model.
        number: distinguishes servers with equal settings.
        block_size: tokens of a block.
        tp: tensor-parallel ranks. A single rank runs in the engine's process.
        chunk: the largest number of tokens in a step; 0 for vLLM's default.
        policy: `kv_load_failure_policy`.
        role: `kv_role`.
        connector: connector in `kv_transfer_config`; empty for none.
        extra: contents of `kv_connector_extra_config`.
        max_tokens: the largest number of tokens that a request may have.
        blocks: blocks of the pool; 0 for as many as hold 16,384 tokens.
        prefix_cache: whether vLLM's own prefix cache is on.
        more: further arguments.
    """

    model: Path
    number: int = 0
    block_size: int = 32
    tp: int = 1
    chunk: int = 0
    policy: str = "fail"
    role: str = "kv_both"
    connector: str = json.dumps(OURS)
    extra: str = json.dumps({"kv_lease_duration": LEASE})
    max_tokens: int = 2048
    blocks: int = 0
    prefix_cache: bool = True
    more: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """Returns the arguments of the command line."""
        found = {
            "--served-model-name": "m", "--host": "127.0.0.1", "--dtype": "float32", "--seed": 0,
            "--max-model-len": self.max_tokens, "--max-num-seqs": 32, "--block-size": self.block_size,
            "--num-gpu-blocks-override": self.blocks or 16_384 // self.block_size, "--tensor-parallel-size": self.tp,
        }  # fmt: skip
        if ON_GPU:
            found["--gpu-memory-utilization"] = 0.15  # several servers share a device
        elif self.tp == 1:
            found["--distributed-executor-backend"] = ONE_PROCESS
        if self.chunk:
            found["--max-num-batched-tokens"] = self.chunk
        if self.connector:
            transfer: dict[str, Any] = {**json.loads(self.connector), "kv_role": self.role}
            if self.policy:
                transfer["kv_load_failure_policy"] = self.policy
            if self.extra:
                transfer.setdefault("kv_connector_extra_config", json.loads(self.extra))
            found["--kv-transfer-config"] = json.dumps(transfer)
        plain = ["--enforce-eager", "--disable-uvicorn-access-log"]
        if not self.prefix_cache:
            plain.append("--no-enable-prefix-caching")
        return [*plain, *self.more, *(str(part) for pair in found.items() for part in pair)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment() -> dict[str, str]:
    """Returns the environment of every process here: one core, no downloads, and this source tree first on the path."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    return {**os.environ, **_ENVIRONMENT, "PATH": path, "PYTHONPATH": str(_REPOSITORY)}


@dataclass
class Process:
    """A process and its descendants, with a log."""

    command: list[str]
    log: Path
    env: dict[str, str] = field(default_factory=environment)

    def start(self) -> None:
        self._log_from = self.log.stat().st_size if self.log.exists() else 0
        self.started = time.monotonic()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=_REPOSITORY,
            )

    @property
    def text(self) -> str:
        """Returns the output of the process since its start."""
        with self.log.open("rb") as log:
            log.seek(self._log_from)
            return log.read().decode(errors="replace")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self, sign: int = signal.SIGTERM, timeout: float = 30) -> None:
        """Ends the process and all remaining processes of its session."""
        with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
            os.kill(self.process.pid, sign)
            self.process.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """Kills all processes of the server at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Server(Process):
    """`vllm serve`."""

    def __init__(self, settings: Settings, folder: Path, name: str) -> None:
        self.settings = settings
        self.port, self.side = free_port(), free_port()
        command = [str(Path(sys.executable).parent / "vllm"), "serve", str(settings.model), "--port", str(self.port)]
        super().__init__([*command, *settings.arguments], folder / f"{name}.log")
        self.env |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side)}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        """Waits until the server answers."""
        while time.monotonic() < self.started + START:
            if not self.alive:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:  # noqa: S310
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.3)
        raise RuntimeError(
            f"{self.log.name}: server not ready after {time.monotonic() - self.started:.0f} s\n{self.text[-6000:]}"
        )

    def metrics(self) -> dict[str, float]:
        """Returns vLLM's counters and gauges by name, summed over all labels except `source`."""
        found: dict[str, float] = {}
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:  # noqa: S310
            for line in answer.read().decode().splitlines():
                if match := re.match(r"(vllm:\w+)(\{[^}]*\})? (\S+)$", line):
                    source = re.search(r'source="(\w+)"', match[2] or "")
                    name = f"{match[1]} {source[1]}" if source else match[1]
                    found[name] = found.get(name, 0) + float(match[3])
        return found

    @property
    def usage(self) -> float:
        """Returns the fraction of the server's blocks that were held after its last step."""
        return self.metrics()["vllm:kv_cache_usage_perc"]

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Calls one of vLLM's endpoints for development. Returns its answer; empty if it has none."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
            assert answer.status == 200
            text = answer.read()
        return json.loads(text) if text.startswith(b"{") else {}

    def forget(self, timeout: float = 30) -> None:
        """Drops the server's prefix cache. No request may be using it.

        vLLM answers with status 200 even if it has dropped nothing, because blocks are still held.
        """
        end = time.monotonic() + timeout
        while not self.post("/reset_prefix_cache").get("success", True):
            assert time.monotonic() < end, f"{self.log.name}: the prefix cache was not reset"
            time.sleep(0.1)

    def wait_empty(self, timeout: float = 3 * LEASE + 10) -> None:
        """Waits until no block is held."""
        end = time.monotonic() + timeout
        while usage := self.usage:
            assert time.monotonic() < end, f"{self.log.name}: {usage:.4f} of its blocks are still held"
            time.sleep(0.2)


class Proxy(Process):
    """The small proxy of these tests, in front of two servers."""

    def __init__(self, prefill: Server, decode: Server, folder: Path) -> None:
        self.port = free_port()
        module = ["-m", "tests.vllm_serve.proxy", str(self.port), prefill.url, decode.url]
        super().__init__([sys.executable, *module], folder / "proxy.log")
        self.start()
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the proxy does not answer: {self.text}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass
class Pair:
    """A prefill server and a decode server."""

    prefill: Server
    decode: Server

    @property
    def both(self) -> tuple[Server, Server]:
        return self.prefill, self.decode

    def prefilled(self, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
        """Makes prefill run a prompt. Returns the params for a reader."""
        answer = ask(
            self.prefill.url, prompt, **{"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}, **more}
        )
        assert answer.status == 200, answer
        assert isinstance(answer.params, dict)
        return answer.params

    def ask(self, prompt: Sequence[int], **more: Any) -> Answer:
        """Runs a prompt on both servers."""
        return ask(self.decode.url, prompt, kv_transfer_params=self.prefilled(prompt), **more)

    def forget(self) -> None:
        for server in self.both:
            server.wait_empty()
            server.forget()
