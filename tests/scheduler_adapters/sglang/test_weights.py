"""Each order of SGLang's calls identifies the weights. `tests/sglang_engine` makes the calls themselves."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from scheduler_adapters.checkpoints import digest_of_checkpoint
from scheduler_adapters.sglang.weights import UNNAMED, ServedWeights


class Heard:
    """Keeps what it is told."""

    def __init__(self, weights: ServedWeights) -> None:
        self.weights = weights
        self.texts: list[str] = []
        self.changes: list[bool] = []
        weights.tell(self)

    def on_weights(self, before: str, *, changed: bool) -> None:
        assert before == (self.texts[-1] if self.texts else "")
        self.texts.append(self.weights.text)
        self.changes.append(changed)


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Two checkpoints."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    return [str(tmp_path / name) for name in ("one", "two")]


def update(weights: ServedWeights, checkpoint: str = "", name: str | None = None) -> str:
    weights.begin("runner")
    weights.end("runner", checkpoint)
    weights.named(name)
    return weights.text


def test_the_start_is_named_only_by_the_user() -> None:
    assert (ServedWeights(UNNAMED).text, ServedWeights(UNNAMED).files) == ("", None)
    assert ServedWeights("v1").text == "version 'v1'"


def test_a_server_that_starts_with_a_name_has_the_weights_of_one_that_is_updated_to_it() -> None:
    assert update(ServedWeights(UNNAMED), name="v2") == ServedWeights("v2").text


def test_a_checkpoint_is_known_by_its_files(folders: list[str]) -> None:
    weights = ServedWeights(UNNAMED)
    first, second, again = (update(weights, folders[at]) for at in (0, 1, 0))
    assert first == again == f"checkpoint {digest_of_checkpoint(folders[0])}"
    assert first != second
    assert weights.files == digest_of_checkpoint(folders[0])
    assert update(weights, folders[0], "v1") == "version 'v1'"
    assert weights.files == digest_of_checkpoint(folders[0])


def test_updates_without_a_name_are_counted(folders: list[str]) -> None:
    weights = ServedWeights(UNNAMED)
    texts = [update(weights), update(weights), update(weights, "org/model"), update(weights, folders[0])]
    texts += [update(weights), update(weights, name="v1"), update(weights)]
    assert texts[0] == "as at the start, then update 1"
    assert texts[2] == "as at the start, then update 3", "a model that is no folder has no digest"
    assert texts[4] == f"{texts[3]}, then update 5"
    assert texts[6] == "version 'v1', then update 7"
    assert weights.files == ""
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("start", [UNNAMED, "v1"])
def test_the_name_that_was_current_before_does_not_name_other_weights(start: str, folders: list[str]) -> None:
    weights = ServedWeights(start)
    texts = [update(weights, name=start), update(weights, name=start), update(weights, folders[0], start)]
    assert len({*texts, f"version {start!r}", ""}) == 5
    assert update(weights, name="v2") == "version 'v2'"
    assert update(weights, name=start) == f"version {start!r}"


def test_no_two_moments_of_an_update_are_alike(folders: list[str]) -> None:
    weights = ServedWeights(UNNAMED)
    heard = Heard(weights)
    weights.begin("target")
    weights.begin("draft")
    weights.touch()
    weights.begin("call")
    weights.named("v1")
    weights.end("call", folders[0])
    weights.end("draft")
    assert all(text.startswith("being changed") for text in heard.texts)
    assert len(set(heard.texts)) == len(heard.texts) == 6
    assert weights.files == ""
    weights.end("target")
    assert heard.texts[6:] == ["as at the start, then update 1", "version 'v1'"]
    assert heard.changes == [True] * 7 + [False]


def test_an_update_that_begins_again_ends_once() -> None:
    weights = ServedWeights(UNNAMED)
    weights.begin("runner")  # SGLang's call fails, and is repeated
    weights.begin("runner")
    weights.end("runner")
    assert weights.text == "as at the start, then update 1"


def test_a_name_is_no_change_of_the_weights(folders: list[str]) -> None:
    weights = ServedWeights(UNNAMED)
    update(weights, folders[0])
    heard = Heard(weights)
    heard.texts = [weights.text]
    weights.named(None)
    assert heard.changes == []
    weights.named("v1")
    assert heard.changes == [False]
    assert weights.files == digest_of_checkpoint(folders[0])


def test_two_servers_with_the_same_calls_agree(folders: list[str]) -> None:
    calls = list(itertools.product(("", *folders), (None, "a", "b")))
    ours, theirs = ServedWeights("v1"), ServedWeights("v1")
    for checkpoint, name in calls:
        assert update(ours, checkpoint, name) == update(theirs, checkpoint, name)


def test_weights_without_a_name_are_those_of_no_earlier_moment(folders: list[str]) -> None:
    """After the same checkpoint or name, another update may follow. Pages of the first one must not be found then."""
    weights, calls = ServedWeights(UNNAMED), itertools.product(("", *folders), (None, "a", "b"), ("", *folders))
    texts: list[str] = []
    for checkpoint, name, last in calls:
        update(weights, checkpoint, name)
        texts += [text for text in (update(weights, last), update(weights)) if ", then " in text]
    assert len(set(texts)) == len(texts) > 27
