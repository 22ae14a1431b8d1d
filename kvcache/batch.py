"""`Batch`: the requests of a step, looked up once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from kvcache.context import Context
from kvcache.errors import InvalidRequestError


class Batch(Sequence[Context]):
    """Contexts with their replicas and rows bound. Made by `PagedKVCacheManager.batch`; good until one is released.

    Attributes:
        contexts: the requests, in the order given.
        replicas: int64 `[len]`, the replica of each.
        rows: int64 `[len]`, the row of each in its replica's block table.
    """

    __slots__ = ("contexts", "replicas", "rows")

    def __init__(self, contexts: Sequence[Context], replicas: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        self.contexts = tuple(contexts)
        self.replicas = replicas
        self.rows = rows

    @overload
    def __getitem__(self, index: int) -> Context: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Context]: ...
    def __getitem__(self, index: int | slice) -> Context | Sequence[Context]:
        return self.contexts[index]

    def __len__(self) -> int:
        return len(self.contexts)

    def __iter__(self) -> Iterator[Context]:
        return iter(self.contexts)

    def update(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Give each request its next token, int `[len]`.

        Raises:
            InvalidRequestError: (a ValueError) not one integer a request; no request is touched.
        """
        array = np.asarray(tokens)
        if array.shape != (len(self.contexts),) or (array.size and array.dtype.kind not in "iu"):
            raise InvalidRequestError(
                f"batch of {len(self.contexts)} requests: tokens of shape {array.shape} and dtype {array.dtype}, "
                "one integer each is needed"
            )
        for context, token in zip(self.contexts, array.tolist(), strict=True):
            context.update(token)
