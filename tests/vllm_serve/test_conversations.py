"""The benchmark of conversations, in its smallest form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.vllm_conversations import PAIR, SETTINGS
from tests.vllm_serve.server import environment


@pytest.mark.long
def test_our_conversations_find_their_former_turns_and_are_right(tmp_path: Path) -> None:
    target = tmp_path / "conversations.json"
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.vllm_conversations", "--quick", "--json", str(target)]
    ran = subprocess.run(
        [*command, "--ways", "ours"], capture_output=True, text=True, timeout=1000, check=False, env=environment()
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    rows = {(row["setting"], row["turn"]): row for row in json.loads(target.read_text())["rows"]}
    for setting in SETTINGS:
        every = rows[setting, "all"]
        assert (every["n"], every["wrong"], every["failed"], every["held"]) == (8, 0, 0, 0)
        assert every["pulled"] > 0
        assert rows[setting, "1"]["found"] == 0
    # prefill has computed the first prompts, and decode their answers: at most a block of each is not found
    first, second = rows[PAIR, "1"], rows[PAIR, "2"]
    assert second["found"] >= first["prompt"]
