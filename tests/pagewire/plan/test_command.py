"""`pagewire plan` from its command line: tables, JSON, and errors in one line."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from pagewire.cli import main
from pagewire.plan.layers import read_model
from pagewire.plan.options import PlanOptions
from pagewire.plan.plan import KindOfLayer, plan_memory
from pagewire.plan.tables import _heads, longest

CONFIGS = Path(__file__).parent / "configs"


def test_tables_and_json_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    line = ["plan", "--model", str(CONFIGS / "gemma-3-27b"), "--memory", "40GiB", "--json", str(tmp_path / "plan.json")]
    assert main(line) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["chosen"] == found["choices"][0]
    assert found["chosen"]["rooms"][0]["pages"] == 42_281
    assert "42,281" in printed
    assert [kind["token_bytes"] for kind in found["kinds"]] == [425_984, 81_920]
    assert "416 KiB" in printed
    assert printed.count(" 16 x 128 ") == 2, "the table must show the number of heads and the dimension of a head"
    assert found["made_gbps"] == pytest.approx(5.07904)
    assert "5.08 GB/s" in printed
    assert "too late" in printed
    (groups,) = [one for one in found["chosen"]["rooms"] if one["way"] == "groups"]
    assert [part["tables"] for part in groups["parts"]] == [11, 2]
    rows = printed[printed.index("What a request takes") :].splitlines()
    assert [row.split() for row in rows if row.split()[:1] in (["groups"], ["full"])][:2] == [
        ["groups", "window", "1,024", "52", "11", *["55.9", "MiB"] * 2],
        ["full", "10", "2", "80", "MiB", "640", "MiB"],
    ]
    (lost,) = [row for row in rows if "3.05" in row]
    assert lost.split() == ["lost", "3.05", "MiB,", "2.2", "%", "3.05", "MiB,", "0.4", "%"]


def test_the_first_lines_give_the_number_and_length_of_requests_and_the_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--model", str(CONFIGS / "gemma-3-27b"), "--memory", "40GiB"]) == 0
    first = capsys.readouterr().out.partition("Details")[0]
    assert first.startswith("gemma-3-27b on 8 devices with 40 GiB each for pages, TP 8 x DP 1\n")
    rows = [re.split(r"  +", line.strip()) for line in first.splitlines()]
    assert ["requests of", "8,192 tokens", "65,536 tokens"] in rows
    assert ["requests at a time", "82", "10"] in rows
    assert ["requests at a time with `params.groups`", "298", "58"] in rows
    assert ["memory of one, of each of its 8 devices", "496 MiB", "3.88 GiB"] in rows
    assert "The longest request: 131,072 tokens, the model's limit; the memory holds 676,496." in first


@pytest.mark.parametrize(
    ("max_len", "held", "told"),
    [
        (None, None, "no limit; the memory holds any."),
        (100, None, "100 tokens, the model's limit; the memory holds any."),
        (100, 99, "99 tokens, which fill the memory; the model was made for 100."),
        (None, 99, "99 tokens, which fill the memory."),
    ],
)
def test_the_longest_request_is_limited_by_the_model_or_by_the_memory(
    max_len: int | None, held: int | None, told: str
) -> None:
    options = PlanOptions(model=CONFIGS / "gemma-3-27b", memory=40 << 30)
    found = plan_memory(options, read_model(options.model))
    rooms = (msgspec.structs.replace(found.chosen.rooms[0], longest=held), *found.chosen.rooms[1:])
    chosen = msgspec.structs.replace(found.chosen, rooms=rooms)
    assert longest(msgspec.structs.replace(found, max_len=max_len, chosen=chosen)).endswith(f"request: {told}")


@pytest.mark.parametrize(
    ("keys", "values", "told"), [(128, 128, "8 x 128"), (192, 128, "8 x (192 + 128)"), (576, 0, "8 x 576")]
)
def test_heads_are_shown_with_the_dimension_of_a_key(keys: int, values: int, told: str) -> None:
    assert _heads(KindOfLayer("full", 1, 8, keys, values, 0, 0, 0)) == told


def printed_of(capsys: pytest.CaptureFixture[str], model: str, *more: str) -> str:
    assert main(["plan", "--model", str(CONFIGS / model), "--memory", "40GiB", *more]) == 0
    return capsys.readouterr().out


def test_no_length_beyond_the_models_limit_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    model, limit = read_model(CONFIGS / "llama-3-70b"), 8192
    assert model.max_len == limit
    for lengths in ((limit, 8 * limit), (100, 2 * limit, 3 * limit)):
        found = plan_memory(PlanOptions(model=CONFIGS / "llama-3-70b", memory=40 << 30, lengths=lengths), model)
        assert {*found.chosen.rooms[0].requests} == {length for length in (100, limit) if length >= min(lengths)}
        assert [pull.length for pull in found.pulls] == [*found.chosen.rooms[0].requests]
    assert "65,536 tokens" not in printed_of(capsys, "llama-3-70b")
    assert "65,536 tokens" in printed_of(capsys, "gemma-3-27b")


def test_the_speed_of_prefill_that_the_figures_assume_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed_of(capsys, "llama-3-70b").count("10,000 tokens") == 2
    assert printed_of(capsys, "llama-3-70b", "--prefill-speed", "123456").count("123,456 tokens") == 2


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("gemma-3-27b", ""),
        ("qwen3-next-80b", "There is no row for vllm, because its blocks for recurrent states"),
        ("kimi-linear-48b-a3b", "There is no row for vllm, because its blocks for recurrent states"),
    ],
)
def test_a_layout_that_is_not_shown_has_its_reason(model: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_of(capsys, model)
    assert ("There is no row for vllm" in printed) == bool(told) == ("\n vllm " not in printed)
    assert told in printed


def test_what_a_running_chunk_takes_is_shown_for_windows_alone(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_of(capsys, "gemma-3-27b", "--devices", "1", "--step-tokens", "4096")
    assert "a chunk of up to 4,096 tokens of a prompt" in printed
    assert "1.06 GiB + 1.72 GiB, 36" in printed
    assert "a chunk of up to" not in printed_of(capsys, "llama-3-70b")


def test_options_that_contradict_each_other_are_refused_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, told in ((["--tp", "3"], "--tp is 3: a divisor of"), (["--plot", "a.png"], "--plot needs --trace")):
        assert main(["plan", "--model", str(tmp_path), "--memory", "40GiB", *more]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("model", ["llama-3-70b", "gemma-3-27b", "kimi-linear-48b-a3b"])
def test_a_pipe_gets_every_figure(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["plan", "--model", str(CONFIGS / model), "--memory", "400TB", "--lengths", "1,1000000"]) == 0
    narrow = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["plan", "--model", str(CONFIGS / model), "--memory", "400TB", "--lengths", "1,1000000"]) == 0
    assert narrow == capsys.readouterr().out
    assert "…" not in narrow


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--tp", "3"], "--tp is 3: a divisor of the 8 devices is needed"),
        (["--devices", "6"], ""),
        (["--devices", "6", "--tp", "6"], "tensor parallelism 6: n_kv_heads is 16"),
        (["--prefill-tp", "5"], "tensor parallelism 5: n_kv_heads is 16"),
        (["--memory", "2MB"], ""),
        (["--memory", "1kB"], "is not a number of bytes"),
        (["--memory", "1KB"], "one page of 16 tokens takes 1,015,808 on a rank"),
        (["--lengths", "5,x"], "'x' is not a whole number"),
        (["--lengths", "1,2,3,4,5,6,7,8,9"], "9 lengths: at most 8 are allowed"),
        (["--json", "/"], "is a folder"),
    ],
)
def test_an_impossible_command_is_refused_in_one_line(
    more: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", "--model", str(CONFIGS / "gemma-3-27b"), "--memory", "40GiB", *more]
    try:
        status = main(line)
    except SystemExit as error:
        status = int(str(error.code))
    printed = capsys.readouterr().err
    assert status == (2 if told else 0), printed
    assert told in printed
    assert printed.count("\n") == bool(told)
