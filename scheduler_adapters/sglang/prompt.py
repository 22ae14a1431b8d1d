"""`prompt_of`: everything that the KV of an SGLang request depends on and that both servers name alike."""

from typing import TYPE_CHECKING

import numpy as np

from transfer.wire.prompt import Prompt

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_INT32 = (1 << 31) - 1


def prompt_of(req: "Req") -> Prompt:
    """Returns the tokens and the salt of a request.

    SGLang replaces an image by tokens made from its hash. The number of an adapter differs between servers, so it is
    left out: a router must send a request for an adapter to servers that have it.
    """
    tokens = np.concatenate([np.asarray(ids, np.int64) for ids in (req.origin_input_ids, req.output_ids)])
    return Prompt((tokens & _INT32).astype(np.int32), req.cache_salt or "")
