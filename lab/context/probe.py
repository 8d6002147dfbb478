"""Memory that a process holds outside PyTorch's allocator, and what makes it grow.

Run ``python lab/context/probe.py --out FILE``.  Each sequence runs in a fresh process on an otherwise idle GPU.
After every stage: NVML's used memory minus that of the idle GPU and minus PyTorch's reserved memory.  ``h200.json`` and
``h100-sxm.json`` hold the results of two GPUs; they were written before NVML's other figures (``nvml``) were kept.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAGES: dict[str, str] = {
    "tensor": "torch.ones((1, 1)).to('cuda')",
    "elementwise": "(torch.ones(1000, device='cuda') + 1).sum()",
    "mm fp32": "matmul(torch.float32)",
    "mm tf32": "tf32()",
    "mm bf16": "matmul(torch.bfloat16)",
    "mm fp16": "matmul(torch.float16)",
    "backward mm fp32": "backward(torch.float32)",
    "backward mm bf16": "backward(torch.bfloat16)",
    "addmm fp32": "addmm(torch.float32)",
    "addmm bf16": "addmm(torch.bfloat16)",
    "backward addmm bf16": "backward_addmm(torch.bfloat16)",
    "bmm fp32": "bmm(torch.float32)",
    "bmm bf16": "bmm(torch.bfloat16)",
    "efficient": "attention(torch.float32, 'EFFICIENT_ATTENTION')",
    "efficient bf16": "attention(torch.bfloat16, 'EFFICIENT_ATTENTION')",
    "flash": "attention(torch.bfloat16, 'FLASH_ATTENTION')",
    "cudnn attention": "attention(torch.bfloat16, 'CUDNN_ATTENTION')",
    "conv fp32": "conv(torch.float32)",
    "conv bf16": "conv(torch.bfloat16)",
    "conv inference": "conv_inference(torch.float32)",
    "batch norm": "torch.nn.BatchNorm2d(8).cuda()(torch.randn(4, 8, 16, 16, device='cuda'))",
    "layer norm": (
        "torch.nn.LayerNorm(64).cuda()(torch.randn(8, 64, device='cuda', requires_grad=True)).sum().backward()"
    ),
    "sort": "torch.randint(0, 9, (20000,), device='cuda').sort()",
    "embedding": "embedding()",
    "cross entropy": (
        "F.cross_entropy(torch.randn(64, 1000, device='cuda', requires_grad=True), "
        "torch.zeros(64, dtype=torch.long, device='cuda')).backward()"
    ),
    "fused adamw": "adamw(True)",
    "foreach adamw": "adamw(False)",
    "grouped mm": "grouped()",
    "lstm": "torch.nn.LSTM(64, 64).cuda()(torch.randn(5, 4, 64, device='cuda'))[0].sum().backward()",
    "dropout": "F.dropout(torch.randn(1000, device='cuda'))",
    "linalg": "torch.linalg.qr(torch.randn(64, 64, device='cuda'))",
}
SEQUENCES = {
    "fp32": [
        "tensor", "elementwise", "mm fp32", "addmm fp32", "bmm fp32", "efficient", "backward mm fp32", "layer norm",
        "embedding", "cross entropy", "dropout", "fused adamw", "foreach adamw", "sort", "mm tf32", "mm bf16",
        "backward mm bf16", "cudnn attention", "conv fp32", "conv bf16", "batch norm", "grouped mm", "lstm", "linalg",
    ],
    "bf16": [
        "tensor", "mm bf16", "addmm bf16", "bmm bf16", "backward mm bf16", "backward addmm bf16", "flash",
        "efficient bf16", "cudnn attention", "conv bf16", "grouped mm", "mm fp32", "backward mm fp32", "mm fp16",
        "lstm",
    ],
    "inference": ["tensor", "mm fp32", "efficient", "conv inference", "mm bf16", "cudnn attention"],
    "inference bf16": ["tensor", "mm bf16", "cudnn attention"],
    "images": ["tensor", "conv fp32", "batch norm", "mm fp32", "backward mm fp32", "conv bf16"],
    "backward first": ["tensor", "elementwise", "layer norm", "cross entropy", "backward mm fp32"],
    "backward bf16 lt": ["tensor", "addmm bf16", "backward addmm bf16", "fused adamw"],
    "adamw": ["tensor", "fused adamw", "foreach adamw", "embedding", "sort", "dropout"],
}  # fmt: skip
PRELUDE = """
import torch, torch.nn.functional as F
from torch.nn.attention import sdpa_kernel, SDPBackend
def matmul(d): return torch.randn(512, 512, device="cuda").to(d) @ torch.randn(512, 512, device="cuda").to(d)
def tf32():
    torch.backends.cuda.matmul.allow_tf32 = True; matmul(torch.float32); torch.backends.cuda.matmul.allow_tf32 = False
def backward(d):
    w = torch.randn(512, 512, device="cuda").to(d).requires_grad_()
    (torch.randn(64, 512, device="cuda").to(d) @ w).sum().backward()
def linear(d): return torch.nn.Linear(512, 512).cuda().to(d)(torch.randn(64, 512, device="cuda").to(d))
def addmm(d):
    with torch.no_grad(): linear(d)
def backward_addmm(d): linear(d).sum().backward()
def bmm(d): return torch.bmm(torch.randn(8, 64, 64, device="cuda").to(d), torch.randn(8, 64, 64, device="cuda").to(d))
def attention(d, kind):
    q = torch.randn(2, 4, 128, 64, device="cuda").to(d).requires_grad_()
    with sdpa_kernel(getattr(SDPBackend, kind)): F.scaled_dot_product_attention(q, q, q).sum().backward()
def conv(d): torch.nn.Conv2d(16, 16, 3).cuda().to(d)(torch.randn(4, 16, 32, 32, device="cuda").to(d)).sum().backward()
def conv_inference(d):
    with torch.no_grad(): torch.nn.Conv2d(16, 16, 3).cuda().to(d)(torch.randn(4, 16, 32, 32, device="cuda").to(d))
def embedding():
    table = torch.randn(99, 64, device="cuda", requires_grad=True)
    F.embedding(torch.randint(0, 99, (8, 512), device="cuda"), table).sum().backward()
def adamw(fused):
    p = torch.nn.Parameter(torch.randn(1000, device="cuda")); p.grad = torch.ones_like(p)
    torch.nn.utils.clip_grad_norm_([p], 1.0); torch.optim.AdamW([p], fused=fused, foreach=not fused).step()
def grouped():
    a = torch.randn(64, 128, device="cuda").bfloat16().requires_grad_()
    b = torch.randn(4, 128, 256, device="cuda").bfloat16().requires_grad_()
    F.grouped_mm(a, b, offs=torch.tensor([16, 32, 48, 64], dtype=torch.int32, device="cuda")).sum().backward()
"""


def child(sequence: str) -> None:
    """Run one sequence and print a JSON object: environment, idle GPU, each stage, and NVML's figures at the end."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    used: Callable[[], int] = lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used  # noqa: E731
    idle, idle_bytes = figures(pynvml, handle), used()
    space: dict[str, object] = {}
    exec(PRELUDE, space)
    import torch

    found: list[tuple[str, object]] = []
    for stage in SEQUENCES[sequence]:
        try:
            exec(STAGES[stage], space)
            torch.cuda.synchronize()
            found.append((stage, used() - idle_bytes - torch.cuda.memory_reserved()))
        except Exception as error:
            found.append((stage, f"{type(error).__name__}: {str(error)[:100]}"))
    environment = {
        "gpu": torch.cuda.get_device_name(),
        "driver": str(pynvml.nvmlSystemGetDriverVersion()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": str(datetime.date.today()),
    }
    end = figures(pynvml, handle) | {"torch_reserved": torch.cuda.memory_reserved()}
    print("RESULT" + json.dumps({"environment": environment, "idle": idle, "end": end, "stages": found}))


def figures(pynvml: Any, handle: Any) -> dict[str, int | None]:
    """Return both forms of NVML's memory figures, and the one process that computes on the GPU, bytes."""
    apart = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return {
        "used": pynvml.nvmlDeviceGetMemoryInfo(handle).used,
        "used_apart": apart.used,
        "driver_reserved": apart.reserved,
        "process": processes[0].usedGpuMemory if len(processes) == 1 else None,
    }


def main() -> None:
    """Run all sequences in fresh processes, one after the other, and write one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    results = {}
    for name in SEQUENCES:
        command = [sys.executable, __file__, "--out", str(arguments.out), "--child", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
        if line is None:
            sys.exit(f"{name}: {done.stderr[-2000:]}")
        results[name] = json.loads(line[6:])
    first = next(iter(results.values()))
    nvml = {name: {"idle": result["idle"], "end": result["end"]} for name, result in results.items()}
    document = {
        "environment": first["environment"],
        "idle_bytes": first["idle"]["used"],
        "sequences": {name: result["stages"] for name, result in results.items()},
        "nvml": nvml,
    }
    arguments.out.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
