"""Neural ODE with the adjoint method as an autograd function, RK4."""

import torch, torch.nn as nn


class Dynamics(nn.Module):
    def __init__(self, d=256):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(d, 1024), nn.Softplus(), nn.Linear(1024, 1024), nn.Softplus(), nn.Linear(1024, d)
        )
        self.nfe = 0

    def forward(self, t, y):
        self.nfe += 1
        return self.net(y) * torch.cos(t)


def rk4(f, t, dt, y):
    k1 = f(t, y)
    k2 = f(t + dt / 2, y + dt / 2 * k1)
    k3 = f(t + dt / 2, y + dt / 2 * k2)
    k4 = f(t + dt, y + dt * k3)
    return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


class OdeintAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, func, y0, ts, *params):
        ctx.func = func
        ys = [y0]
        with torch.no_grad():
            for a, b in zip(ts[:-1], ts[1:]):
                ys.append(rk4(func, a, b - a, ys[-1]))
        states = torch.stack(ys)
        ctx.save_for_backward(ts, states, *params)
        return states

    @staticmethod
    def backward(ctx, grad):
        ts, states, *params = ctx.saved_tensors
        func = ctx.func
        adj, adj_p = grad[-1], [torch.zeros_like(p) for p in params]
        for i in range(len(ts) - 1, 0, -1):
            dt = ts[i - 1] - ts[i]
            with torch.enable_grad():
                y = states[i].detach().requires_grad_(True)
                f = func(ts[i], y)
                vjp_y, *vjp_p = torch.autograd.grad(f, (y, *params), -adj, allow_unused=True)
            adj = adj + dt * vjp_y + grad[i - 1]
            adj_p = [a + dt * v for a, v in zip(adj_p, vjp_p)]
        return (None, adj, None, *adj_p)


device = "cuda"
func = Dynamics().to(device)
head = nn.Linear(256, 10).to(device)
opt = torch.optim.Adam([*func.parameters(), *head.parameters()], lr=1e-3)
ts = torch.linspace(0, 1, 9, device=device)
for step in range(6):
    y0, label = torch.randn(2048, 256, device=device), torch.randint(0, 10, (2048,), device=device)
    traj = OdeintAdjoint.apply(func, y0, ts, *func.parameters())
    loss = nn.functional.cross_entropy(head(traj[-1]), label) + 1e-3 * traj.pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item(), func.nfe)
