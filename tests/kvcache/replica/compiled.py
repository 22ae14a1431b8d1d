"""Compiles this tree's `chained.c` for the tests. An earlier compiled module may be out of date."""

from __future__ import annotations

import importlib.util
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hatch_build

ROOT = Path(hatch_build.__file__).parent


@cache
def _chain() -> tuple[type[Any] | None, str]:
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / hatch_build.BUILT.name
        if hindered := hatch_build.compile_chained(ROOT, built):
            return None, hindered
        spec = importlib.util.spec_from_file_location("kvcache.replica.chained", built)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.Sha256Chain, ""


def compiled_chain() -> type[Any]:
    """Returns the compiled class. Skips the test if the module cannot be compiled, for example without a compiler."""
    made, hindered = _chain()
    if made is None:
        pytest.skip(hindered)
    return made
