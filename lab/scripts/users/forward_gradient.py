"""Forward gradients by jvp, then natural steps with Jacobians of a batch (torch.func), without backward()."""

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, jacrev, jvp, vmap

dev = "cuda"
model = nn.Sequential(nn.Linear(784, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 10)).to(dev)
params = {k: v.detach() for k, v in model.named_parameters()}
velocity = {k: torch.zeros_like(v) for k, v in params.items()}


def loss_of(p, x, y):
    return nn.functional.cross_entropy(functional_call(model, p, (x,)), y)


def forward_gradient(p, x, y, directions):
    def along(v):
        return jvp(lambda q: loss_of(q, x, y), (p,), (v,))

    losses, slopes = vmap(along, randomness="different")(directions)
    return {k: (slopes.view(-1, *[1] * (d.dim() - 1)) * d).mean(0) for k, d in directions.items()}, losses.mean()


class Frozen(torch.optim.Optimizer):
    """Gives the loop an optimizer step, so that its gradients land in .grad."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


opt = Frozen(model.parameters(), 1e-3)
named = dict(model.named_parameters())
for step in range(4):
    x, y = torch.randn(512, 784, device=dev), torch.randint(0, 10, (512,), device=dev)
    live = {k: v.detach() for k, v in named.items()}
    directions = {k: torch.randn(8, *v.shape, device=dev) for k, v in live.items()}
    rough, value = forward_gradient(live, x, y, directions)
    exact, _ = grad_and_value(loss_of)(live, x, y)
    rows = vmap(jacrev(lambda p, one: functional_call(model, p, (one.unsqueeze(0),)).squeeze(0)[:2]), (None, 0))(live, x[:16])
    flat = torch.cat([r.flatten(2) for r in rows.values()], -1).flatten(0, 1)
    kernel = flat @ flat.T + 1e-3 * torch.eye(len(flat), device=dev)
    coefficients = torch.linalg.solve(kernel, torch.ones(len(flat), 1, device=dev))
    for k, p in named.items():
        velocity[k].mul_(0.9).add_(rough[k] + exact[k])
        p.grad = velocity[k].clone()
    opt.step()
    opt.zero_grad()
    print(step, value.item(), coefficients.norm().item())
