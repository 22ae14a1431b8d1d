"""Errors of the adapters. All of them derive from `kvcache.errors.KVCacheError`."""

from kvcache.errors import KVCacheError


class AdapterError(KVCacheError):
    """Base of the errors that the adapters raise."""


class MissingExtraError(AdapterError, ImportError):
    """A package of an optional extra is not installed."""


class ModelLoadError(AdapterError, ValueError):
    """A model directory cannot be loaded completely."""


class UnsupportedModelError(AdapterError, ValueError):
    """The model's attention needs a feature that the paged attention does not compute."""


class GenerationError(AdapterError, RuntimeError):
    """Generation for a batch could not be completed. The batch's pages have been released."""


class PromptsError(AdapterError, ValueError):
    """A prompts file cannot be read, or one of its prompts can never be served."""


class ReplayError(AdapterError, ValueError):
    """A trace cannot be read, or cannot be replayed as requested."""


class PlanError(AdapterError, ValueError):
    """A model config is not understood, or an option does not fit it.

    For a config, the message names the file, the field and its limits.
    """


class ModelInUseError(AdapterError, RuntimeError):
    """Another thread has switched this model's attention, and would switch it back in the middle of this call."""


class ServiceError(AdapterError, RuntimeError):
    """A prefill or decode server did not start, died, or stopped answering."""


class RefusedError(ServiceError):
    """A process refuses a new request because it is draining or full. The request can be sent again later."""


class MessageError(ServiceError, ValueError):
    """Bytes from another process are not a valid message."""


class IllegalMoveError(ServiceError):
    """A request was about to change to a phase that may not follow its current one. This is a bug in the service."""
