#!/usr/bin/env bash
# torch 2.13.0 (CPU): sending one small view of a tensor to another process moves the whole storage of the sender.
#
# Expected: the receiver gets a copy or a mapping, and the sender's tensor stays where it is. An address that was
#   registered with a device or a network library before the send stays valid.
# Actual: pickling the view for a `torch.multiprocessing` queue moves the storage into shared memory. `data_ptr` of
#   every tensor over this storage changes, and the memory at the old address is freed. No call fails or warns.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check 'torch==2.13.0' 'numpy==2.2.6'
cat >"$work/run.py" <<'PY'
import sys

import torch
import torch.multiprocessing as processes


def receive(queue):
    queue.get()


if __name__ == "__main__":
    context = processes.get_context("spawn")
    pool = torch.zeros(1 << 20)
    other = pool.view(1024, 1024)
    before = pool.data_ptr()
    queue = context.SimpleQueue()
    process = context.Process(target=receive, args=(queue,))
    process.start()
    queue.put(pool[:8])
    process.join()
    moved = pool.data_ptr() != before
    print(f"torch {torch.__version__}: 8 of {pool.numel()} elements were sent")
    print(f"the sender's storage moved: {moved}; is shared now: {pool.is_shared()}; a view follows: {other.data_ptr() == pool.data_ptr()}")
    sys.exit(0 if moved and pool.is_shared() and other.data_ptr() == pool.data_ptr() else 1)
PY
"$work/venv/bin/python" "$work/run.py"
