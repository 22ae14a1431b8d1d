"""Tests the part of `pagewire plan` that replays a trace. Each figure equals the figure of `pagewire replay` with the
same number of blocks.
"""

import json
import random
import re
from pathlib import Path

import pytest

from pagewire.cli import main
from pagewire.plan.layers import read_model
from pagewire.plan.memory import choice
from pagewire.plan.trace import TraceQuestion, sweep
from pagewire.plan.ways import MemoryAsked
from pagewire.replay.replay import BlockPages, optimum_hits, reference_lru_hits, replay
from scheduler_adapters.errors import PlanError, ReplayError

CONFIGS = Path(__file__).parent / "configs"
GIB = 1 << 30


def sessions(count: int, seed: int = 0) -> list[list[int]]:
    """Returns resumed conversations. Each conversation has its own blocks, and all have one common block."""
    rng, turns, trace = random.Random(seed), dict[int, int](), list[list[int]]()
    for _ in range(count):
        who = rng.randrange(40)
        turns[who] = turns.get(who, 2) + rng.randrange(3)
        trace.append([0, *(1000 * (who + 1) + at for at in range(turns[who] % 20 + 1))])
    return trace


def question(memory: int = GIB, tp: int = 8, dp: int = 1, tier: int = 0, block: int = 512) -> TraceQuestion:
    model = read_model(CONFIGS / "llama-3-70b")
    return TraceQuestion(choice(model, tp, dp, MemoryAsked(memory, 16, 8192, (512,))), memory, 16, block, 1000.0, tier)


def test_each_point_is_the_replay_of_as_many_blocks() -> None:
    trace = sessions(300)
    refs = sum(map(len, trace))
    # A token takes 40 KiB on a rank, so a GiB has 51 blocks of 512 tokens. The rest of the GiB is too small for a
    # block.
    found = sweep(trace, question())
    assert (found.now.blocks, found.now.tier_blocks, found.now.bytes) == (51, 0, 8 * GIB)
    assert found.prefill_s == refs * 512 / 1000
    assert {(point.blocks, point.tier_blocks) for point in found.others} == {
        # The pairs are the number of blocks in memory and the number of blocks in the host tier. A quarter of the
        # memory is less than one request needs, so it has no pair.
        *((25, 0), (102, 0), (204, 0), (102, 0), (204, 0)),
        *((51, 8 * GIB // (327_680 * 512)), (51, 4 * 8 * GIB // (327_680 * 512))),  # tiers
    }
    for point in [found.now, *found.others]:
        held = point.blocks + point.tier_blocks
        assert point.lru_pct == 100 * reference_lru_hits(trace, point.blocks) / refs
        assert point.optimum_pct == 100 * optimum_hits(trace, held) / refs
        assert point.hit_pct <= point.optimum_pct
        if point.hosts == 1 and not point.tier:
            assert point.hit_pct == point.lru_pct
        assert point.points == pytest.approx(point.hit_pct - found.now.hit_pct)
        assert point.saved_s == pytest.approx(point.points / 100 * refs * 512 / 1000)
    assert max(point.points for point in found.others) > 5


@pytest.mark.parametrize(("longest", "fits"), [(25, True), (26, False)])
def test_a_size_that_just_holds_the_longest_request_is_replayed(longest: int, fits: bool) -> None:
    found = sweep([[*range(longest)], [0, 1]], question())
    assert (GIB // 2 in [point.memory for point in found.others]) == fits, "25 blocks are in half a GiB"


def test_replicas_of_a_host_have_a_share_of_the_blocks_each() -> None:
    found = sweep(sessions(100), question(tp=2, dp=4, memory=4 * GIB))
    assert (found.now.blocks, found.now.bytes) == (4 * 51, 8 * 4 * GIB)


def test_a_trace_that_cannot_be_replayed_is_an_error_with_the_reason() -> None:
    with pytest.raises(ReplayError, match="a request of 60 blocks does not fit: with 51 blocks"):
        sweep([[*range(60)]], question())
    with pytest.raises(PlanError, match="--block-tokens is 100: a multiple of the page size 16 is needed"):
        sweep(sessions(3), question(block=100))
    with pytest.raises(ReplayError, match=r"60 blocks with its state, as large as 6\.3 blocks, does not fit"):
        sweep([[*range(60)]], hybrid(GIB // 2))
    with pytest.raises(ReplayError, match=r"a host tier of 1 blocks: .* must hold 2 states"):
        sweep(sessions(3), hybrid(tier=15 << 20))


def hybrid(memory: int = GIB, tier: int = 0) -> TraceQuestion:
    model = read_model(CONFIGS / "qwen3-next-80b")
    return TraceQuestion(choice(model, 1, 1, MemoryAsked(memory, 16, 16, (16,))), memory, 16, 512, 1000.0, tier)


def test_with_recurrent_layers_the_managers_own_states_are_replayed() -> None:
    """A state takes as much memory as 6.16 blocks of this model. A prompt is found up to the last kept state."""
    trace, asked = sessions(120), hybrid()
    assert asked.divided == BlockPages(3, 19), "less than a twentieth too large"
    refs, found = sum(map(len, trace)), sweep(trace, asked)
    for point in [found.now, *found.others]:
        alone = replay(trace, point.blocks, point.hosts, host_blocks=point.tier_blocks)
        assert point.optimum_pct >= 100 * alone.hits / refs > point.hit_pct > 0, "states take room away from blocks"
    large = [point for point in found.others if point.memory == 4 * GIB]
    assert large[0].hit_pct > found.now.hit_pct + 5
    assert max(point.hit_pct for point in found.others if point.tier) > found.now.hit_pct, (
        "states must be found in the host tier, too"
    )


@pytest.mark.parametrize("divided", [BlockPages(1, 2), BlockPages(4, 3)])
def test_a_prompt_is_found_up_to_a_kept_state(divided: BlockPages) -> None:
    """States are kept at the ends of prompts and where prompts diverge. The third prompt finds no state where it
    diverges, and keeps a state there.
    """
    trace = [[0, 1, 2], [0, 1, 2, 3], [0, 1, 9], [0, 1, 8], [0, 1, 2, 3, 4]]
    pages, states = replay(trace, 100), replay(trace, 100, divided=divided)
    assert (pages.hits, states.hits) == (3 + 2 + 2 + 4, 3 + 0 + 2 + 4)


def test_the_command_says_what_more_memory_is_worth_and_draws_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "150")
    trace = tmp_path / "mine.jsonl"
    trace.write_text("\n".join(json.dumps({"hash_ids": blocks}) for blocks in sessions(200)))
    line = ["plan", "--model", str(CONFIGS / "llama-3-70b"), "--memory", "1GiB", "--prefill-speed", "1000"]
    line += ["--trace", str(trace), "--json", str(tmp_path / "plan.json"), "--plot", str(tmp_path / "plan.png")]
    assert main(line) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "plan.json").read_text())["trace"]
    twice = next(point for point in found["others"] if point["memory"] == 2 * GIB)
    assert f"9 GB more of devices give {twice['points']:.2f} points and save {twice['saved_s']:,.0f} prefill" in printed
    assert len(re.findall("GB more of", printed)) == 6
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert main([*line[:5], "--plot", str(tmp_path / "plan.png")]) == 2
    assert "--plot needs --trace" in capsys.readouterr().err
