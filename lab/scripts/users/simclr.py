"""SimCLR on random images: two augmented views, NT-Xent, LARS, mixed precision."""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


@dataclass
class Config:
    batch_size: int = 128
    epochs: int = 2
    temperature: float = 0.5
    lr: float = 0.3
    width: int = 64


class TwoViews(Dataset):
    def __init__(self, n=512):
        self.images = torch.randint(0, 256, (n, 3, 40, 40), dtype=torch.uint8)

    def __len__(self):
        return len(self.images)

    def augment(self, x):
        i, j = torch.randint(0, 8, (2,)).tolist()
        x = x[:, i : i + 32, j : j + 32].float().div(255)
        if torch.rand(1).item() < 0.5:
            x = x.flip(-1)
        return (x - 0.5) / 0.25

    def __getitem__(self, i):
        return self.augment(self.images[i]), self.augment(self.images[i])


class BasicBlock(nn.Module):
    def __init__(self, i, o, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(i, o, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(o)
        self.conv2 = nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(o)
        self.down = (
            nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))
            if stride > 1 or i != o
            else nn.Identity()
        )

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.down(x), inplace=True)


class Net(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, w, 3, 1, 1, bias=False), nn.BatchNorm2d(w), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(
            *[BasicBlock(w * a, w * b, s) for a, b, s in [(1, 1, 1), (1, 2, 2), (2, 4, 2), (4, 8, 2)]]
        )
        self.head = nn.Sequential(nn.Linear(8 * w, 512), nn.ReLU(), nn.Linear(512, 128))

    def forward(self, x):
        return F.normalize(self.head(self.layers(self.stem(x)).mean((2, 3))), dim=-1)


class LARS(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9, weight_decay=1e-6, eta=1e-3):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, eta=eta))

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                dp = p.grad
                if dp is None:
                    continue
                if p.ndim > 1:
                    dp = dp.add(p, alpha=g["weight_decay"])
                    pn, un = torch.norm(p), torch.norm(dp)
                    one = torch.ones_like(pn)
                    q = torch.where(pn > 0.0, torch.where(un > 0, g["eta"] * pn / un, one), one)
                    dp = dp.mul(q)
                state = self.state[p]
                if "mu" not in state:
                    state["mu"] = torch.zeros_like(p)
                mu = state["mu"]
                mu.mul_(g["momentum"]).add_(dp)
                p.add_(mu, alpha=-g["lr"])


def nt_xent(z1, z2, t):
    z = torch.cat([z1, z2])
    sim = z @ z.T / t
    sim.fill_diagonal_(-1e4)
    n = len(z1)
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(z.device)
    return F.cross_entropy(sim.float(), target)


def main():
    cfg = Config()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Net(cfg.width).to(device)
    loader = DataLoader(TwoViews(), cfg.batch_size, shuffle=True, num_workers=2, drop_last=True, pin_memory=True)
    optimizer = LARS(model.parameters(), cfg.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 0.5 * (1 + math.cos(math.pi * e / cfg.epochs)))
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(cfg.epochs):
        total = 0.0
        for a, b in loader:
            a, b = a.to(device, non_blocking=True), b.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nt_xent(model(a), model(b), cfg.temperature)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.item() * len(a)
        scheduler.step()
        print(f"epoch {epoch} loss {total / len(loader.dataset):.4f}")


if __name__ == "__main__":
    main()
