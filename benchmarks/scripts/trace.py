"""Write every allocation and release of a script on this machine's GPU: ``trace.py --out FILE.json.gz COMMAND``.

For scripts whose measured peak differs from the predicted one, to find the allocation that differs. With ``--trials``
it writes instead what convolutions of two scripts allocate with and without ``cudnn.benchmark``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shlex
from pathlib import Path
from typing import Any

CONVOLUTIONS = {
    "dcgan, discriminator 1": (128, 3, 64, 64, 4, 2, 1),
    "dcgan, discriminator 2": (128, 64, 32, 128, 4, 2, 1),
    "dcgan, discriminator 3": (128, 128, 16, 256, 4, 2, 1),
    "dcgan, discriminator 4": (128, 256, 8, 512, 4, 2, 1),
    "dcgan, discriminator 5": (128, 512, 4, 1, 4, 1, 0),
    "dcgan, generator 1": (128, 512, 4, 100, 4, 1, 0),
    "resnet, 3 x 3": (64, 64, 56, 64, 3, 1, 1),
    "resnet, 1 x 1": (64, 256, 56, 64, 1, 1, 0),
    "resnet, 7 x 7": (64, 3, 224, 64, 7, 2, 3),
}
"""Images, channels, height and width, channels of the output, size of the kernel, stride, padding."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", action="store_true")
    parser.add_argument("command", nargs="?", default="")
    given = parser.parse_args()
    found = trials() if given.trials else traced(given.command)
    with gzip.open(given.out, "wt") as file:
        json.dump(found, file)
    os._exit(0)  # without waiting for workers of a loader that was left in the middle


def events() -> list[tuple[str, int]]:
    """Return what PyTorch recorded since it began: kinds of events and their bytes."""
    import torch

    return [(one["action"], one["size"]) for one in torch.cuda.memory._snapshot()["device_traces"][0]]


def begin() -> None:
    import torch

    torch.cuda.memory._record_memory_history(None)
    torch.cuda.memory._record_memory_history(max_entries=2_000_000, context=None, stacks="python")


def traced(command: str) -> dict[str, Any]:
    """Run a script for three steps."""
    from trainatomy.integrations.measured_script import measure_here
    from trainatomy.scripts.command import read_command
    from trainatomy.scripts.job import Job

    begin()
    found = measure_here(Job(read_command(shlex.split(command)), ("h200",)))
    return {"peak_allocated_bytes": found.peak_allocated_bytes, "message": found.message, "events": events()}


def trials() -> dict[str, Any]:
    """Run each convolution three times, forward and backward."""
    import torch

    found: dict[str, Any] = {}
    for benchmark in (False, True):
        torch.backends.cudnn.benchmark = benchmark
        for name, (images, channels, size, out, kernel, stride, padding) in CONVOLUTIONS.items():
            layer = torch.nn.Conv2d(channels, out, kernel, stride, padding, bias=False, device="cuda")
            data = torch.randn(images, channels, size, size, device="cuda", requires_grad=True)
            for run in range(3):
                begin()
                result = layer(data)
                forward = events()
                result.sum().backward()
                torch.cuda.synchronize()
                found[f"{name}, benchmark {benchmark}, run {run}"] = {"forward": forward, "all": events()}
                layer.weight.grad = data.grad = None
    return found


if __name__ == "__main__":
    main()
