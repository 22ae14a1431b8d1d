from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from transfer.engine.tensor_agent import TensorAgent
from transfer.errors import AgentError
from transfer.memory import MemoryType
from transfer.nixl.agent import Agent
from transfer.nixl.settings import (
    agreed_settings,
    effective_settings,
    reaches_other_hosts,
    settings_fingerprint,
)

ROOT = Path(__file__).resolve().parents[3]
BOTH = {"UCX_POSIX_ERROR_HANDLING", "UCX_SYSV_ERROR_HANDLING"}

CHILD = """
import json, os, signal, sys
heard = []
handled = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
for number in handled:
    signal.signal(number, lambda number, _: heard.append(number))
before = dict(os.environ)
import transfer
report = {"early": [m for m in sys.modules if m.startswith("nixl")], "same": dict(os.environ) == before}
import torch
fingerprint = transfer.settings_fingerprint()
report["pure"] = dict(os.environ) == before
class Watch:  # sees the environment as NIXL sees it when it is imported
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "nixl" and "set" not in report:
            report["set"] = {k: v for k, v in os.environ.items() if k.startswith(("UCX_", "NIXL_"))}
sys.meta_path.insert(0, Watch())
engine = transfer.KVTransferEngine("e", [[torch.zeros(4, 4096, dtype=torch.uint8)]], total_num_pages=4)
report["fingerprint"] = [fingerprint, transfer.settings_fingerprint()]
report["told"] = engine.metadata.settings
report["restored"] = dict(os.environ) == before
report["threads"] = len(os.listdir("/proc/self/task"))
for number in handled:
    signal.raise_signal(number)
report["not heard"] = sorted({*handled} - {*heard})
engine.cleanup()
print(json.dumps(report))
"""


def run(**env: str) -> dict:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("UCX_", "NIXL_"))}
    clean |= env | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count("\n") == 1, f"NIXL wrote to stdout: {done.stdout}"
    assert not done.stderr
    return json.loads(done.stdout)


def test_the_settings_are_in_the_environment_while_an_agent_is_made_and_not_after():
    report = run()
    assert report["early"] == []
    assert report["same"]
    assert report["pure"]
    assert report["restored"], "an agent leaves nothing in the environment for the program's other children"
    assert report["not heard"] == [], "NIXL and UCX must leave the program's own signal handlers alone"
    assert len(set(report["fingerprint"])) == 1
    assert report["told"] == agreed_settings(environ={})
    assert report["set"] == {
        "UCX_TLS": "posix,sysv,cma,cuda_copy",
        "UCX_POSIX_ERROR_HANDLING": "y",
        "UCX_SYSV_ERROR_HANDLING": "y",
        "UCX_DEBUG_SIGNO": "0",
        "UCX_KEEPALIVE_INTERVAL": "1s",
        "UCX_TCP_USER_TIMEOUT": "15s",
        "UCX_TCP_SYN_CNT": "3",
        "UCX_TCP_TX_SEG_SIZE": "256k",
        "UCX_TCP_RX_SEG_SIZE": "256k",
        "UCX_LOG_LEVEL": "error",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        "NIXL_LOG_LEVEL": "ERROR",
    }


def test_a_process_keeps_what_its_environment_says():
    given = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "UCX_KEEPALIVE_INTERVAL": "7s", "NIXL_LOG_LEVEL": "FATAL"}
    report = run(**given)
    kept = {"UCX_DEBUG_SIGNO": "0", "UCX_LOG_LEVEL": "error", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    segments = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
    assert report["set"] == given | kept | segments | {"UCX_TCP_USER_TIMEOUT": "15s", "UCX_TCP_SYN_CNT": "3"}
    assert report["fingerprint"][0] != settings_fingerprint(environ={})


def test_nixl_uses_the_transports_of_host_memory_even_with_a_gpu():
    assert {"cuda_copy", "cuda", "all"} & {*effective_settings(environ={})["UCX_TLS"].split(",")}


def test_dead_peers_are_reported_over_shared_memory_only_if_it_is_used():
    assert effective_settings(environ={}).keys() >= BOTH
    assert not effective_settings(environ={"UCX_TLS": "tcp,self"}).keys() & BOTH
    assert effective_settings(environ={"UCX_TLS": "posix,tcp"}).keys() & BOTH == {"UCX_POSIX_ERROR_HANDLING"}
    assert effective_settings(environ={"UCX_POSIX_ERROR_HANDLING": "n"})["UCX_POSIX_ERROR_HANDLING"] == "n"


def test_transports_of_a_gpu_are_left_to_ucx_but_reads_use_cuda_ipc_and_shared_memory_reports_dead_peers():
    found = effective_settings(MemoryType.VRAM, {})
    assert found["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "on"
    assert found.keys() >= BOTH
    assert effective_settings(MemoryType.VRAM, {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "auto"}).items() >= {
        ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "auto")
    }
    assert "UCX_CUDA_IPC_ENABLE_GET_ZCOPY" not in effective_settings(environ={})
    assert "UCX_TLS" not in effective_settings(MemoryType.VRAM, {})
    assert effective_settings(MemoryType.VRAM, {"UCX_TLS": "rc,cuda_ipc"})["UCX_TLS"] == "rc,cuda_ipc"


def test_the_fingerprint_does_not_depend_on_spelling():
    usual = settings_fingerprint(environ={})
    assert (
        settings_fingerprint(environ={"UCX_TLS": " cma,SYSV, posix,cuda_copy", "UCX_SYSV_ERROR_HANDLING": "yes"})
        == usual
    )
    assert settings_fingerprint(environ={"UCX_LOG_LEVEL": "info", "UCX_NET_DEVICES": "lo"}) == usual


@pytest.mark.parametrize(
    "environ",
    [
        {"UCX_TLS": "tcp,self"},
        {"UCX_TLS": "posix,sysv,cma,tcp"},
        {"UCX_POSIX_ERROR_HANDLING": "n"},
        {"UCX_SYSV_ERROR_HANDLING": "no"},
        {"UCX_PROTO_ENABLE": "n"},
    ],
)
def test_the_fingerprint_depends_on_what_must_agree(environ: dict[str, str]):
    assert settings_fingerprint(environ=environ) != settings_fingerprint(environ={})


@pytest.mark.parametrize("variable", ["UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"])
def test_tcp_segment_sizes_set_by_the_user_are_kept_and_must_agree_on_both_sides(variable: str):
    tcp = {"UCX_TLS": "tcp,self"}
    told = tcp | {variable: "32K"}
    segments = {key: value for key, value in effective_settings(environ=told).items() if "_SEG_SIZE" in key}
    assert segments == {}, "UCX refuses an agent that sends more than it can receive"
    assert agreed_settings(environ=told)[variable] == "32k"
    assert settings_fingerprint(environ=told) != settings_fingerprint(environ=tcp)
    assert variable not in agreed_settings(environ={variable: "32k"}), "on one host nothing goes over TCP"


def test_which_transports_leave_the_host():
    assert not reaches_other_hosts({"UCX_TLS": "posix,sysv,cma"})
    assert reaches_other_hosts({"UCX_TLS": "tcp,self"})
    assert reaches_other_hosts({"UCX_TLS": "^ib"})
    assert reaches_other_hosts({})


def test_an_agent_describes_its_tensor():
    tensor = torch.zeros(4, 8, dtype=torch.float32)
    agent = TensorAgent.create_agent("alone@1", 0, tensor, 4, 8, MemoryType.DRAM)
    meta = agent.to_metadata()
    assert (meta.agent_name, meta.base_addr, meta.device_id) == ("alone@1", tensor.data_ptr(), 0)
    assert meta.metadata == agent.agent_metadata != b""
    assert agent.tensor is tensor
    assert isinstance(agent.ucx_backend, int)
    assert agent.agent.backend == agent.ucx_backend
    agent.agent.close()
    agent.agent.close()
    assert not agent.agent.is_open


def test_a_closed_agent_is_no_longer_referenced():
    # The last reference keeps an agent's worker alive. Until this reference is dropped, transfers in flight continue to
    # write.
    memory = torch.zeros(2, 4096, dtype=torch.uint8)
    runs = [(memory.data_ptr() + at, 4096, 0) for at in (0, 4096)]
    source, agent = Agent("alone@3"), Agent("alone@4")
    for one in (source, agent):
        one.register([(memory.data_ptr(), memory.nbytes, 0)])
    agent.add_peer(source.name, source.metadata)
    handle, done = agent.post("READ", source.name, runs[:1], runs[1:])
    while not done:
        source.notifications()  # Both sides must be polled before the connection exists.
        done = agent.done(handle)
    agent.release(handle)
    del handle
    agent.remove_peer(source.name)
    source.close()
    bound = agent._agent.agent
    agent.close()
    gc.collect()
    assert sys.getrefcount(bound) == 2  # The two references are `bound` and the argument.


def test_words_are_read_one_at_a_time_and_a_peer_takes_their_lists_with_it():
    words = torch.arange(8, dtype=torch.int64)
    here = torch.zeros(8, dtype=torch.int64)
    agent = Agent("alone@5")
    agent.register([(here.data_ptr(), here.nbytes, 0)])
    for name in ("alone@6", "alone@7"):  # A later agent at the same addresses leaves no state behind.
        source = Agent(name)
        source.register([(words.data_ptr(), words.nbytes, 0)])
        agent.add_peer(name, source.metadata)
        here.zero_()
        told = []
        for at in (3, 5, 3):
            handle = agent.read_word(name, here[at].data_ptr(), words[at].data_ptr(), f"read {at}".encode())
            while handle is not None and not agent.done(handle):
                source.notifications()
            if handle is not None:
                agent.release(handle)
            until, news = time.monotonic() + 5.0, []
            while not news and time.monotonic() < until:
                agent.notifications()
                news = source.notifications()
            told += news
        assert here.tolist() == [0, 0, 0, 3, 0, 5, 0, 0]
        assert told == [(agent.name, f"read {at}".encode()) for at in (3, 5, 3)]
        assert {peer for peer, _ in agent._words} == {"", name}
        agent.remove_peer(name)
        assert {peer for peer, _ in agent._words} == {""}
        source.close()
    bound = agent._agent.agent
    agent.close()
    gc.collect()
    assert sys.getrefcount(bound) == 2  # The two references are `bound` and the argument.
    assert not agent._words


def test_a_read_of_a_word_that_nixl_refuses_is_an_agent_error():
    word = torch.zeros(1, dtype=torch.int64)
    agent = Agent("alone@8")
    with pytest.raises(AgentError, match="agent 'alone@8': READ of a word of 'nobody'"):
        agent.read_word("nobody", word.data_ptr(), word.data_ptr(), b"")
    runs = [(word.data_ptr(), 8, 0)]
    with pytest.raises(AgentError, match="agent 'alone@8': READ of 1 runs of 'nobody'"):
        agent.read("nobody", runs, runs, (MemoryType.DRAM, MemoryType.DRAM))
    agent.close()


def test_host_memory_is_not_registered_as_vram():
    with pytest.raises(AgentError, match="agent 'alone@2': registering 1 regions"):
        TensorAgent.create_agent("alone@2", 0, torch.zeros(4, 8), 4, 8, MemoryType.VRAM)


def test_agents_made_by_several_threads_at_once_leave_the_environment_as_it_was():
    before = dict(os.environ)
    made: list[Agent] = []
    threads = [
        threading.Thread(target=lambda at=at: made.append(Agent(f"at-once-{at}-{os.getpid()}"))) for at in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for agent in made:
        agent.close()
    assert len(made) == 6
    assert dict(os.environ) == before
