"""What a model run asks of a manager besides `fetch`: where replicas end in a batch, further steps' inputs, shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvcache import sizing
from kvcache.arguments import shown
from kvcache.claims import Claims
from kvcache.errors import InvalidRequestError, KVCacheError
from kvcache.layout import PageLayout, shard_layout
from kvcache.params import KVCacheParams
from kvcache.replica import inputs
from kvcache.replica.context import Context
from kvcache.replica.inputs import RaggedKVCacheInputSymbols
from kvcache.replicas import Replicas
from kvcache.types import RaggedKVCacheInputs


class CacheInputs:
    """These calls of a manager, which reserve nothing and change nothing of it."""

    params: KVCacheParams
    page_size: int
    num_layers: int
    num_replicas: int
    layouts: list[PageLayout]
    _claims: Claims
    _replicas: Replicas

    def increment_cache_lengths(
        self, kv_cache_inputs: Sequence[RaggedKVCacheInputs], prev_model_inputs: Any
    ) -> Sequence[RaggedKVCacheInputs]:
        """The inputs of the next of several steps; a list is changed in place and returned. See `inputs`.

        Raises:
            InvalidRequestError: (a ValueError) row offsets or splits do not fit; nothing is changed.
        """
        try:
            advanced = inputs.increment_cache_lengths(kv_cache_inputs, prev_model_inputs, replicas=self.num_replicas)
        except (TypeError, AttributeError, IndexError, RuntimeError, OverflowError, ValueError) as error:
            if isinstance(error, KVCacheError):
                raise
            raise InvalidRequestError(f"increment_cache_lengths of {shown(prev_model_inputs)}: {error}") from error
        if isinstance(kv_cache_inputs, list):
            kv_cache_inputs[:] = advanced
            return kv_cache_inputs
        return advanced

    def get_data_parallel_splits(self, context_batch: Sequence[Context]) -> torch.Tensor:
        """Where each replica's requests end in the batch: int64 `[num_replicas + 1]`, cumulative, from 0, on the host.

        Raises:
            InvalidRequestError: (a ValueError) the batch is not ordered by replica.
        """
        replicas = self._claims.gather(context_batch, "get_data_parallel_splits").replicas
        if (np.diff(replicas) < 0).any():
            raise InvalidRequestError(f"the batch is not ordered by replica: {replicas.tolist()}")
        counts = np.bincount(replicas, minlength=self.num_replicas)
        return torch.as_tensor(np.concatenate(([0], np.cumsum(counts))).astype(np.int64))

    def input_symbols(
        self, devices: Sequence[torch.device | str] | None = None, num_layers: int | None = None
    ) -> list[RaggedKVCacheInputSymbols]:
        """The shapes of `fetch`'s entries as meta tensors with named dynamic dimensions, for `torch.export`.

        `devices` and `num_layers`, where given, stand in for the manager's own.

        Raises:
            InvalidParamsError: (a ValueError) another number of devices than the params say.
        """
        if devices is not None:
            sizing.check_devices(self.params, devices)
        layers = sizing.check_sizes(
            self.params, self.params.data_parallel_degree, 1, self.num_layers if num_layers is None else num_layers
        ).num_layers
        layouts = [shard_layout(self.params, layers, self.page_size, shard) for shard in range(len(self.layouts))]
        symbols: list[RaggedKVCacheInputSymbols] = []
        for place, replica in enumerate(self._replicas.each):
            prefix = f"replica_{place}_" if self.num_replicas > 1 else ""
            symbols += inputs.input_symbols(layouts, replica.pool.num_pages + 1, prefix)
        return symbols
