"""Writes the answers of plain vLLM without a connector as JSON: `python -m tests.vllm_serve.reference FILE MODEL...`.
Prompts run one at a time, because vLLM's latent attention on CPUs gives other results in a batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.vllm_serve.client import PROMPTS, TOKENS


def main(target: Path, folders: list[str]) -> None:
    from vllm import LLM, SamplingParams

    found: dict[str, list[list[int]]] = {}
    for folder in folders:
        engine = LLM(
            folder, dtype="float32", enforce_eager=True, max_model_len=2048, block_size=32, seed=0,
            num_gpu_blocks_override=200, enable_prefix_caching=False,
        )  # fmt: skip
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        answers = [engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0] for prompt in PROMPTS]
        found[folder] = [list(answer.outputs[0].token_ids) for answer in answers]
        del engine
        target.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
