"""`kv_connector_extra_config`: all faults in it are reported together when the server starts, before weights are
loaded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import CompilationConfig, DeviceConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import current_platform

from scheduler_adapters.vllm.config import read_options, worker_config
from scheduler_adapters.vllm.options import Options, check_options, options_of
from scheduler_adapters.vllm.versions import OURS as VERSION
from scheduler_adapters.vllm.versions import VLLM
from tests.vllm_engine.engine import OURS, Engine, Shape, add_layers, make_cache_config, make_config, model_dir
from transfer.connector.config import check_config
from transfer.errors import InvalidEngineError
from transfer.wire.keys import make_keyrings, save_keyring

BASE = {"host": "127.0.0.1", "port": 0}
PHRASE = "of this fleet alone, and of nobody else"

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"kv_lease_duration": "soon"}, "is 'soon': a number of seconds above 0, at most 86400 is expected"),
    ({"kv_lease_duration": 0}, "kv_lease_duration is 0: a number of seconds above 0"),
    ({"kv_lease_duration": 1e9}, "kv_lease_duration is 1000000000.0: a number of seconds above 0, at most 86400"),
    ({"kv_lease_duration": float("nan")}, "kv_lease_duration is nan: a number"),
    ({"load_timeout": float("inf")}, "load_timeout is inf: a number of seconds above 0 is expected"),
    ({"load_timeout": None}, "load_timeout is None: a number"),
    ({"port": "x"}, "port is 'x': a whole number from 0 to 65535 is expected"),
    ({"port": -1}, "port is -1: a whole number"),
    ({"port": 65536}, "port is 65536: a whole number"),
    ({"host": 7}, "host is 7: a host name or an IP address is expected"),
    ({"host": "a b"}, "host is 'a b': a host name or an IP address is expected"),
    ({"host": "::1]"}, "host is '::1]': a host name or an IP address is expected"),
    *(
        ({"host": host}, f"host is {host!r}: readers connect to it, so it must be an address of this one host")
        for host in ("", "0.0.0.0", "::", "[::]", "0:0:0:0:0:0:0:0", "*")  # noqa: S104  (nothing binds there)
    ),
    ({"keyring": 5}, "keyring is 5: the path of a file is expected"),
    ({"secret": PHRASE}, "secret: the secret itself was given, and vLLM writes its arguments to its log. Make a "),
    ({"secret": 12345678901234567890}, "secret: file:PATH or env:NAME is expected"),
    ({"secret": [PHRASE]}, "secret: file:PATH or env:NAME is expected"),
    ({"allowed_peers": ["10.0.0.0/99"]}, "allowed_peers is ['10.0.0.0/99']: '10.0.0.0/99' is not a host name"),
    ({"allowed_peers": "a b,10.0.0.1,c d"}, "'a b' is not a host name, an address or a network, 'c d' is not"),
    ({"allowed_peers": ["10.0.0.1", 5]}, "allowed_peers is ['10.0.0.1', 5]: a list of addresses, networks"),
    ({"allowed_peers": None}, "allowed_peers is None: a list of addresses"),
    ({"lend": 1.5}, "lend is 1.5: a number from 0 to 1 is expected"),
    ({"ask_timeout": "soon"}, "ask_timeout is 'soon': a number of seconds from 0 to 60 is expected"),
    ({"model_id": 3}, "model_id is 3: a text is expected"),
    ({"kv_lease": 3}, "there is no option 'kv_lease'; the options are host, port, keyring, secret, allowed_peers"),
    *(
        ({name: value}, f"{name} is {value!r}: this option of vLLM's NIXL connector has no effect here: {instead}")
        for name, value, instead in (
            ("num_threads", 4, "each agent of NIXL"),
            ("backends", ["GDS"], "NIXL reads"),
            ("engine_ttl", 3600.0, "an engine is forgotten"),
            ("enforce_handshake_compat", False, "both sides are always compared"),
            ("bidirectional_kv_xfer", True, "kv_sources of a request says"),
            ("decoder_kv_blocks_ttl", 480, "kv_sources of a request says"),
            ("kv_recompute_threshold", 64, "kv_sources of a request says"),
            ("push_registration_timeout", 5, "decode always reads"),
        )
    ),
]  # fmt: skip
HERE: list[tuple[dict[str, Any], str]] = [
    ({"secret": "file:/nowhere/at/all"}, "shared secret: [Errno 2] No such file or directory: '/nowhere/at/all'"),
    ({"secret": "env:PAGEWIRE_NO_SUCH_VARIABLE"}, "the environment variable 'PAGEWIRE_NO_SUCH_VARIABLE' is not set"),
    ({"secret": "env:PAGEWIRE_SHORT"}, "the shared secret has 5 bytes; at least 16 are needed"),
    ({"keyring": "/nowhere/at/all"}, "keyring /nowhere/at/all: [Errno 2]"),
]
"""Faults that show only on the machine itself."""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_SHORT", "short")
    monkeypatch.setenv("PAGEWIRE_LONG", PHRASE)


def configs(folder: Path, extra: dict[str, Any], role: str = "kv_producer") -> tuple[Any, Any]:
    shape = Shape(extra=extra)
    return make_config(model_dir(folder, shape.heads), role, "engine", shape, 0), make_cache_config(shape)


@pytest.mark.parametrize(("extra", "message"), [*WRONG, *HERE], ids=str)
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_wrong_option_ends_the_start_and_is_quoted_as_written(
    tmp_path: Path, role: KVConnectorRole, extra: dict[str, Any], message: str
) -> None:
    config, caches = configs(tmp_path, BASE | extra)
    with pytest.raises(InvalidEngineError) as error:
        KVConnectorFactory.create_connector(add_layers(config, caches), role, caches)
    text = str(error.value)
    assert text.startswith("kv_connector_extra_config: ")
    assert message in text
    assert "\n" not in text
    for hidden in (PHRASE, "12345678901234567890", "msgspec", "$."):
        assert hidden not in text


def test_all_wrong_options_are_named_together() -> None:
    extra = {name: value for wrong, _ in WRONG[::-1] for name, value in wrong.items()}
    assert {*extra} > {*Options.__struct_fields__, "kv_lease", "num_threads"}
    with pytest.raises(InvalidEngineError) as error:
        check_options(extra | {"later": 1})
    for name in {*extra} - {"kv_lease"}:
        assert f" {name}" in str(error.value)
    assert "there is no option 'kv_lease', 'later'; " in str(error.value)


def test_everything_that_the_machine_lacks_is_named_together() -> None:
    with pytest.raises(InvalidEngineError) as error:
        options_of(
            {"host": "no.such.host.invalid", "port": 65535, "secret": "env:NONE", "keyring": "/nowhere"},
            index=3, serves=True, resolves=True,
        )  # fmt: skip
    for part in (
        "port is 65535: data-parallel engine 3 would listen at 65538",
        "host is 'no.such.host.invalid': it has no address here",
        "keyring and secret are both given: one is needed",
        "secret: the environment variable 'NONE' is not set",
        "keyring /nowhere: ",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("host", ["::1", "[::1]", "0:0:0:0:0:0:0:1"])
def test_an_ipv6_address_is_a_host_with_and_without_brackets(host: str) -> None:
    assert options_of({"host": host, "port": 0}, serves=True, resolves=True).host == host


@pytest.mark.parametrize("host", ["0", "0x0", "0.0", "00.0.0.0"])
def test_a_host_that_means_every_address_in_another_spelling_is_refused(host: str) -> None:
    with pytest.raises(InvalidEngineError, match=r"it stands for every address of a host|is expected"):
        options_of({"host": host, "port": 0}, serves=True, resolves=True)


@pytest.mark.parametrize("role", ["kv_producer", "kv_both", "kv_consumer"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("HOST", "0.0.0.0", "VLLM_NIXL_SIDE_CHANNEL_HOST is '0.0.0.0': readers connect to it"),  # noqa: S104
        ("PORT", "many", "VLLM_NIXL_SIDE_CHANNEL_PORT is 'many': a whole number from 0 to 65535 is expected"),
    ],
)
def test_vllms_settings_are_checked_only_in_the_role_that_uses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, name: str, value: str, message: str
) -> None:
    config, _ = configs(tmp_path, {}, role)
    monkeypatch.setenv(f"VLLM_NIXL_SIDE_CHANNEL_{name}", value)
    if name == "HOST" and role == "kv_consumer":
        assert read_options(config).host == value, "the host is not told to readers"
        return
    with pytest.raises(InvalidEngineError, match=re.escape(message)):
        read_options(config)
    given = {"HOST": {"host": "127.0.0.1"}, "PORT": {"port": 5600}}[name]
    config.kv_transfer_config.kv_connector_extra_config = given
    assert getattr(read_options(config), name.lower()) == next(iter(given.values()))


def start(folder: Path, extra: dict[str, Any]) -> VllmConfig:
    model = model_dir(folder, 4)
    return VllmConfig(
        model_config=ModelConfig(
            model=model, tokenizer=model, skip_tokenizer_init=True, dtype="float16", max_model_len=4096
        ),
        device_config=DeviceConfig("cpu"),
        compilation_config=CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
        kv_transfer_config=KVTransferConfig(
            kv_connector=OURS[0], kv_connector_module_path=OURS[1], kv_role="kv_both", kv_connector_extra_config=extra
        ),
    )


def test_with_full_cuda_graphs_options_are_checked_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full CUDA graphs are vLLM's default on a GPU. For them, vLLM's API server makes this config first."""
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", classmethod(lambda _: True))
    start(tmp_path, BASE)
    with pytest.raises(ValueError, match="kv_connector_extra_config: kv_lease_duration is 'soon'"):
        start(tmp_path, BASE | {"kv_lease_duration": "soon"})


def test_options_are_checked_before_memory_is_measured(tmp_path: Path) -> None:
    """`EngineCore` asks for the layout of the caches before it measures memory, with any executor."""
    config, _ = configs(tmp_path, BASE)
    assert get_kv_connector_cache_layout(config) == "LBHNC"
    config, _ = configs(tmp_path, BASE | {"secret": "env:NONE"})
    with pytest.raises(InvalidEngineError, match="the environment variable 'NONE' is not set"):
        get_kv_connector_cache_layout(config)


def test_options_that_are_not_given_come_from_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "7000")
    config, _ = configs(tmp_path, {})
    config.parallel_config.data_parallel_index = 2
    options = read_options(config)
    assert (options.host, options.port, options.keys, options.kv_lease_duration) == ("10.0.0.1", 7002, None, 30.0)


def test_options_of_vllms_connector_that_say_what_holds_here_are_accepted() -> None:
    same = {"backends": ["UCX"], "bidirectional_kv_xfer": False, "enforce_handshake_compat": True}
    check_options(same)
    assert options_of(BASE | same) == options_of(BASE)


def test_numbers_may_be_given_as_text(tmp_path: Path) -> None:
    config, _ = configs(tmp_path, {"host": "127.0.0.1", "port": "7000", "kv_lease_duration": "7"})
    assert (read_options(config).port, read_options(config).kv_lease_duration) == (7000, 7.0)


def test_a_keyring_is_read(tmp_path: Path) -> None:
    (keyring,) = make_keyrings(1)
    save_keyring(keyring, tmp_path / "keys")
    config, _ = configs(tmp_path, BASE | {"keyring": str(tmp_path / "keys")})
    assert read_options(config).keys == keyring


def test_a_secret_is_named_to_the_workers_and_shown_nowhere(tmp_path: Path) -> None:
    where = "env:PAGEWIRE_LONG"
    config = check_config(worker_config(*configs(tmp_path, BASE | {"secret": where})))
    assert config.secret == where
    assert PHRASE not in repr(config)


@pytest.mark.parametrize(
    ("role", "extra", "keys"),
    [
        ("kv_producer", {}, "none"),
        ("kv_both", {"secret": "env:PAGEWIRE_LONG"}, "of a secret"),
        ("kv_consumer", {"keyring": "KEYS"}, "of a keyring"),
    ],
)
def test_one_line_at_the_start_says_who_answers_where(
    make: Callable[..., Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture,
    role: str, extra: dict[str, Any], keys: str,
) -> None:  # fmt: skip
    if "keyring" in extra:
        (keyring,) = make_keyrings(1)
        save_keyring(keyring, tmp_path / "keys")
        extra = {"keyring": str(tmp_path / "keys")}
    with caplog.at_level(logging.INFO, "pagewire.vllm"):
        engine = make(role, Shape(extra=BASE | {"kv_lease_duration": 7} | extra))
    (line,) = [text for text in map(logging.LogRecord.getMessage, caplog.records) if text.startswith("pagewire")]
    name = engine.connector._scheduling._connector.config.engine_id
    does = (
        "reads only"
        if role == "kv_consumer"
        else f"answers readers at {engine.connector._scheduling._connector.address}"
    )
    assert line == f"pagewire {VERSION} under vLLM {VLLM}: engine {name!r} {does}; leases of 7 s, keys: {keys}"
    assert PHRASE not in caplog.text
