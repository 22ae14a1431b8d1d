"""The versions of vLLM with which the connector starts."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from scheduler_adapters.vllm import VLLM
from scheduler_adapters.vllm.versions import check_version
from transfer.errors import InvalidEngineError


def test_the_version_that_runs_is_known() -> None:
    assert version("vllm") == VLLM


@pytest.mark.parametrize("found", ["0.32.0", "0.32.0+cpu", "0.33.0", "0.33.1.dev5+g0123456"])
def test_versions_that_it_is_for(found: str) -> None:
    assert check_version(found) == found


@pytest.mark.parametrize("found", ["0.3.2", "0.29.0", "0.31.2+cpu", "0.34.0rc1", "1.32.0", "0.330.0"])
def test_any_other_is_refused_in_one_line(found: str) -> None:
    with pytest.raises(InvalidEngineError) as error:
        check_version(found)
    assert str(error.value).startswith(f"this is vLLM {found}; ")
    assert "0.32 and 0.33" in str(error.value)
    assert "\n" not in str(error.value)
