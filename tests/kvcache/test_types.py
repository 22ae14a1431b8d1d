"""`KVCacheMetrics`: counts begin at 0. They can be added up over several managers. The difference of two metrics shows
the events between them.
"""

from __future__ import annotations

import pytest

from kvcache import KVCacheMetrics

FIELDS = KVCacheMetrics.__struct_fields__


def test_every_count_begins_at_zero() -> None:
    assert KVCacheMetrics() == KVCacheMetrics(*[0] * len(FIELDS))


def test_counts_are_added_and_subtracted_one_by_one() -> None:
    one, other = KVCacheMetrics(*range(len(FIELDS))), KVCacheMetrics(*range(100, 100 + len(FIELDS)))
    both = one + other
    assert [getattr(both, name) for name in FIELDS] == [100 + 2 * at for at in range(len(FIELDS))]
    assert (both - one, both - other) == (other, one)


def test_the_hit_rate_is_the_cached_share_of_all_prompt_tokens() -> None:
    found = KVCacheMetrics(input_tokens=24, cache_tokens=16)
    assert (found.prompt_tokens, found.cache_hit_rate) == (40, pytest.approx(0.4))
    assert KVCacheMetrics().cache_hit_rate == 0.0
