"""Restores the state that `frame.settle` changes, because other tests run in the same process."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    cores, log = os.sched_getaffinity(0), logging.getLogger("pagewire")
    level, threads = log.level, torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    os.sched_setaffinity(0, cores)
    gc.unfreeze()
    log.setLevel(level)
