"""Errors of the adapters. They belong to the one tree under `kvcache.errors.KVCacheError`."""

from kvcache.errors import KVCacheError


class AdapterError(KVCacheError):
    """Base of what the adapters raise on purpose."""


class MissingExtraError(AdapterError, ImportError):
    """A package of an optional extra is not installed."""


class ModelLoadError(AdapterError, ValueError):
    """A model directory that cannot be loaded whole."""


class UnsupportedModelError(AdapterError, ValueError):
    """A model whose attention needs something that the paged attention does not compute."""


class GenerationError(AdapterError, RuntimeError):
    """A batch that cannot be generated to its end. Its pages are released."""


class PromptsError(AdapterError, ValueError):
    """A prompts file that cannot be read, or a prompt that can never be served."""


class ReplayError(AdapterError, ValueError):
    """A trace that cannot be read, or not be replayed as it was asked for."""


class PlanError(AdapterError, ValueError):
    """A config that is not understood, with file, field and what may be there; or a choice that does not fit it."""


class ServiceError(AdapterError, RuntimeError):
    """A prefill or decode server did not start, died, or stopped answering."""


class RefusedError(ServiceError):
    """A request to a process that drains, or has as many as it may have: another one may take it, or it later."""


class MessageError(ServiceError, ValueError):
    """Bytes from another process that are no message, or hold a value out of range."""


class IllegalMoveError(ServiceError):
    """A request was to go where its table has no move to: a bug of ours."""
