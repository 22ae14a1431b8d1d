"""Every example runs as its docstring says, prints what it shows, and uses only public names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.programs import ROOT, printed

PRINTED = {
    "serving_loop": r"""8 answers are equal to those computed without a cache
2 preemptions, 32 of 146 prompt tokens were cached""",
    "prefill_decode": "4 prompts were computed in one process and decoded in another: all tokens are equal",
    "chunk_by_chunk": """40 tokens computed, 32 offered
72 tokens computed, 64 offered
96 tokens computed, 96 offered
decode runs tokens 96 to 97""",
    "give_up": r"""\['read', 'its client has gone', 'its client has gone'\]
0 0 0 set\(\)""",
    "connector": r"equal on each rank: \[True, True\] failed: {}",
    "connector_groups": r"""full layer equal: True window layer equal: True
failed loads: \['late'\]
how leases ended: {'late': 'its client has gone', 'good': 'read'}""",
    "beams_and_drafts": r"""(a beam of log probability -\d+\.\d\d ends with \[\d+, \d+, \d+, \d+\]
){3}16 tokens in 4 runs, equal to those without guesses""",
    "eviction_order": r"""least recently used first: 0% of the tokens are cached
most recently used first: 41% of the tokens are cached""",
    "scan_resistant_order": r"""least recently used first: 0 of 1024 tokens are cached
found again last: 1024 of 1024 tokens are cached""",
    "kv_events": r"""(?s:.*): 4 pages are cached
(?s:.*): 6 pages are cached
(?s:.*): 8 pages are cached
the first page of the last prompt: True
AllBlocksCleared: 0 pages are cached""",
    "weights": """finish: 8 of 12 tokens are of step 1, 4 of step 2, and the answer is right
recompute: 12 of 12 tokens are of step 2, and the answer is right
rollback to step 1: 8 of 12 tokens are cached
max_staleness=1: 8 of 9 tokens are of step 1, and the answer is right""",
    "recurrent_model": r"""turn 1: 0 of 20 prompt tokens were cached, the answer is right
turn 2: 24 of 37 prompt tokens were cached, the answer is right
turn 3: 44 of 54 prompt tokens were cached, the answer is right
6 copies of states are kept""",
}


FILES = sorted(str(path.relative_to(ROOT / "examples").with_suffix("")) for path in (ROOT / "examples").rglob("*.py"))


def test_every_example_is_here_and_in_the_list_for_readers() -> None:
    assert {name for name in FILES if "/" not in name} == set(PRINTED), "kernels have tests where they are installed"
    listed = re.findall(r"^\| \[([\w/]+)\.py\]\(\1\.py\) \|", (ROOT / "examples/README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == FILES


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs_and_prints_what_it_shows(name: str, tmp_path: Path) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / f"examples/{name}.py").read_text())) or ""
    assert docstring.endswith(f"    python examples/{name}.py"), "its docstring ends with the command"
    said = printed(ROOT / f"examples/{name}.py", tmp_path)
    assert re.fullmatch(PRINTED[name], said), said


@pytest.mark.parametrize("name", FILES)
def test_an_example_imports_the_packages_and_none_of_their_rooms(name: str) -> None:
    public = {"kvcache", "transfer", "pagewire"}
    for node in ast.walk(ast.parse((ROOT / f"examples/{name}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in public:
            assert node.module in public, node.module
        elif isinstance(node, ast.Import):
            assert not any(one.name.startswith((*public,)) and "." in one.name for one in node.names)
