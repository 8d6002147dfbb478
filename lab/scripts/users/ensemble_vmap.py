"""Deep ensemble: stacked modules, vmap of functional_call with dropout, gradients by torch.func, repulsive term."""

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap


def make():
    return nn.Sequential(nn.Linear(64, 512), nn.SiLU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.LayerNorm(512), nn.SiLU(), nn.Linear(512, 2))


members = [make().cuda() for _ in range(12)]
params, buffers = stack_module_state(members)
params = {k: v.detach().requires_grad_() for k, v in params.items()}
base = make().to("meta")


def loss_fn(p, b, x, y):
    mean, logvar = functional_call(base, (p, b), (x,)).unbind(-1)
    logvar = logvar.clamp(-8, 8)
    return 0.5 * (logvar + (mean - y).square() * torch.exp(-logvar)).mean()


opt = torch.optim.Adam(list(params.values()), 1e-3)
step_fn = vmap(grad_and_value(loss_fn), in_dims=(0, 0, 0, 0), randomness="different")
for step in range(6):
    x, y = torch.randn(12, 1024, 64, device="cuda"), torch.randn(12, 1024, device="cuda")
    grads, losses = step_fn(params, buffers, x, y)
    with torch.no_grad():
        flat = torch.cat([v.flatten(1) for v in params.values()], 1)
        distance = torch.cdist(flat, flat).square()
        kernel = torch.exp(-distance / distance.median())
        repulsion = (kernel.sum(1, keepdim=True) * flat - kernel @ flat) * 1e-5
        for (k, p), part in zip(params.items(), repulsion.split([v[0].numel() for v in params.values()], 1)):
            p.grad = grads[k] - part.view_as(p)
    opt.step()
    print(step, losses.mean().item())
x = torch.randn(4096, 64, device="cuda")
base.eval()
with torch.no_grad():
    out = vmap(lambda p, b: functional_call(base, (p, b), (x,)), in_dims=(0, 0))(params, buffers)
print(out.std(0).mean().item())
