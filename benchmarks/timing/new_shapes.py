"""Measure the first call of an operator with a new shape: ``python benchmarks/timing/new_shapes.py --out FILE``.

Trainings whose batches differ in length meet new shapes at every new length, and libraries look for a kernel then.
Each line of the file is an operator with a shape that it had not seen: seconds on the host of the first call and of
the next two, and the same until the GPU has finished.  Shapes are drawn by a seed; others load the kernels before.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

LENGTHS = (24, 1024)
WIDTHS = ((768, 768), (768, 2304), (3072, 768), (2048, 8192), (768, 50257))  # GPT-2 and Llama
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WARM_UP = 4


def operators(device: str) -> dict[str, Callable[[int], Callable[[], Any]]]:
    """Return makers of calls by name; a maker takes a length that it has not been given yet."""
    made: dict[str, Callable[[int], Callable[[], Any]]] = {}
    for name, dtype in DTYPES.items():
        new: dict[str, Any] = {"device": device, "dtype": dtype}
        for inputs, outputs in WIDTHS:
            weight, bias = torch.randn(outputs, inputs, **new), torch.randn(outputs, **new)
            ending = f"{name} {inputs}x{outputs}"

            def linear(n: int, w: Any = weight, b: Any = bias, k: int = inputs, new: Any = new) -> Callable[[], Any]:
                x = torch.randn(8 * n, k, **new)
                return lambda: torch.addmm(b, x, w.t())

            def matmul(n: int, w: Any = weight, k: int = inputs, new: Any = new) -> Callable[[], Any]:
                x = torch.randn(8 * n, k, **new)
                return lambda: torch.mm(x, w.t())

            def of_input(n: int, w: Any = weight, k: int = outputs, new: Any = new) -> Callable[[], Any]:
                x = torch.randn(8 * n, k, **new)
                return lambda: torch.mm(x, w)

            def of_weight(n: int, k: int = inputs, m: int = outputs, new: Any = new) -> Callable[[], Any]:
                x, g = torch.randn(8 * n, k, **new), torch.randn(8 * n, m, **new)
                return lambda: torch.mm(g.t(), x)

            made[f"addmm {ending}"], made[f"mm {ending}"] = linear, matmul
            made[f"input gradient {ending}"], made[f"weight gradient {ending}"] = of_input, of_weight

        def batched(n: int, new: Any = new) -> Callable[[], Any]:
            x, y = torch.randn(96, n, 64, **new), torch.randn(96, 64, n, **new)
            return lambda: torch.bmm(x, y)

        def attention(n: int, new: Any = new) -> Callable[[], Any]:
            x = torch.randn(8, 12, n, 64, **new)
            return lambda: functional.scaled_dot_product_attention(x, x, x, is_causal=True)

        def trained(n: int, new: Any = new) -> Callable[[], Any]:
            x = torch.randn(8, 12, n, 64, requires_grad=True, **new)
            return lambda: functional.scaled_dot_product_attention(x, x, x, is_causal=True)

        def attention_backward(n: int, new: Any = new) -> Callable[[], Any]:
            x = torch.randn(8, 12, n, 64, requires_grad=True, **new)
            y = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
            return lambda: torch.autograd.grad(y, x, y, retain_graph=True)

        def norm(n: int, new: Any = new) -> Callable[[], Any]:
            x = torch.randn(8 * n, 768, **new)
            return lambda: functional.layer_norm(x, (768,))

        def convolution(n: int, new: Any = new) -> Callable[[], Any]:
            x, w = torch.randn(8, 64, n, 32, **new), torch.randn(64, 64, 3, 3, **new)
            return lambda: functional.conv2d(x, w, padding=1)

        made |= {f"bmm {name}": batched, f"attention {name}": attention, f"layer_norm {name}": norm}
        made |= {f"attention with gradients {name}": trained, f"attention backward {name}": attention_backward}
        made[f"conv2d {name}"] = convolution
    return made


def seconds(call: Callable[[], Any], wait: Callable[[], None]) -> tuple[float, float]:
    """Return the time until a call returns, and until the GPU has finished it."""
    wait()
    began = time.perf_counter()
    call()
    returned = time.perf_counter()
    wait()
    return returned - began, time.perf_counter() - began


def measure(lengths: Iterator[int], device: str, deadline: float, chosen: str = "") -> Iterator[dict[str, Any]]:
    """Yield the first and the next calls of operators in turns, until the time is up.

    Args:
        lengths: Lengths that have not occurred.
        device: Where to run.
        deadline: Monotonic time after which nothing starts.
        chosen: What names of operators begin with.
    """
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    made = {name: maker for name, maker in operators(device).items() if name.startswith(chosen)}
    for number, length in enumerate(lengths):
        for name, maker in made.items():
            if time.monotonic() > deadline:
                return
            call = maker(length)
            times = [seconds(call, wait) for _ in range(3)]
            if number >= WARM_UP:
                host, whole = zip(*times, strict=True)
                yield {"operator": name, "length": length, "host_seconds": host, "seconds": whole}


def main() -> int:
    """Measure until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--time-limit", type=float, default=25)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--operators", default="", help="what their names begin with")
    options = parser.parse_args()
    deadline = time.monotonic() + options.time_limit
    lengths = iter(random.Random(2026).sample(range(*LENGTHS), 60))
    about: dict[str, Any] = {"torch": torch.__version__}
    if options.device == "cuda":
        about |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    with options.out.open("w", encoding="utf-8") as file:
        file.write(json.dumps(about) + "\n")
        for line in measure(lengths, options.device, deadline, options.operators):
            file.write(json.dumps(line) + "\n")
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
