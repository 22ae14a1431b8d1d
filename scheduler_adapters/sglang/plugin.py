"""SGLang's plugin: registers our cache and our transfer by name, and imports each of them only if it is used.

SGLang calls `register` in each of its processes, and most processes use neither the cache nor the transfer. This module
therefore imports little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from scheduler_adapters.sglang.settings import Settings

BACKEND = "pagewire"
_PREFILL = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue"
_DECODE = "sglang.srt.disaggregation.decode.DecodePreallocQueue"
QUEUES = (_PREFILL, _DECODE)
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"


def register() -> None:
    """Registers `--radix-cache-backend pagewire` and `--disaggregation-transfer-backend pagewire`.

    From this call on, changes of the weights are recorded, because storage can be attached to a running server.

    Safe to call twice.
    """
    from sglang.srt.mem_cache.registry import (  # noqa: PLC0415  (this module needs no SGLang)
        get_radix_cache_factory,
        register_radix_cache_backend,
    )

    from scheduler_adapters.sglang.weights import follow_updates  # noqa: PLC0415  (imports nothing of SGLang here)

    if get_radix_cache_factory(BACKEND) is None:
        register_radix_cache_backend(BACKEND, _build)
    follow_updates()
    _register_transfer()


def _build(context: TreeCacheBuildContext) -> BasePrefixCache:
    from scheduler_adapters.sglang.cache import build  # noqa: PLC0415  (heavy: torch and the whole index)
    from scheduler_adapters.sglang.settings import read_settings  # noqa: PLC0415
    from scheduler_adapters.sglang.watch import watch  # noqa: PLC0415

    cache, settings = build(context), read_settings()
    watch(cache, settings)
    if settings.exchange:
        _exchange(cache, context, settings)
    return cache


def _exchange(cache: Any, context: TreeCacheBuildContext, settings: Settings) -> None:
    """Lets a cache exchange pages with peers, and installs the hooks in SGLang that this needs.

    Raises:
        InvalidEngineError: the scheduler has an unsupported feature, or this version of SGLang lacks a method.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415  (as above)

    from scheduler_adapters.sglang.exchange import exchange_pages  # noqa: PLC0415
    from transfer.errors import InvalidEngineError  # noqa: PLC0415

    exchange_pages(cache, context, settings)
    hooks = {
        f"{_SCHEDULER}.ingest_requests": (_turn, HookType.AFTER),
        f"{_SCHEDULER}.get_new_batch_prefill": (_hold_back, HookType.AROUND),
        f"{_STREAMER}.is_request_level_customized_info_key": (_is_whole, HookType.AROUND),
    }
    patched = HookRegistry._patched  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  (as below)
    for target, (hook, kind) in hooks.items():
        if target not in patched:
            HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()
    if missing := hooks.keys() - patched:
        raise InvalidEngineError(f"PAGEWIRE_EXCHANGE: this version of SGLang lacks {', '.join(sorted(missing))}")


def _turn(_: Any, scheduler: Any, *__: Any, **___: Any) -> None:
    if (exchange := getattr(scheduler.tree_cache, "exchange", None)) is not None:
        exchange.step(scheduler)


def _hold_back(original: Callable[..., Any], scheduler: Any, *args: Any, **options: Any) -> Any:
    if (exchange := getattr(scheduler.tree_cache, "exchange", None)) is None:
        return original(scheduler, *args, **options)
    with exchange.holding_back(scheduler):
        return original(scheduler, *args, **options)


def _is_whole(original: Callable[..., Any], streamer: Any, key: str) -> Any:
    """SGLang has one value for each token of an answer in mind, unless the key is of the whole answer."""
    return key == "kv_sources" or original(streamer, key)


def _register_transfer() -> None:
    """Registers the transfer backend.

    A plugin can add a name to SGLang's choices of backends, but SGLang also looks the backend up in an enum.

    Python calls an enum's `_missing_` hook for a value that is not in the enum. Our `_missing_` hook returns a new
    member for our name. It also installs the hooks in SGLang that the backend needs, so that only processes with this
    backend are changed.
    """
    from sglang.srt.arg_groups.choices import (  # noqa: PLC0415
        DISAGG_TRANSFER_BACKEND_CHOICES,
        add_disagg_transfer_backend_choices,
    )
    from sglang.srt.disaggregation.utils import TransferBackend  # noqa: PLC0415

    if BACKEND in DISAGG_TRANSFER_BACKEND_CHOICES:
        return
    add_disagg_transfer_backend_choices([BACKEND])
    member = object.__new__(TransferBackend)
    member._name_, member._value_ = BACKEND.upper(), BACKEND

    def missing(_: type[TransferBackend], value: object) -> TransferBackend | None:
        if value != BACKEND:
            return None
        _hook(member)
        return member

    backends: Any = TransferBackend
    backends._missing_ = classmethod(missing)


def _hook(member: object) -> None:
    """Installs the hooks through which SGLang uses our classes, and a hook that tells which queue creates a manager."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    targets = ("sglang.srt.disaggregation.utils.get_kv_class", *(f"{queue}._init_kv_manager" for queue in QUEUES))
    # The registry has no public way to ask.
    if targets[0] in HookRegistry._patched:  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        return

    def classes(original: Callable[..., Any], backend: object, kind: Any) -> Any:
        return _class(kind.value) if backend is member and kind.value != "kvargs" else original(backend, kind)

    HookRegistry.register(targets[0], classes, HookType.AROUND)
    for target in targets[1:]:
        HookRegistry.register(target, _show, HookType.AROUND)
    # SGLang calls these functions in each iteration of the scheduler's loop, even if there is no request to poll.
    HookRegistry.register(f"{_PREFILL}.pop_bootstrapped", _step, HookType.BEFORE)
    HookRegistry.register(f"{_DECODE}.resume_retracted_reqs", _step, HookType.BEFORE)
    # SGLang tells a sender or receiver only the number of its room. The tokens are in the request, so a hook passes the
    # request on.
    HookRegistry.register(f"{_PREFILL}.create_sender", _name_sender, HookType.AFTER)
    HookRegistry.register(f"{_DECODE}._create_receiver_and_enqueue", _name_receiver, HookType.AFTER)
    HookRegistry.apply_hooks()


def _show(original: Callable[[Any], Any], queue: Any) -> Any:
    from scheduler_adapters.sglang.engine import building  # noqa: PLC0415  (as above)

    token = building.set(queue)
    try:
        return original(queue)
    finally:
        building.reset(token)


def _step(queue: Any, *_: Any, **__: Any) -> None:
    queue.kv_manager.step()


def _name_sender(made: bool, _: Any, req: Any, *__: Any, **___: Any) -> None:
    if made:
        req.disagg_kv_sender.request = req


def _name_receiver(made: Any, *_: Any, **__: Any) -> None:
    made.kv_receiver.request = made.req


def _class(kind: str) -> Any:
    from scheduler_adapters.sglang import conn  # noqa: PLC0415  (heavy: NIXL)

    return {
        "manager": conn.PagewireKVManager,
        "sender": conn.PagewireKVSender,
        "receiver": conn.PagewireKVReceiver,
        "bootstrap_server": conn.PagewireKVBootstrapServer,
    }[kind]
