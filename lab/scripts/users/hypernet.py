"""Hypernetwork: a transformer writes the weights of an implicit network for each image, functional_call under vmap."""

import torch
from torch import nn
from torch.func import functional_call, vmap
import torch.nn.functional as F


class Siren(nn.Module):
    def __init__(self, h=48):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, h), nn.Linear(h, h), nn.Linear(h, 3)

    def forward(self, x):
        return self.c(torch.sin(30 * self.b(torch.sin(30 * self.a(x)))))


class Hyper(nn.Module):
    def __init__(self, target, d=384, layers=4):
        super().__init__()
        self.shapes = {k: v.shape for k, v in target.named_parameters()}
        self.patch = nn.Conv2d(3, d, 8, 8)
        self.tokens = nn.Parameter(torch.randn(len(self.shapes), d) * 0.02)
        layer = nn.TransformerEncoderLayer(d, 6, 4 * d, batch_first=True, norm_first=True, activation="gelu")
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.heads = nn.ModuleList(nn.Linear(d, s.numel()) for s in self.shapes.values())
        self.base = nn.ParameterList([nn.Parameter(v.detach().clone()) for v in target.parameters()])

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = self.body(torch.cat([self.tokens.expand(len(x), -1, -1), x], 1))[:, : len(self.shapes)]
        return {k: b + 0.01 * h(x[:, n]).unflatten(-1, s) for n, ((k, s), h, b) in enumerate(zip(self.shapes.items(), self.heads, self.base))}


target = Siren().cuda()
hyper = Hyper(target).cuda()
opt = torch.optim.AdamW(hyper.parameters(), 1e-4, foreach=False)
grid = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, 64, device="cuda")] * 2, indexing="ij"), -1).view(-1, 2)
for step in range(5):
    images = torch.rand(20, 3, 64, 64, device="cuda")
    weights = hyper(images)
    out = vmap(lambda w: functional_call(target, w, (grid,)))(weights)
    loss = F.mse_loss(out, images.flatten(2).transpose(1, 2))
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
