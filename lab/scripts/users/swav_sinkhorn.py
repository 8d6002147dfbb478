"""SwAV: multi-crop batches, prototypes, Sinkhorn in no_grad, a queue, LARS written by hand, cosine warm-up."""

import math, torch
from torch import nn
import torch.nn.functional as F


class LARS(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9, weight_decay=1e-6, trust=0.001):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = p.grad
                if p.ndim > 1:
                    g = g.add(p, alpha=group["weight_decay"])
                    pn, gn = torch.norm(p), torch.norm(g)
                    q = torch.where(pn > 0, torch.where(gn > 0, group["trust"] * pn / gn, torch.ones_like(pn)), torch.ones_like(pn))
                    g = g.mul(q)
                state = self.state[p]
                if "mu" not in state:
                    state["mu"] = torch.zeros_like(p)
                state["mu"].mul_(group["momentum"]).add_(g)
                p.add_(state["mu"], alpha=-group["lr"])


class Block(nn.Module):
    def __init__(self, i, o, s):
        super().__init__()
        self.a, self.b = nn.Conv2d(i, o, 3, s, 1, bias=False), nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.na, self.nb = nn.BatchNorm2d(o), nn.BatchNorm2d(o)
        self.cut = nn.Conv2d(i, o, 1, s, bias=False) if i != o or s != 1 else nn.Identity()

    def forward(self, x):
        return F.relu(self.nb(self.b(F.relu(self.na(self.a(x))))) + self.cut(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), Block(64, 64, 1), Block(64, 128, 2), Block(128, 256, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.project = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 128))
        self.prototypes = nn.Linear(128, 1000, bias=False)

    def forward(self, crops):
        sizes = torch.tensor([c.shape[-1] for c in crops])
        ends = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
        start, out = 0, []
        for end in ends:
            out.append(self.body(torch.cat(crops[start:end])))
            start = end
        z = F.normalize(self.project(torch.cat(out)))
        return z, self.prototypes(z)


@torch.no_grad()
def sinkhorn(scores, eps=0.05, rounds=3):
    q = torch.exp(scores / eps).t()
    q /= q.sum()
    for _ in range(rounds):
        q /= q.sum(1, keepdim=True) * q.shape[0]
        q /= q.sum(0, keepdim=True) * q.shape[1]
    return (q * q.shape[1]).t()


B = 64
model = Net().cuda()
opt = LARS(model.parameters(), 0.6)
queue = F.normalize(torch.randn(2, 512, 128, device="cuda"), dim=-1)
for step in range(6):
    for group in opt.param_groups:
        group["lr"] = 0.6 * 0.5 * (1 + math.cos(math.pi * step / 6))
    with torch.no_grad():
        model.prototypes.weight.copy_(F.normalize(model.prototypes.weight))
    crops = [torch.randn(B, 3, 96, 96, device="cuda") for _ in range(2)] + [torch.randn(B, 3, 48, 48, device="cuda") for _ in range(4)]
    with torch.autocast("cuda", torch.bfloat16):
        z, scores = model(crops)
    z, loss = z.detach().float(), 0.0
    for n in range(2):
        with torch.no_grad():
            own = scores[B * n : B * (n + 1)].float()
            q = sinkhorn(torch.cat([queue[n] @ model.prototypes.weight.t(), own]))[-B:]
            queue[n, B:] = queue[n, :-B].clone()
            queue[n, :B] = z[B * n : B * (n + 1)]
        for m in [v for v in range(6) if v != n]:
            loss = loss - (q * F.log_softmax(scores[B * m : B * (m + 1)].float() / 0.1, 1)).sum(1).mean()
    opt.zero_grad()
    loss.backward()
    if step < 2:
        model.prototypes.weight.grad = None
    opt.step()
    print(step, loss.item())
