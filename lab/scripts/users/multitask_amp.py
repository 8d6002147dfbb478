"""One trunk, three heads with uncertainty weights, discriminative learning rates, OneCycle, GradScaler."""

import random
import numpy as np
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

SEED = 7
random.seed(SEED); np.random.seed(SEED); torch.manual_seed(SEED); torch.cuda.manual_seed_all(SEED)
torch.backends.cuda.matmul.allow_tf32 = True


class Scenes(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, i):
        rng = np.random.default_rng(i)
        n = int(rng.integers(1, 6))
        return {"tokens": torch.from_numpy(rng.standard_normal((196, 256), dtype=np.float32)), "kind": i % 20,
                "depth": torch.from_numpy(rng.random(196, dtype=np.float32)), "tags": torch.from_numpy(rng.integers(0, 2, 40)).float(),
                "boxes": torch.rand(n, 4)}  # fmt: skip


def collate(rows):
    out = {k: torch.stack([r[k] for r in rows]) for k in ("tokens", "depth", "tags")}
    out["kind"] = torch.tensor([r["kind"] for r in rows])
    out["boxes"] = nn.utils.rnn.pad_sequence([r["boxes"] for r in rows], batch_first=True, padding_value=-1.0)
    return out


class Net(nn.Module):
    def __init__(self, d=512):
        super().__init__()
        self.inp = nn.Linear(256, d)
        layer = nn.TransformerEncoderLayer(d, 8, 4 * d, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.trunk = nn.TransformerEncoder(layer, 6, norm=nn.LayerNorm(d), enable_nested_tensor=False)
        self.heads = nn.ModuleDict({"kind": nn.Linear(d, 20), "tags": nn.Linear(d, 40), "depth": nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 1))})
        self.log_var = nn.ParameterDict({k: nn.Parameter(torch.zeros(())) for k in self.heads})

    def forward(self, tokens):
        x = self.trunk(self.inp(tokens))
        pooled = x.mean(1)
        return {"kind": self.heads["kind"](pooled), "tags": self.heads["tags"](pooled), "depth": self.heads["depth"](x).squeeze(-1)}


data = Scenes()
sampler = WeightedRandomSampler([1.0 + (i % 20 == 0) for i in range(len(data))], len(data))
loader = DataLoader(data, 48, sampler=sampler, collate_fn=collate, num_workers=2, drop_last=True)
net = Net().to("cuda")
opt = torch.optim.AdamW([
    {"params": net.trunk.parameters(), "lr": 1e-4}, {"params": net.inp.parameters(), "lr": 5e-5},
    {"params": list(net.heads.parameters()) + list(net.log_var.parameters()), "lr": 1e-3, "weight_decay": 0.0},
])  # fmt: skip
sched = torch.optim.lr_scheduler.OneCycleLR(opt, [1e-4, 5e-5, 1e-3], total_steps=len(loader))
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
for step, batch in enumerate(loader):
    batch = {k: v.to("cuda", non_blocking=True) for k, v in batch.items()}
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(batch["tokens"])
        losses = {
            "kind": F.cross_entropy(out["kind"], batch["kind"]),
            "tags": F.binary_cross_entropy_with_logits(out["tags"], batch["tags"], pos_weight=torch.full((40,), 2.0, device="cuda")),
            "depth": F.smooth_l1_loss(out["depth"], batch["depth"]),
        }
        total = sum(torch.exp(-net.log_var[k]) * v + net.log_var[k] for k, v in losses.items())
    opt.zero_grad(set_to_none=True)
    scaler.scale(total).backward()
    scaler.unscale_(opt)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    before = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if scaler.get_scale() >= before:
        sched.step()
    print(step, {k: round(v.item(), 3) for k, v in losses.items()}, round(float(norm), 2))
    if step == 4:
        break
