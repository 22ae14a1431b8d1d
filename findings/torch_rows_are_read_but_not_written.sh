#!/usr/bin/env bash
# torch 2.13.0 (CPU): rows of float8 and uint16 tensors can be read by index, but not written by index.
#
# Expected: what moves elements without computing with them works for every dtype. If `pool[rows]` gathers rows,
#   `index_copy_` and `pool[rows] = values` put them back.
# Actual: gathering works for all dtypes below. `index_copy_` raises NotImplementedError for both float8 dtypes, uint16,
#   uint32 and uint64. Indexed assignment works for float8, but not for the three unsigned ones. Through a view as an
#   integer dtype of the same size, all of them work.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check 'torch==2.13.0' 'numpy==2.2.6'
cat >"$work/run.py" <<'PY'
import sys

import torch

FLOATS, UNSIGNED = ("float8_e4m3fn", "float8_e5m2"), ("uint16", "uint32", "uint64")
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ROWS = torch.tensor([2, 0])


def copied(pool, rows):
    pool.index_copy_(0, ROWS, rows)


def assigned(pool, rows):
    pool[ROWS] = rows


def works(write, dtype, view=None):
    pool, rows = torch.zeros(4, 2, dtype=dtype), torch.ones(2, 2).to(dtype)
    try:
        write(*((pool, rows) if view is None else (pool.view(view), rows.view(view))))
    except NotImplementedError:
        return False
    return torch.equal(pool[ROWS].view(torch.uint8), rows.view(torch.uint8))


same = True
for name in ("float32", "bfloat16", "int8", *FLOATS, *UNSIGNED):
    dtype = getattr(torch, name)
    saw = [works(copied, dtype), works(assigned, dtype), works(copied, dtype, SIGNED[dtype.itemsize])]
    print(f"{name}: gathered True, index_copy_ {saw[0]}, assigned {saw[1]}, index_copy_ through integers {saw[2]}")
    same &= saw == [name not in FLOATS + UNSIGNED, name not in UNSIGNED, True]
print(f"torch {torch.__version__}")
sys.exit(0 if same else 1)
PY
"$work/venv/bin/python" "$work/run.py"
