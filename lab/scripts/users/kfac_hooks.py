"""K-FAC: hooks collect activations and gradients, running factors, eigendecompositions now and then, preconditioning."""

import torch
from torch import nn
import torch.nn.functional as F


class KFAC(torch.optim.Optimizer):
    def __init__(self, model, lr=0.05, damping=1e-2, every=2):
        self.layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        super().__init__(model.parameters(), {"lr": lr})
        self.damping, self.every, self.steps = damping, every, 0
        self.a, self.g, self.eig = {}, {}, {}
        for m in self.layers:
            m.register_forward_pre_hook(self.save_input)
            m.register_full_backward_hook(self.save_gradient)

    @torch.no_grad()
    def save_input(self, module, args):
        if module.training:
            x = args[0].flatten(0, -2)
            x = torch.cat([x, x.new_ones(len(x), 1)], 1)
            new = x.t() @ x / len(x)
            self.a[module] = new if module not in self.a else self.a[module].lerp(new, 0.05)

    @torch.no_grad()
    def save_gradient(self, module, grad_in, grad_out):
        g = grad_out[0].flatten(0, -2)
        new = g.t() @ g * len(g)
        self.g[module] = new if module not in self.g else self.g[module].lerp(new, 0.05)

    @torch.no_grad()
    def step(self):
        for m in self.layers:
            if self.steps % self.every == 0:
                self.eig[m] = (*torch.linalg.eigh(self.a[m]), *torch.linalg.eigh(self.g[m]))
            da, qa, dg, qg = self.eig[m]
            grad = torch.cat([m.weight.grad, m.bias.grad[:, None]], 1)
            v = qg.t() @ grad @ qa / (dg[:, None] * da[None] + self.damping)
            v = qg @ v @ qa.t()
            m.weight.sub_(v[:, :-1], alpha=self.param_groups[0]["lr"])
            m.bias.sub_(v[:, -1], alpha=self.param_groups[0]["lr"])
        self.steps += 1


model = nn.Sequential(nn.Flatten(), nn.Linear(784, 1000), nn.Tanh(), nn.Linear(1000, 500), nn.Tanh(), nn.Linear(500, 10)).cuda()
opt = KFAC(model)
for step in range(5):
    x, y = torch.randn(2048, 28, 28, device="cuda"), torch.randint(10, (2048,), device="cuda")
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
