"""Requests in the form that SGLang's tokenizer process would send. No test starts that process."""

from __future__ import annotations

from array import array
from typing import Any


def tokenized(name: str, prompt: list[int], new: int, stop: int | None = None, **fields: Any) -> Any:
    """Returns a request for `new` greedy tokens."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=new, temperature=0.0, stop_token_ids=None if stop is None else {stop})
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=name,
        input_text=None,
        input_ids=array("q", prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        **fields,
    )
