"""Print the host memory of a process after each step of starting a training: ``python lab/host/footprint.py [--json]``.

Resident memory by kind, in MiB, after importing torch, transformers, the class of a model and the Trainer; on a machine
with a GPU also after the CUDA context, the first cuBLAS and cuDNN calls, a model on the GPU, and pinned memory, which
tells whether a process's resident memory contains it.  ``--without NAME`` imports as if a package were not installed.
The figures of ``catalog/host.yaml`` are from here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MIB = 1 << 20


def resident() -> dict[str, int]:
    """Return anonymous, mapped and shared memory of this process, in MiB."""
    found = {}
    with Path("/proc/self/status").open() as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in ("RssAnon", "RssFile", "RssShmem"):
                found[name.removeprefix("Rss").lower()] = round(int(rest.split()[0]) / 1024)
    return found


def steps() -> Iterator[tuple[str, Callable[[dict[str, Any]], Any]]]:
    """Yield what a process does, by its name; each gets what those before it made."""
    yield "interpreter", lambda made: None
    yield "torch", lambda made: __import__("torch")
    yield "transformers with a model's class", lambda made: __import__("transformers").GPT2LMHeadModel
    yield "Trainer", lambda made: __import__("transformers").Trainer
    import torch

    if not torch.cuda.is_available():
        return
    yield "CUDA context", lambda made: torch.ones(1, device="cuda")
    yield "first product (cuBLAS)", lambda made: _product(torch)
    yield "first convolution (cuDNN)", lambda made: _convolution(torch)
    yield "1 GiB on the host", lambda made: made.setdefault("host", torch.ones(MIB, 256))
    yield "1 GiB on the GPU", lambda made: made.setdefault("gpu", made.pop("host").to("cuda"))
    yield "1 GiB pinned", lambda made: made.setdefault("pinned", torch.ones(MIB, 256).pin_memory())
    yield "forward and backward", lambda made: _training(torch)


def _product(torch: Any) -> Any:
    a = torch.ones(1024, 1024, device="cuda")
    return (a @ a).sum().item()


def _convolution(torch: Any) -> Any:
    layer = torch.nn.Conv2d(16, 16, 3, device="cuda")
    return layer(torch.ones(8, 16, 64, 64, device="cuda")).sum().item()


def _training(torch: Any) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1024)).cuda()
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(3):
        layer(torch.ones(64, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


def main() -> None:
    """Print the memory after each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without", action="append", default=[], help="import as if this module were not installed")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    sys.modules.update(dict.fromkeys(asked.without))
    made: dict[str, Any] = {}
    found = {}
    for name, do in steps():
        do(made)
        found[name] = resident()
        if not asked.json:
            print(f"{name:36}", "  ".join(f"{kind} {size:6,}" for kind, size in found[name].items()), flush=True)
    torch = sys.modules["torch"]
    about = {"python": platform.python_version(), "torch": torch.__version__, "processors": os.cpu_count()}
    if torch.cuda.is_available():
        about["gpu"] = torch.cuda.get_device_name()
        about["pinned"] = torch.cuda.host_memory_stats().get("allocated_bytes.current")
    print(json.dumps({**about, "mib": found}) if asked.json else about)


if __name__ == "__main__":
    main()
