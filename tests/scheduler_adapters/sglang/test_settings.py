"""Our settings in SGLang's processes, which are environment variables."""

import pytest

from scheduler_adapters.sglang.settings import Settings, read_settings
from transfer.errors import InvalidEngineError


def test_nothing_is_exchanged_unless_an_address_is_given() -> None:
    assert read_settings({}).exchange == ""
    given = {"PAGEWIRE_EXCHANGE": "tcp://host:5", "PAGEWIRE_LEND": "0", "PAGEWIRE_ASK_S": "1.5", "OTHER": "x"}
    assert read_settings(given) == Settings(exchange="tcp://host:5", lend=0.0, ask_s=1.5)


@pytest.mark.parametrize(
    ("name", "value"), [("LEND", "1.5"), ("LEND", "-1"), ("ASK_S", "0"), ("ASK_S", "61"), ("LEND", "x")]
)
def test_a_value_out_of_range_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidEngineError, match=name.lower()):
        read_settings({f"PAGEWIRE_{name}": value})
