"""Two tasks with conflicting gradients (PCGrad) and sharpness-aware minimisation."""

import random
import torch, torch.nn as nn, torch.nn.functional as F


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.norm(
            torch.stack([p.grad.norm(p=2) for g in self.param_groups for p in g["params"] if p.grad is not None]), p=2
        )
        for g in self.param_groups:
            scale = g["rho"] / (norm + 1e-12)
            for p in g["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()


class MultiTask(nn.Module):
    def __init__(self, d=1024):
        super().__init__()
        self.shared = nn.Sequential(
            nn.Linear(512, d), nn.BatchNorm1d(d), nn.ReLU(), nn.Linear(d, d), nn.BatchNorm1d(d), nn.ReLU()
        )
        self.a, self.b = nn.Linear(d, 100), nn.Linear(d, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        h = self.shared(x)
        return self.a(h), self.b(h).squeeze(-1)


def pcgrad(losses, params):
    grads = [torch.cat([g.flatten() for g in torch.autograd.grad(l, params, retain_graph=True)]) for l in losses]
    out = [g.clone() for g in grads]
    for i in range(len(grads)):
        for j in random.sample(range(len(grads)), len(grads)):
            if i != j:
                dot = torch.dot(out[i], grads[j])
                if dot < 0:
                    out[i] -= dot / grads[j].norm() ** 2 * grads[j]
    return torch.stack(out).mean(0)


model = MultiTask().cuda()
opt = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
shared = list(model.shared.parameters())
for step in range(8):
    x, ya, yb = torch.randn(4096, 512).cuda(), torch.randint(0, 100, (4096,)).cuda(), torch.randn(4096).cuda()
    for second in (False, True):
        a, b = model(x)
        losses = [F.cross_entropy(a, ya), F.mse_loss(b, yb)]
        merged = pcgrad(losses, shared)
        total = sum(torch.exp(-s) * l + s for s, l in zip(model.log_vars, losses))
        total.backward()
        i = 0
        for p in shared:
            p.grad = merged[i : i + p.numel()].view_as(p)
            i += p.numel()
        (opt.second_step if second else opt.first_step)(zero_grad=True)
    print(step, total.item())
