"""Two prompts have the same digest only if their tokens, salts and keys are equal."""

from __future__ import annotations

import numpy as np
import pytest

from transfer.wire.prompt import Prompt

TOKENS = [5, 0, 2**31 - 1, 7, 7, 7, 1, 2]


def test_the_digest_never_changes() -> None:
    """The digest must stay the same, because the two sides may run on different machines and with different versions of
    all packages.
    """
    assert Prompt(TOKENS, "salt", ((2, b"image"),)).digest(8).hex() == (
        "874c3ad08e654df7a303a28acd279d76667fa1ef5818ab4854814fdf69af1516"
    )


def test_the_type_that_holds_the_tokens_does_not_matter() -> None:
    kept = [TOKENS, tuple(TOKENS), np.array(TOKENS), np.array(TOKENS, np.int32), np.array(TOKENS, ">i4")]
    assert len({Prompt(one).digest(8) for one in kept}) == 1
    assert Prompt(range(9)).digest(9) == Prompt(list(range(9))).digest(9)
    assert Prompt([]).digest(0) == Prompt(np.array([], np.int32)).digest(0)


def test_only_the_first_tokens_and_their_keys_count() -> None:
    whole = Prompt([*TOKENS, 9, 9], "salt", ((8, b"later"), (2, b"image")))
    assert whole.digest(8) == Prompt(TOKENS, "salt", ((2, b"image"),)).digest(8)
    assert whole.digest(8) != whole.digest(9) != whole.digest(10)
    assert Prompt(TOKENS, "", ((7, b"x"),)).digest(7) == Prompt(TOKENS).digest(7)
    assert Prompt(TOKENS, "", ((6, b"x"),)).digest(7) != Prompt(TOKENS).digest(7)


def test_the_order_of_keys_does_not_count() -> None:
    one, other = (2, b"image"), (0, b"adapter")
    assert Prompt(TOKENS, "", (one, other)).digest(8) == Prompt(TOKENS, "", (other, one)).digest(8)


@pytest.mark.parametrize("at", range(8))
def test_one_different_token_changes_the_digest(at: int) -> None:
    changed = [*TOKENS[:at], 3, *TOKENS[at + 1 :]]
    assert Prompt(changed).digest(8) != Prompt(TOKENS).digest(8)


def test_no_two_different_prompts_have_the_same_bytes() -> None:
    """The digest includes the lengths of the parts, so moving a byte from one part to the next changes it."""
    prompts = [
        Prompt([1, 2]),
        Prompt([1, 2, 0]),
        Prompt([0, 1, 2]),
        Prompt([2], "\1\0\0\0"),
        Prompt([], "\1\0\0\0\2\0\0\0"),
        Prompt([1, 2], "a"),
        Prompt([1, 2], "ab"),
        Prompt([1, 2], "a", ((0, b"b"),)),
        Prompt([1, 2], "", ((0, b"ab"),)),
        Prompt([1, 2], "", ((1, b"ab"),)),
        Prompt([1, 2], "", ((0, b"a"), (0, b"b"))),
        Prompt([1, 2], "", ((0, b"a"), (1, b"b"))),
        Prompt([1, 2], "", ((0, b"ab"), (0, b""))),
    ]
    assert len({prompt.digest(len(prompt.token_ids)) for prompt in prompts}) == len(prompts)


def test_a_salt_may_be_any_text_that_json_can_hold() -> None:
    assert Prompt(TOKENS, "\ud800").digest(8) != Prompt(TOKENS, "\ud801").digest(8)


def test_values_that_are_no_tokens_are_refused() -> None:
    with pytest.raises(OverflowError, match="signed integer is greater than maximum"):
        Prompt([1 << 31]).digest(1)
