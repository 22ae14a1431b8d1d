"""`prompt_of`: everything that the KV of an SGLang request depends on, in a form that is equal on both servers."""

from typing import TYPE_CHECKING

import numpy as np

from transfer.wire.prompt import Prompt

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_INT32 = (1 << 31) - 1


def prompt_of(req: "Req") -> Prompt:
    """Returns the tokens and the salt of a request.

    SGLang replaces an image by tokens made from its hash. An adapter's number differs between servers, so it is left
    out. Therefore a router must send a request with an adapter only to servers that have this adapter.
    """
    tokens = np.concatenate([np.asarray(ids, np.int64) for ids in (req.origin_input_ids, req.output_ids)])
    return Prompt((tokens & _INT32).astype(np.int32), req.cache_salt or "")
