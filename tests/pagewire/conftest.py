"""The models of `tests/scheduler_adapters`. Tests of commands use them to run a model."""

from tests.scheduler_adapters.conftest import _models_stay, make_model, model_dirs, shared_model, tiny_model

__all__ = ["_models_stay", "make_model", "model_dirs", "shared_model", "tiny_model"]
