"""Interatomic potential: radial basis, scatter by index_add, forces by autograd.grad with a graph, a loss of both."""

import torch
from torch import nn
import torch.nn.functional as F


class Interaction(nn.Module):
    def __init__(self, d=192, rbf=50):
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(rbf, d), nn.Softplus(), nn.Linear(d, d))
        self.lin, self.out = nn.Linear(d, d, bias=False), nn.Sequential(nn.Linear(d, d), nn.Softplus(), nn.Linear(d, d))

    def forward(self, h, rbf, cut, src, dst):
        message = self.lin(h)[src] * self.filter(rbf) * cut
        return h + self.out(torch.zeros_like(h).index_add(0, dst, message))


class SchNet(nn.Module):
    def __init__(self, d=192, rbf=50, layers=5, cutoff=5.0):
        super().__init__()
        self.embed, self.cutoff = nn.Embedding(100, d), cutoff
        self.register_buffer("centres", torch.linspace(0, cutoff, rbf))
        self.layers = nn.ModuleList(Interaction(d, rbf) for _ in range(layers))
        self.read = nn.Sequential(nn.Linear(d, d // 2), nn.Softplus(), nn.Linear(d // 2, 1))

    def forward(self, z, pos, src, dst, batch, graphs):
        r = (pos[src] - pos[dst]).norm(dim=-1)
        rbf = torch.exp(-10 * (r[:, None] - self.centres) ** 2)
        cut = 0.5 * (torch.cos(r * torch.pi / self.cutoff) + 1)[:, None]
        h = self.embed(z)
        for layer in self.layers:
            h = layer(h, rbf, cut, src, dst)
        energy = torch.zeros(graphs, device=h.device).index_add_(0, batch, self.read(h)[:, 0])
        (forces,) = torch.autograd.grad(energy.sum(), pos, create_graph=self.training)
        return energy, -forces


device, graphs, atoms, degree = "cuda", 32, 24, 14
model = SchNet().to(device)
opt = torch.optim.Adam(model.parameters(), 5e-4, amsgrad=True)
ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
n = graphs * atoms
batch = torch.arange(graphs, device=device).repeat_interleave(atoms)
dst = torch.arange(n, device=device).repeat_interleave(degree)
for step in range(5):
    z = torch.randint(1, 20, (n,), device=device)
    pos = torch.randn(n, 3, device=device, requires_grad=True)
    src = torch.randint(0, atoms, (n * degree,), device=device) + dst // atoms * atoms
    energy, forces = model(z, pos, src, dst, batch, graphs)
    loss = F.mse_loss(energy, torch.randn_like(energy)) + 100 * F.l1_loss(forces, torch.randn_like(forces))
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 10.0)
    opt.step()
    ema.update_parameters(model)
    print(step, loss.item())
