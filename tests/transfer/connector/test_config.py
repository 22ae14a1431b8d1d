"""Invalid configs, and the settings that two engines must have in common."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from transfer.connector.config import GroupConfig, StatePart, Timing, WorkerConfig, check_config, share
from transfer.connector.scheduler import NixlConnectorScheduler
from transfer.connector.worker import NixlConnectorWorker
from transfer.errors import InvalidEngineError

GROUP = GroupConfig(layers={"a": 0, "b": 1}, head_dim=8, num_kv_heads=4)
STATE = GroupConfig(layers={"m": 2}, kind="mamba", state=(StatePart(kind="ssm", units=4),))


def config(**changes: Any) -> WorkerConfig:
    return WorkerConfig(**({"engine_id": "e", "incarnation": "i", "groups": (GROUP,), "model": "m"} | changes))


def group(**changes: Any) -> WorkerConfig:
    return config(groups=(msgspec.structs.replace(GROUP, **changes),))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (config(engine_id=""), "an engine id, an incarnation and at least one group are needed"),
        (config(incarnation=""), "an engine id, an incarnation"),
        (config(groups=()), "at least one group"),
        (config(tp_rank=2, tp_size=2), "tp_rank is 2: 0 to 1 is needed, because tp_size is 2"),
        (config(pp_rank=-1), "pp_rank is -1: 0 to 0 is needed"),
        (config(verify=1.5), "verify is 1.5: 0 to 1 is needed"),
        (config(timing=Timing(load=0)), "timing.load is 0 s: a finite time above 0 is needed"),
        (config(timing=Timing(lease=float("nan"))), "timing.lease is nan s: a finite time"),
        (config(groups=(GROUP, GROUP)), "layer 'a' is in two groups"),
        (group(layers={}), "group 0: layers: at least one layer is needed"),
        (group(layers={"a": 1, "b": 1}), "layers: at least one layer is needed"),
        (group(layers={"a": -1}), "layers: at least one layer is needed"),
        (group(block_size=0), "block_size is 0 and kernel_block_size 0"),
        (
            group(block_size=16, kernel_block_size=6),
            "block_size is 16 and kernel_block_size 6: block_size must be positive, and a multiple of",
        ),
        (group(window=8), "window is 8 with kind 'full'"),
        (group(kind="sliding_window"), "window is 0 with kind 'sliding_window'"),
        (group(kind="mla"), "num_kv_heads is 4 with kind 'mla'"),
        (group(num_kv_heads=0), "num_kv_heads is 0"),
        (group(head_dim=0), "head_dim is 0: 1 or more is needed"),
        (group(layout="HDN"), "group 0: layout is 'HDN': one of NHD, HND, blocks-first, "),
        (group(layout="head,token,side,dim"), "or axes such as 'side,page,head,token,dim'"),
        (group(kind="mamba"), "state has 0 parts with kind 'mamba'"),
        (group(state=STATE.state), "state has 1 parts with kind 'full'"),
        (
            config(groups=(msgspec.structs.replace(STATE, state=(StatePart(kind="ssm", units=0),)),)),
            "part 'ssm' has 0 units of 1 channels in tensor 0",
        ),
    ],
)
def test_an_impossible_config_is_refused_with_its_value(bad: WorkerConfig, message: str) -> None:
    with pytest.raises(InvalidEngineError, match="engine '.*' rank -?\\d+: ") as raised:
        check_config(bad)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (None, "config is None: a WorkerConfig is needed"),
        ({"engine_id": "e"}, "config is {'engine_id': 'e'}: a WorkerConfig"),
        (config(engine_id=7), "config.engine_id is 7: Expected `str`, got `int`"),
        (config(tp_rank="0"), "config.tp_rank is '0': Expected `int`, got `str`"),
        (config(tp_size=True), "config.tp_size is True: Expected `int`, got `bool`"),
        (config(verify="all"), "config.verify is 'all': Expected `float`, got `str`"),
        (config(page_checks=1), "config.page_checks is 1: Expected `bool`, got `int`"),
        (config(compatibility={"dtype": 8}), "config.compatibility is {'dtype': 8}: Expected `str`, got `int`"),
        (config(compatibility=None), "config.compatibility is None: Expected `object`, got `null`"),
        (config(allowed_peers="10.0.0.1"), "config.allowed_peers is '10.0.0.1': Expected `array`, got `str`"),
        (config(timing=30.0), "config.timing is 30.0: a Timing is needed"),
        (config(timing=Timing(load="1 min")), "config.timing.load is '1 min': Expected `float`, got `str`"),  # type: ignore[arg-type]
        (config(groups=GROUP), "a tuple of GroupConfig is needed"),
        (config(groups=(GROUP, 7)), "config.groups[1] is 7: a GroupConfig is needed"),
        (group(kind="linear"), "config.groups[0].kind is 'linear': Invalid enum value 'linear'"),
        (group(block_size="16"), "config.groups[0].block_size is '16': Expected `int`, got `str`"),
        (group(layers=["a"]), "config.groups[0].layers is ['a']: Expected `object`, got `array`"),
        (group(state=(7,)), "config.groups[0].state[0] is 7: a StatePart is needed"),
        (group(head_dim=object), "config.groups[0].head_dim is <class 'object'>: value is <class 'object'>"),
        (config(secret=b"a secret of bytes"), "config.secret is a bytes: Expected"),
        (config(key=77001), "config.key is a int: Expected"),
        (config(key="a secret of text"), "config.key is a str: Expected"),
    ],
)
def test_a_config_of_wrong_types_is_refused_with_the_field_and_its_value(bad: Any, said: str) -> None:
    for make in (check_config, NixlConnectorWorker, NixlConnectorScheduler):
        before = threading.active_count()
        with pytest.raises(InvalidEngineError) as raised:
            make(bad)
        assert said in str(raised.value)
        assert "a secret of" not in str(raised.value)
        assert "77001" not in str(raised.value)
        assert threading.active_count() == before


def test_numbers_of_numpy_are_numbers() -> None:
    assert check_config(config(tp_size=np.int64(2), tp_rank=np.int32(1), verify=np.float32(0.5))).rank == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"host": None}, "engine 'e': host is None: a string that is not empty is needed"),
        ({"host": ""}, "host is '': a string"),
        ({"bind": 5555}, "bind is 5555: a string that is not empty is needed"),
        ({"keyring": "file:keys"}, "engine 'e': keyring is a str: a Keyring or None is needed"),
    ],
)
def test_wrong_arguments_beside_the_config_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidEngineError) as raised:
        NixlConnectorScheduler(config(), **wrong)
    assert said in str(raised.value)
    with pytest.raises(InvalidEngineError, match="engine 'e' rank 0: keyring is a int: a Keyring or None is needed"):
        NixlConnectorWorker(config(), 7)  # type: ignore[arg-type]


def test_ranks_are_numbered_stage_by_stage() -> None:
    assert [config(tp_size=2, pp_size=3, tp_rank=t, pp_rank=p).rank for p in range(3) for t in range(2)] == [*range(6)]
    assert config(tp_size=2, pp_size=3).ranks == 6


def test_a_config_can_be_pickled_and_encoded() -> None:
    whole = config(groups=(GROUP, STATE), key=b"k")
    assert pickle.loads(pickle.dumps(whole)) == whole  # noqa: S301 -- our own bytes
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=WorkerConfig) == whole


@pytest.mark.parametrize(
    ("units", "ranks", "held"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (4, 1, [[0, 1, 2, 3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 3, [[0], [0], [0]]),
        (4, 3, [[0], [1], [2, 3]]),
        (2, 3, [[0], [0], [1]]),
    ],
)
def test_every_unit_is_held_by_some_rank(units: int, ranks: int, held: list[list[int]]) -> None:
    assert [list(share(units, ranks, rank)) for rank in range(ranks)] == held


def test_layouts_pages_and_parallelism_need_not_agree_and_the_model_must() -> None:
    base = config().fingerprint()
    assert group(layout="NHD", block_size=64, kernel_block_size=16).fingerprint() == base
    assert config(tp_size=4, tp_rank=3, pp_size=2).fingerprint() == base
    others = [
        config(model="n"),
        config(compatibility={"quantisation": "fp8"}),
        group(head_dim=16),
        group(dtype="float16"),
        group(num_kv_heads=2),
        group(layers={"a": 0}),
        group(layers={"a": 0, "b": 2}),
        group(kind="sliding_window", window=9),
        config(groups=(GROUP, STATE)),
        config(groups=(GROUP, msgspec.structs.replace(STATE, state=(StatePart(kind="ssm", units=2),)))),
    ]
    prints = [tuple(sorted(other.fingerprint().items())) for other in others]
    assert len({*prints, tuple(sorted(base.items()))}) == len(others) + 1


def test_the_pages_of_a_block_and_the_tokens_of_a_window() -> None:
    small = msgspec.structs.replace(GROUP, block_size=64, kernel_block_size=16, kind="sliding_window", window=10)
    assert (small.page_size, small.block_pages) == (16, 4)
    assert (STATE.page_size, STATE.block_pages) == (1, 1)
    assert [small.needed(tokens) for tokens in (0, 9, 10, 100)] == [0, 0, 1, 91]
    assert GROUP.needed(100) == 0
