"""Deaths of SGLang's prefill or decode server in each phase of a request, with the substitutes of `test_transfer`.

The surviving process is not restarted. It reports an error, holds nothing afterwards, and serves the next request
correctly.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sglang_engine.pd_pair import NEW, Pair, check_works, reason
from tests.sglang_engine.test_engine import PROMPTS

pytestmark = pytest.mark.timeout(300)
LEASE_S = 3
ENVIRONMENT = {
    "PAGEWIRE_LEASE_S": str(LEASE_S),
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "4",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "60",
}


@pytest.fixture(scope="module")
def pair(model_dir: Path, page_size: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(model_dir, tmp_path_factory.mktemp("deaths"), (page_size, page_size), environment=ENVIRONMENT)
    yield pair
    pair.close()


def test_prefill_dies_while_decode_waits_and_while_it_reads(pair: Pair, expected: Any) -> None:
    waits = pair.send("waits", PROMPTS[0], NEW, to="decode")
    pair.decode.wait_phase(waits, "WaitingForInput")
    pair.send_held("reads", PROMPTS[1])
    pair.prefill.kill()
    assert "is gone" in reason(pair.decode.answer("waits"))
    pair.decode.hold(on=False)
    assert reason(pair.decode.answer("reads"))
    pair.decode.wait_usage()
    pair.prefill = pair.start("prefill").wait_ready()
    check_works(pair, expected)


def test_decode_dies_before_it_asks_while_prefill_computes_and_while_it_reads(pair: Pair, expected: Any) -> None:
    never = pair.send("never", PROMPTS[1], NEW, to="prefill")
    pair.prefill.wait_phase(never, "Bootstrapping")
    pair.send_held("reads", PROMPTS[0])
    pair.decode.kill()
    assert "not read: " in reason(pair.prefill.answer("reads"))
    assert "timed out" in reason(pair.prefill.answer("never"))
    pair.prefill.wait_usage()
    pair.decode = pair.start("decode").wait_ready()
    check_works(pair, expected)
