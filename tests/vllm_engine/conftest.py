"""These tests run in their own environment (`make test-vllm`). In other environments they are not collected."""

import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]

if HAS_VLLM:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # The wheel is built for CUDA and finds no platform here, so the platform is set before the rest of vLLM is
    # imported.
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()


@pytest.fixture
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Returns `make(role, shape)`, which makes an engine. The engine is closed at the end of the test."""
    from tests.vllm_engine.engine import Engine, Shape

    folder: Path = tmp_path_factory.getbasetemp()
    engines: list[Engine] = []
    numbers = itertools.count()

    def build(role: str, shape: Shape | None = None, engine_id: str = "") -> Engine:
        name = engine_id or f"{role}-{next(numbers)}-{os.urandom(4).hex()}"
        engines.append(Engine(folder, role, shape or Shape(), name))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()
