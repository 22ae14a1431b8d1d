"""Everything that the KV of an SGLang request depends on and that has the same name on both servers."""

from typing import TYPE_CHECKING

import numpy as np

from transfer.wire.prompt import Prompt

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_INT32 = (1 << 31) - 1


def prompt_of(req: "Req") -> Prompt:
    """Returns the tokens of a request, and its salt.

    For an image SGLang has tokens made of its hash. The number of an adapter is each server's own, so it is not part of
    this: a router sends a request for an adapter to servers that have it.
    """
    tokens = np.concatenate([np.asarray(ids, np.int64) for ids in (req.origin_input_ids, req.output_ids)])
    return Prompt((tokens & _INT32).astype(np.int32), req.cache_salt or "")
