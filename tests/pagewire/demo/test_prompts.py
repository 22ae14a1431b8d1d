from pathlib import Path

import pytest

from pagewire.demo.prompts import default_prompts, read_prompts, take
from scheduler_adapters.errors import PromptsError


def test_default_prompts_differ_and_share_long_heads() -> None:
    prompts = default_prompts(40)
    assert len(set(prompts)) == 40
    for number in range(4):
        head = prompts[number].split("\n\n")[0]
        assert len(head) > 600
        assert all(prompt.startswith(head) for prompt in prompts[number::4])


def test_a_text_file_has_a_prompt_to_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("one\n\n  two {x}\n[3]\n")
    assert read_prompts(path) == ["one", "  two {x}", "[3]"]


def test_json_lines_are_told_by_their_first_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text('{"prompt": "a\\nb", "other": 1}\n{"prompt": "c"}\n')
    assert read_prompts(path) == ["a\nb", "c"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "no prompt"),
        (b" \n\n", "no prompt"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"prompt": "a"}\nplain', "line 2"),
        (b'{"prompt": "a"}\n\n{"text": "b"}', "line 3"),
        (b'{"prompt": 3}', "line 1"),
        (b'{"prompt": ""}', "empty"),
    ],
)
def test_a_bad_file_is_one_error_that_names_the_line(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(PromptsError, match=named) as caught:
        read_prompts(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match="No such file"):
        read_prompts(tmp_path / "none")
    with pytest.raises(PromptsError, match="directory"):
        read_prompts(tmp_path)


def test_prompts_are_repeated_if_more_are_requested() -> None:
    assert take(["a", "b"], None) == ["a", "b"]
    assert take(["a", "b"], 1) == ["a"]
    assert take(["a", "b"], 5) == ["a", "b", "a", "b", "a"]
