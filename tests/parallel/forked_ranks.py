"""Ranks that are forks of one process: ``python forked_ranks.py FOLDER COUNT …`` stands in for torchrun.

Under torchrun every rank loads the libraries. Here they are loaded once, in the process that the ranks are forked from.
"""

from __future__ import annotations

import os
import socket
import sys

# Loaded before the ranks are forked: what the tasks import.
import peft  # noqa: F401
import rank_tasks  # noqa: F401
import torch._dynamo
import torch._inductor.compile_fx  # noqa: F401
from torch.distributed import TCPStore
from transformers import LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM  # noqa: F401

from trainatomy.measurement.process import rank
from trainatomy.training.loops import pipeline  # noqa: F401

HOST = "127.0.0.1"


def main() -> int:
    rank.end_with_parent()
    forks = rank.preload()
    rank.preload = lambda allocator="": forks
    rank.POLL_SECONDS = 0.1  # six ranks that look for tasks every 20 ms would take a tenth of a processor
    launches = [
        (folder, int(count), _free_port()) for folder, count in zip(sys.argv[1::2], sys.argv[2::2], strict=True)
    ]
    pids = [
        os.fork() or _serve(folder, number, count, port) for folder, count, port in launches for number in range(count)
    ]
    stores = [TCPStore(HOST, port, is_master=True, wait_for_workers=False) for *_, port in launches]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    del stores
    return max(codes)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


def _serve(folder: str, number: int, count: int, port: int) -> int:
    """Be a rank, with the variables that torchrun sets."""
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update({"MASTER_ADDR": HOST, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    os._exit(rank.main([folder]))


if __name__ == "__main__":
    os._exit(main())  # without the libraries' farewells, which take seconds
