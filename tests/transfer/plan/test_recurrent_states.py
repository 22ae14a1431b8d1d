"""The plan of a transfer of recurrent states between two managers, each with any number of shards."""

import ctypes

import pytest
import torch

from kvcache.params import CONV_KINDS, SSM_KIND, StateShape
from tests.kvcache.build import states_of
from transfer.plan.boxes import ShardLayout, check
from transfer.plan.plan import plan
from transfer.plan.shapes import dense, with_states

SHAPE = StateShape(layers=3, heads=8, head_dim=5, groups=2, d_state=6, kernel=4, conv_dtype=torch.float32)


@pytest.mark.parametrize(("there", "here"), [(1, 1), (1, 2), (2, 1), (4, 2), (2, 8)])
def test_a_transfer_plans_over_the_pages_between_any_numbers_of_shards(there: int, here: int) -> None:
    """Carrying out the plan's copies with torch gives the expected state on the reading shards."""
    source, target = (states_of(SHAPE, 3, ["cpu"] * shards) for shards in (there, here))
    states = [(torch.randn(1, 64, 3), torch.randn(1, 8, 5, 6)) for _ in range(3)]
    for layer, (conv, ssm) in enumerate(states):
        source.write(layer, torch.tensor([2]), CONV_KINDS, conv)
        source.write(layer, torch.tensor([2]), (SSM_KIND,), ssm)
    alone = ShardLayout((), ())
    for to, to_tensors in enumerate(target.tensors):
        for of, of_tensors in enumerate(source.tensors):
            sides = [
                check(with_states(alone, pages.kinds(shard), pages.num_pages + 1))
                for pages, shard in ((target, to), (source, of))
            ]
            assert [side.region_bytes for side in sides] == [
                tuple(tensor.nbytes for tensor in tensors) for tensors in (to_tensors, of_tensors)
            ]
            bases = [[tensor.data_ptr() for tensor in tensors] for tensors in (to_tensors, of_tensors)]
            runs = plan(*sides, bases).runs(0, [1], [2], (0, 1))
            assert len(runs.length) <= 4, "a kind of state takes more than one run"
            for local, remote, length in zip(runs.local, runs.remote, runs.length, strict=True):
                ctypes.memmove(int(local), int(remote), int(length))
    for layer, (conv, ssm) in enumerate(states):
        assert torch.equal(target.read(layer, torch.tensor([1]), CONV_KINDS), conv)
        assert torch.equal(target.read(layer, torch.tensor([1]), (SSM_KIND,)), ssm)


def test_states_have_regions_of_their_own_or_lie_in_that_of_the_pages() -> None:
    (kind, *_) = states_of(SHAPE, 3).kinds(0)
    of_tokens = dense(kind.layout, 7)
    own = with_states(of_tokens, [kind, kind._replace(kind="more", region=1)], 4)
    assert own.region_bytes == (7 * kind.stride, 4 * kind.stride, 4 * kind.stride)
    assert [box.region for box in own.groups[1].boxes] == [1, 2]
    shared = with_states(of_tokens, [kind._replace(region=None, offset=16, stride=2 * kind.stride)], 3)
    assert shared.region_bytes == of_tokens.region_bytes
    (box,) = shared.groups[1].boxes
    assert (box.kind, box.region, box.offset, box.page_stride) == (kind.kind, 0, 16, 2 * kind.stride)
    assert shared.groups[1].state
