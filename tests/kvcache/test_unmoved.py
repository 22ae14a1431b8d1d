"""Memory whose address somebody knows stays where it is, whatever torch is asked to do with its tensors."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.multiprocessing

from kvcache import KVCacheQuantizationConfig, MovedMemoryError, PagedKVCacheManager, StateShape, TextContext
from kvcache.unmoved import Unmoved
from tests.kvcache.build import manager_of


def send(tensor: torch.Tensor) -> None:
    """Sends a tensor as to another process. The receiving end of the pipe is in this process."""
    ours, theirs = torch.multiprocessing.Pipe()
    with ours, theirs:
        ours.send(tensor)


def send_by_name(tensor: torch.Tensor) -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        send(tensor)
    finally:
        torch.multiprocessing.set_sharing_strategy("file_descriptor")


MOVES: dict[str, Callable[[torch.Tensor], object]] = {
    "send": send,
    "send one page": lambda tensor: send(tensor[:1]),
    "send by name": send_by_name,
    "send a module": lambda tensor: send(torch.nn.Parameter(tensor, requires_grad=False)),
    "send the storage": lambda tensor: send(cast("Any", tensor.untyped_storage())),
    "share_memory_": lambda tensor: tensor.share_memory_(),
    "share_memory_ of a module": lambda tensor: torch.nn.ParameterList([tensor.float()]).share_memory(),
    "share_memory_ of the storage": lambda tensor: tensor.untyped_storage().share_memory_(),
    "resize_ of the storage": lambda tensor: tensor.untyped_storage().resize_(2 * tensor.untyped_storage().nbytes()),
    "free the storage": lambda tensor: tensor.untyped_storage().resize_(0),
}

STATE = StateShape(layers=1, heads=2, head_dim=2, d_state=2, groups=1, kernel=2, conv_dtype=torch.float32)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two shards": {"tp": 2},
    "host tier": {"host_slots": 8},
    "states in slabs": {"params": {"states": STATE}},
    "states apart": {"params": {"states": STATE, "share_state_memory": False}},
    "scales": {
        "dtype": torch.float8_e4m3fn,
        "params": {"kvcache_quant_config": KVCacheQuantizationConfig(torch.float32, 2)},
    },
}


def running(manager: PagedKVCacheManager, name: str = "r") -> TextContext:
    context = TextContext(range(9), 64, name)
    manager.external_claim(name)
    assert manager.maybe_reserve(context)
    return context


def kept(manager: PagedKVCacheManager) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each tensor whose address somebody knows: those that the manager hands out, and its own."""
    for shards in manager.device_tensors:
        for shard, blocks in enumerate(shards):
            yield f"blocks of shard {shard}", blocks
    for states in manager.states:
        for at, tensor in enumerate(tensor for shard in states.blocks for tensor in shard):
            yield f"states {at}", tensor
    for replica in manager._replicas.each:
        yield "block tables", replica.rows.tensor
    if manager._replicas.tiers:
        for memory in manager._replicas.tiers.host.memory:
            yield "host pages", memory


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("move", MOVES)
def test_torch_cannot_move_memory_whose_address_is_known(kind: str, move: str) -> None:
    manager = manager_of(64, **KINDS[kind])
    context = running(manager)
    inputs = manager.fetch([context])
    tensors = [*kept(manager), *((f"fetched blocks of {at}", one.blocks) for at, one in enumerate(inputs))]
    if inputs[0].kv_scales is not None:
        tensors.append(("fetched scales", inputs[0].kv_scales))
    if not manager.states:
        step = manager.fetch_ahead([context])
        tensors += [("table of a step", step.inputs[0].lookup_table), ("lengths", step.inputs[0].cache_lengths)]
    before = [tensor.data_ptr() for _, tensor in tensors]
    for name, tensor in tensors:
        if move == "share_memory_ of a module" and tensor.dtype != torch.float32:
            continue  # a module's parameters have gradients, so they are floating-point numbers
        with pytest.raises(MovedMemoryError, match=r"torch cannot move this memory: .* send a copy"):
            pytest.fail(f"{name} was moved: {MOVES[move](tensor)}")
    assert [tensor.data_ptr() for _, tensor in tensors] == before
    manager.check()


def test_a_lookup_table_of_fetch_and_copies_of_pages_may_be_sent_and_saved() -> None:
    manager = manager_of(16)
    context = running(manager)
    (inputs,) = manager.fetch([context])
    inputs.blocks[1] = 3.0
    for tensor in (inputs.lookup_table, inputs.cache_lengths, inputs.max_lengths, inputs.blocks[1].clone()):
        send(tensor)
    saved = io.BytesIO()
    torch.save(inputs.blocks[1], saved)
    saved.seek(0)
    assert (torch.load(saved) == 3.0).all()
    context.update(1)
    assert manager.maybe_reserve(context)
    manager.step([context])
    pages = manager.get_req_blocks("r")
    assert manager.fetch([context])[0].lookup_table.tolist() == [pages]
    manager.check()


NOTICED: dict[str, Callable[[torch.Tensor], object]] = {
    "set_": lambda tensor: tensor.set_(torch.zeros_like(tensor)),
    "data": lambda tensor: setattr(tensor, "data", torch.zeros_like(tensor)),
    "past our refusal": lambda tensor: torch.UntypedStorage._share_fd_cpu_(tensor.untyped_storage()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("move", NOTICED)
def test_check_names_the_tensor_that_has_moved_nevertheless(kind: str, move: str) -> None:
    for at in range(20):
        manager = manager_of(64, checks=False, **KINDS[kind])
        running(manager)
        named = [*kept(manager)]
        if at == len(named):
            break
        manager.check()
        NOTICED[move](named[at][1])
        with pytest.raises(MovedMemoryError, match=r"was moved from 0x[0-9a-f]+ to 0x[0-9a-f]+ by torch"):
            manager.check()
    assert at


def test_tensors_are_free_when_all_who_know_their_addresses_are_gone() -> None:
    tensor = torch.zeros(1 << 10)
    first, second = Unmoved({"first": tensor[:4]}), Unmoved({"second": tensor[4:]})
    del first
    gc.collect()
    with pytest.raises(MovedMemoryError, match="second: torch cannot"):
        tensor.share_memory_()
    del second
    gc.collect()
    before = tensor.data_ptr()
    tensor.share_memory_()
    assert tensor.data_ptr() != before
    assert tensor.is_shared()
    pool = manager_of(16).device_tensors[0][0]
    gc.collect()
    pool.share_memory_()
    assert pool.is_shared()


def test_a_tensor_that_was_shared_before_may_be_sent_and_stays() -> None:
    tensor = torch.zeros(1 << 10).share_memory_()
    unmoved = Unmoved({"pages": tensor})
    send(tensor[:4])
    unmoved.check()
    tensor.set_(torch.zeros(4))
    with pytest.raises(MovedMemoryError, match="pages: this memory was moved from"):
        unmoved.check()
