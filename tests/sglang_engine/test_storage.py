"""SGLang's real host pools over our files, made and called as its cache controller does."""

from __future__ import annotations

import hashlib
import itertools
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sglang_engine.stand_ins import install
from transfer.errors import InvalidEngineError

install()

PAGE = 16
Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins with weights that nobody has changed."""
    from scheduler_adapters.sglang import weights

    monkeypatch.setattr(weights, "_served", [])


class Server:
    """The host pool of one rank, its storage, and the parts of SGLang's controller that move pages between them."""

    def __init__(self, folder: Path, rank: tuple[int, int] = (0, 1), kind: str = "mha", **given: Any) -> None:
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
        from sglang.srt.mem_cache.storage import StorageBackendFactory

        extra = {
            "backend_name": "pagewire", "module_path": "scheduler_adapters.sglang.storage",
            "class_name": "PagewireFiles", "file_tier_dir": str(folder / "kv"), "file_tier_max_gb": 0.01,
            "file_tier_key": "the model",
        } | given.pop("extra", {})  # fmt: skip
        model = given.pop("model", str(folder / "model"))
        self.pool = host_pool(kind, **given)
        config = HiCacheStorageConfig(
            *rank, 0, 1, 0, 1, is_mla_model=kind == "mla", enable_storage_metrics=False, is_page_first_layout=False,
            model_name=model, extra_config=extra,
        )  # fmt: skip
        controller = self.controller = HiCacheController.__new__(HiCacheController)
        controller.mem_pool_host = controller.storage_host_pool = self.pool
        controller.page_size = self.pool.page_size
        controller.storage_backend = self.files = StorageBackendFactory.create_backend("dynamic", config, self.pool)
        self.files.register_mem_pool_host(self.pool)
        self.files.on_host_pools_registered()

    def hashes(self, tokens: list[int], extra_key: str | None = None, salt: str | None = None) -> list[str]:
        """Returns a hash of each page, chained and seeded as by SGLang, whose own function a compiler must build."""
        from sglang.srt.mem_cache.utils import storage_namespace_seed

        size, before = self.pool.page_size, storage_namespace_seed(extra_key, salt) or ""
        found: list[str] = []
        for first in range(0, len(tokens) - size + 1, size):
            before = hashlib.sha256(f"{before} {tokens[first : first + size]}".encode()).hexdigest()
            found.append(before)
        return found

    def fill(self, count: int, seed: int) -> torch.Tensor:
        """Writes random keys and values to the first host pages. Returns the indices of their tokens."""
        self.pool.kv_buffer.view(-1).copy_(torch.randn(self.pool.kv_buffer.numel(), generator=torch.manual_seed(seed)))
        return torch.arange(count * self.pool.page_size)

    def save(self, hashes: list[str], seed: int = 1) -> bool:
        return self.controller._generic_page_set(hashes, self.fill(len(hashes), seed))

    def load(self, hashes: list[str]) -> int:
        """Returns how many pages SGLang takes from the files. Host memory is empty before."""
        from types import SimpleNamespace

        found = self.files.batch_exists(hashes)
        self.pool.kv_buffer.zero_()
        operation: Any = SimpleNamespace(request_id="r", is_terminated=lambda: False)
        return self.controller._generic_page_get(operation, hashes[:found], torch.arange(found * self.pool.page_size))

    def holds(self, count: int, seed: int = 1) -> bool:
        """Whether the first host pages have what `fill` has written."""
        found = [self.pool.get_data_page(page * self.pool.page_size).clone() for page in range(count)]
        self.fill(count, seed)
        wanted = [self.pool.get_data_page(page * self.pool.page_size) for page in range(count)]
        return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def host_pool(kind: str, layout: str = "layer_first", page_size: int = PAGE, heads: int = 2, layers: int = 3) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    common: dict[str, Any] = {"page_size": page_size, "dtype": torch.float32, "device": "cpu", "layer_num": layers}
    common |= {"enable_memory_saver": False}
    if kind == "mla":
        device: Any = MLATokenToKVPool(256, kv_lora_rank=8, qk_rope_head_dim=4, **common)
    else:
        device = MHATokenToKVPool(256, head_num=heads, head_dim=8, **common)
    given: dict[str, Any] = {"host_to_device_ratio": 2.0, "host_size": 0, "page_size": page_size, "layout": layout}
    given |= {"device_capacity_tokens": device.size, "start_layer": device.start_layer, "end_layer": device.end_layer}
    info = device.get_device_pool_infos()[0].buffer_info
    if kind == "mla":
        given |= {"target_layer_num": device.layer_num, "override_kv_cache_dim": device.kv_cache_dim}
        return MLATokenToKVPoolHost(info, pin_memory=False, **given)
    return MHATokenToKVPoolHost(info, pin_memory=False, **given)


@pytest.fixture
def tokens() -> list[int]:
    return list(range(100, 100 + 6 * PAGE))


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_a_restarted_server_finds_its_pages(tmp_path: Path, tokens: list[int], kind: str, layout: str) -> None:
    first = Server(tmp_path, kind=kind, layout=layout)
    hashes = first.hashes(tokens)
    assert len(hashes) == 6
    assert first.load(hashes) == 0
    assert first.save(hashes)
    assert first.load(hashes) == 6
    second = Server(tmp_path, kind=kind, layout=layout)
    assert second.load(hashes) == 6
    assert second.holds(6)
    other = second.hashes([*tokens[: 3 * PAGE], *range(900, 900 + 3 * PAGE)])
    assert second.load(other) == 3
    assert second.files.written == 0
    assert second.save(hashes), "known pages are not written again"
    assert second.files.written == 0
    second.files._index.check()


OTHERS: dict[str, dict[str, Any]] = {
    "key": {"extra": {"file_tier_key": "another"}},
    "model": {"model": "another"},
    "rank": {"rank": (1, 2)},
    "ranks": {"rank": (0, 2)},
    "layout": {"layout": "page_first"},
    "heads": {"heads": 4, "layers": 3},
    "layers": {"layers": 2, "heads": 3},
    "kind": {"kind": "mla"},
}


@pytest.mark.parametrize("given", OTHERS.values(), ids=OTHERS)
def test_another_model_rank_or_layout_finds_nothing(tmp_path: Path, tokens: list[int], given: dict[str, Any]) -> None:
    first = Server(tmp_path)
    hashes = first.hashes(tokens)
    assert first.save(hashes)
    assert Server(tmp_path, **given).load(hashes) == 0
    assert Server(tmp_path).load(hashes) == 6


def test_other_weights_find_nothing(tmp_path: Path, tokens: list[int]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_bytes(b"one")
    (tmp_path / "model/config.json").write_bytes(b"{}")
    first = Server(tmp_path)
    hashes = first.hashes(tokens)
    first.save(hashes)
    (tmp_path / "model/model.safetensors").write_bytes(b"two")
    assert Server(tmp_path).load(hashes) == 0
    (tmp_path / "model/model.safetensors").write_bytes(b"one")
    (tmp_path / "model/config.json").write_bytes(b'{"rope_theta": 1}')
    assert Server(tmp_path).load(hashes) == 0
    (tmp_path / "model/config.json").write_bytes(b"{}")
    assert Server(tmp_path).load(hashes) == 6


def checkpoint(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    return folder


def change(checkpoint: Path | None) -> None:
    """Records what SGLang's call records when it has loaded a checkpoint, or tensors from memory."""
    from scheduler_adapters.sglang.weights import served_weights

    served_weights().begin("test")
    served_weights().end("test", "" if checkpoint is None else str(checkpoint))


def test_files_of_earlier_weights_are_left_alone_while_the_server_runs(tmp_path: Path, tokens: list[int]) -> None:
    first, second = checkpoint(tmp_path / "one", b"one"), checkpoint(tmp_path / "two", b"two")
    change(first)
    server = Server(tmp_path)
    hashes = server.hashes(tokens)
    assert server.save(hashes)
    change(second)
    assert server.load(hashes) == 0
    assert server.files.batch_get(hashes) == [None] * 6
    assert not server.save(hashes), "host memory has pages of the weights before until SGLang flushes its cache"
    server.pool.clear()
    assert server.load(hashes) == 0, "pages of the first checkpoint were found for the second"
    assert server.save(hashes, seed=2)
    assert server.load(hashes) == 6
    assert server.holds(6, seed=2)
    change(first)
    server.pool.clear()
    assert server.load(hashes) == 6
    assert server.holds(6, seed=1), "a rollback finds the pages of its checkpoint"


def test_weights_from_memory_have_no_files(tmp_path: Path, tokens: list[int]) -> None:
    known = checkpoint(tmp_path / "one", b"one")
    change(known)
    server = Server(tmp_path)
    hashes = server.hashes(tokens)
    assert server.save(hashes)
    change(None)
    server.pool.clear()
    assert server.load(hashes) == 0
    assert not server.save(hashes)
    late = Server(tmp_path)
    assert late.load(hashes) == 0, "storage that is attached later does not know the weights either"
    assert not late.save(hashes)
    change(known)
    late.pool.clear()
    assert late.load(hashes) == 6


def test_adapters_and_salts_have_pages_of_their_own(tmp_path: Path, tokens: list[int]) -> None:
    server = Server(tmp_path)
    plain, adapter, salted = (
        server.hashes(tokens),
        server.hashes(tokens, "adapter"),
        server.hashes(tokens, None, "salt"),
    )
    assert server.save(plain)
    assert (server.load(adapter), server.load(salted)) == (0, 0)


def test_ranks_of_latents_share_their_pages(tmp_path: Path, tokens: list[int]) -> None:
    first, second = Server(tmp_path, (0, 2), "mla"), Server(tmp_path, (1, 2), "mla")
    hashes = first.hashes(tokens)
    first.save(hashes)
    second.files._scan()
    assert second.load(hashes) == 6


@pytest.mark.parametrize("after", [False, True], ids=["before the start", "while it runs"])
@pytest.mark.parametrize("how", ["gone", "cut", "empty", "zeros", "one bit"])
def test_damaged_files_are_misses_and_are_written_again(
    tmp_path: Path, tokens: list[int], how: str, after: bool
) -> None:
    server = Server(tmp_path)
    hashes = server.hashes(tokens)
    server.save(hashes)
    server = Server(tmp_path) if after else server
    (file,) = tmp_path.rglob("*.pages")
    content = bytearray(file.read_bytes())
    if how == "gone":
        file.unlink()
    elif how == "one bit":
        content[3 * server.files._layout.page_bytes + 5] ^= 1
        file.write_bytes(content)
    else:
        file.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "zeros": bytes(len(content))}[how])
    server = server if after else Server(tmp_path)
    count = server.load(hashes)
    assert count == (3 if how == "one bit" else count if how == "cut" else 0)
    assert server.holds(count)
    assert server.save(hashes)
    assert server.load(hashes) == 6
    assert server.holds(6)
    assert Server(tmp_path).load(hashes) == 6


def test_two_servers_share_a_folder(tmp_path: Path, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from scheduler_adapters.sglang import storage

    monkeypatch.setattr(storage, "_RESCAN_S", 0.0)
    left, right = Server(tmp_path), Server(tmp_path)
    hashes = left.hashes(tokens)
    left.save(hashes)
    assert right.load(hashes) == 6
    assert right.holds(6)
    right.files.clear()
    assert right.load(hashes) == 0
    assert left.load(hashes) == 0
    assert Server(tmp_path).load(hashes) == 0, "a server that starts later finds no page of before the reset"
    assert left.save(hashes)
    assert left.load(hashes) == 6


def test_files_stay_within_their_limit(tmp_path: Path) -> None:
    page = host_pool("mha").get_dummy_flat_data_page().nbytes
    most = (20 * (page + 60) + 100) / 2**30
    server = Server(tmp_path, extra={"file_tier_max_gb": most})
    for number in range(8):
        hashes = server.hashes(list(range(1000 * number, 1000 * number + 6 * PAGE)))
        assert server.save(hashes, number)
        assert sum(file.stat().st_size for file in tmp_path.rglob("*.pages")) <= most * 2**30
        server.files._index.check()
    assert server.load(hashes) == 6
    assert server.holds(6, number)
    assert server.load(server.hashes(list(range(6 * PAGE)))) == 0


def test_a_full_disk_only_stops_writing(tmp_path: Path, tokens: list[int]) -> None:
    server = Server(tmp_path)
    hashes = server.hashes(tokens)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        assert not server.save(hashes)
        assert not server.save(hashes), "it does not try again at once"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert server.load(hashes) == 0
    assert not [*tmp_path.rglob("*.pages"), *tmp_path.rglob("*.tmp")]
    server.files._paused_until = 0.0
    assert server.save(hashes)
    assert server.load(hashes) == 6


def test_threads_that_read_and_write_at_once(tmp_path: Path) -> None:
    """As in SGLang, one thread writes and another one reads, while old files are removed."""
    page = host_pool("mha").get_dummy_flat_data_page().nbytes
    server = Server(tmp_path, extra={"file_tier_max_gb": (30 * (page + 60) + 100) / 2**30})
    prompts = [server.hashes(list(range(1000 * number, 1000 * number + 4 * PAGE))) for number in range(12)]
    pages = {key: torch.full((page // 4,), float(at)) for at, key in enumerate(itertools.chain(*prompts))}
    wrong: list[str] = []

    def write() -> None:
        for number in range(120):
            hashes = prompts[number % 12]
            server.files.batch_set(hashes, [pages[key] for key in hashes])

    thread = threading.Thread(target=write)
    thread.start()
    reads = 0
    while thread.is_alive():
        for hashes in prompts:
            for key, got in zip(hashes, server.files.batch_get(hashes), strict=True):
                reads += got is not None
                wrong += [key] if got is not None and not torch.equal(got, pages[key]) else []
    thread.join()
    assert not wrong
    assert reads
    server.files._index.check()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no key": ({"file_tier_key": ""}, "file_tier_key"),
    "no limit": ({"file_tier_max_gb": 0}, "file_tier_max_gb"),
    "less than a page": ({"file_tier_max_gb": 1e-9}, "less than one page"),
    "unknown": ({"file_tier_directory": "/d"}, "there is no option 'file_tier_directory'"),
    "interface": ({"interface_v1": 1}, "interface_v1"),
}


@pytest.mark.parametrize(("extra", "named"), WRONG.values(), ids=WRONG)
def test_an_option_that_does_not_fit_is_named(tmp_path: Path, extra: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidEngineError, match=named):
        Server(tmp_path, extra=extra)


def test_pools_of_windows_and_states_are_refused(tmp_path: Path) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    server = Server(tmp_path)
    server.files.register_mem_host_pool_v2(server.pool, PoolName.KV)
    with pytest.raises(InvalidEngineError, match="'swa'"):
        server.files.register_mem_host_pool_v2(server.pool, PoolName.SWA)
