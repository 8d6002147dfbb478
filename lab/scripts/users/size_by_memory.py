"""Choose the batch size from the free memory, as tutorials do, and log what nvidia-smi and NVML say."""

import json, logging, subprocess, sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch, torch.nn as nn

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="[%(levelname)s] %(message)s")
log = logging.getLogger("train")


@dataclass
class Config:
    width: int = 2048
    depth: int = 8
    lr: float = 1e-3
    budget_gb: float = 2.0
    betas: list = field(default_factory=lambda: [0.9, 0.95])


def gpu_line():
    try:
        out = subprocess.check_output(
            ["nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"], text=True
        )
        name, total, used = (one.strip() for one in out.strip().splitlines()[0].split(","))
        return f"{name}: {int(used)} of {int(total)} MiB"
    except (OSError, subprocess.CalledProcessError) as error:
        return f"nvidia-smi failed: {error}"


def nvml_line():
    try:
        import pynvml

        pynvml.nvmlInit()
        info = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
        return f"NVML: {info.used >> 20} of {info.total >> 20} MiB"
    except Exception as error:
        return f"no NVML: {error}"


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n, self.a, self.b = nn.RMSNorm(d), nn.Linear(d, 4 * d, bias=False), nn.Linear(2 * d, d, bias=False)

    def forward(self, x):
        gate, up = self.a(self.n(x)).chunk(2, -1)
        return x + self.b(nn.functional.silu(gate) * up)


cfg = Config()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    props = torch.cuda.get_device_properties(device)
    log.info("%s, %d multiprocessors, %.1f GB", props.name, props.multi_processor_count, props.total_memory / 1e9)
    log.info("bf16: %s", torch.cuda.is_bf16_supported())
    torch.set_float32_matmul_precision("high")
model = nn.Sequential(*[Block(cfg.width) for _ in range(cfg.depth)], nn.Linear(cfg.width, 1000)).to(device)
opt = torch.optim.NAdam(model.parameters(), lr=cfg.lr, betas=tuple(cfg.betas), decoupled_weight_decay=True)
free, total = torch.cuda.mem_get_info() if device.type == "cuda" else (2**33, 2**33)
per_sample = cfg.width * cfg.depth * 4 * 12
batch = min(4096, 1 << (int(min(free, cfg.budget_gb * 2**30) // per_sample).bit_length() - 1))
log.info("free %.1f GiB: batch size %d", free / 2**30, batch)
Path("config.json").write_text(json.dumps(asdict(cfg) | {"batch": batch}))
warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=3)
later = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 5)
sched = torch.optim.lr_scheduler.SequentialLR(opt, [warm, later], [3])
for step in range(8):
    x, y = torch.randn(batch, cfg.width, device=device), torch.randint(0, 1000, (batch,), device=device)
    loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    sched.step()
    if step % 2 == 0:
        log.info("step %d loss %.4f | %s | %s", step, loss.item(), gpu_line(), nvml_line())
        log.info("allocated %.1f MiB, peak %.1f MiB", torch.cuda.memory_allocated() / 2**20, torch.cuda.max_memory_allocated() / 2**20)
