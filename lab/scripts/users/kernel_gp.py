"""Deep kernel learning: a network under a Gaussian process, exact marginal likelihood by Cholesky, sparse variant."""

import math, torch
from torch import nn

x, y = torch.randn(3000, 32, device="cuda"), torch.randn(3000, device="cuda")
net = nn.Sequential(nn.Linear(32, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 8)).cuda()
log_l, log_s, log_n = (nn.Parameter(torch.zeros((), device="cuda")) for _ in range(3))
inducing = nn.Parameter(x[:300].clone())
opt = torch.optim.Adam([*net.parameters(), log_l, log_s, log_n, inducing], 1e-2)


def kernel(a, b):
    return log_s.exp() * torch.exp(-0.5 * torch.cdist(a / log_l.exp(), b / log_l.exp()).square())


for step in range(5):
    z = net(x)
    k = kernel(z, z) + (log_n.exp() + 1e-3) * torch.eye(len(z), device="cuda")
    chol = torch.linalg.cholesky(k)
    alpha = torch.cholesky_solve(y[:, None], chol)
    exact = 0.5 * (y[None] @ alpha).squeeze() + chol.diagonal().log().sum() + 0.5 * len(y) * math.log(2 * math.pi)
    u = net(inducing)
    kuu, kuf = kernel(u, u) + 1e-3 * torch.eye(len(u), device="cuda"), kernel(u, z)
    lu = torch.linalg.cholesky(kuu)
    a = torch.linalg.solve_triangular(lu, kuf, upper=False) / log_n.exp().sqrt()
    b = torch.eye(len(u), device="cuda") + a @ a.t()
    sparse = torch.logdet(b) + (y.square().sum() - (a @ y).square().sum()) / log_n.exp()
    loss = (exact + sparse) / len(y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
