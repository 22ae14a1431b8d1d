#!/usr/bin/env bash
# transformers 5.24.0: a Mamba-1 model that continues with several tokens from its cache starts from an empty state.
#
# Expected: a prompt that runs in two pieces, the second with the cache of the first, yields the logits of the whole
#   prompt, however long the second piece is. Attention layers do this.
# Actual: it does so only if each later piece has a single token. With more tokens, the convolution continues, but the
#   recurrent state of the cache is ignored and then overwritten. There is no error and no warning.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check 'transformers==5.24.0' 'torch==2.13.0'
cat >"$work/run.py" <<'PY'
import sys
import warnings

import torch
import transformers

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
config = transformers.MambaConfig(vocab_size=97, hidden_size=32, state_size=8, num_hidden_layers=2)
model = transformers.MambaForCausalLM(config).eval()
prompt = torch.randint(0, 97, (1, 12))


@torch.no_grad()
def run(*ends):
    """Returns the last logits and the state of the first layer if the prompt runs in pieces that end at `ends`."""
    start, cache = 0, None
    for end in ends:
        out = model(prompt[:, start:end], cache_params=cache, use_cache=True)
        start, cache = end, out.cache_params
    return out.logits[0, -1], cache.get_recurrent_state(0)


def differs(*ends):
    """Returns the largest difference of logits and state from those of the whole prompt."""
    return [(one - whole).abs().max().item() for one, whole in zip(run(*ends), run(12))]


single, several = differs(8, 9, 10, 11, 12), differs(8, 12)
print(f"transformers {transformers.__version__}, torch {torch.__version__}; differences from 12 tokens in one piece:")
print("8 tokens, then 4 one by one: logits {:.1e}, state {:.1e}".format(*single))
print("8 tokens, then 4 in one piece: logits {:.1e}, state {:.1e}".format(*several))
sys.exit(0 if max(single) < 1e-5 and min(several) > 1e-4 else 1)
PY
"$work/venv/bin/python" "$work/run.py"
