"""A real server logs one line about our connector when it starts, and wrong options end the start."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_serve.client import PROMPTS, ask
from tests.vllm_serve.server import Server, Settings


def test_one_line_says_which_connector_answers_where(servers: Any, model: Callable[..., Path]) -> None:
    (server,) = servers.get(Settings(model("llama")))
    lines = re.findall(r"pagewire \S+ under vLLM .*", server.text)
    wanted = (
        rf"pagewire [\d.]+ under vLLM [\d.+a-z]+: engine '[\w-]+' answers readers at tcp://127\.0\.0\.1:{server.side}; "
    )
    assert len(lines) == 1
    assert re.fullmatch(rf"{wanted}leases of 20 s, keys: none", lines[0])
    assert ask(server.url, PROMPTS[0], max_tokens=1).status == 200


def test_wrong_options_end_the_start_all_at_once_and_before_memory_is_measured(
    model: Callable[..., Path], folder: Path
) -> None:
    extra = json.dumps({"host": "0.0.0.0", "kv_lease_duration": "soon", "kv_lease": 3})  # noqa: S104
    server = Server(Settings(model("llama"), extra=extra), folder, "wrong")
    server.start()
    try:
        with pytest.raises(RuntimeError, match="not ready"):
            server.wait()
        (line, *_) = re.findall(r"InvalidEngineError: (.*)", server.text)
        for part in ("there is no option 'kv_lease'", "host is '0.0.0.0'", "kv_lease_duration is 'soon'"):
            assert part in line
        assert "KV cache layout" not in server.text
        assert "Creating v1 connector" not in server.text
    finally:
        server.kill()
