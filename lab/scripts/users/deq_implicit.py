"""Deep equilibrium transformer: fixed point without a graph, implicit gradient by a hook, Anderson acceleration."""

import torch
from torch import nn, autograd
import torch.nn.functional as F


class Cell(nn.Module):
    def __init__(self, d=384, heads=6):
        super().__init__()
        self.heads, self.qkv, self.o = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down, self.n1, self.n2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, z, x):
        b, t, d = z.shape
        q, k, v = self.qkv(z + x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        z = self.n1(z + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)))
        return self.n2(z + self.down(F.gelu(self.up(z))))


def anderson(f, x0, m=5, lam=1e-4, iters=12):
    b, size = x0.shape[0], x0[0].numel()
    X, R = (torch.zeros(b, m, size, dtype=x0.dtype, device=x0.device) for _ in range(2))
    X[:, 0], R[:, 0] = x0.reshape(b, -1), f(x0).reshape(b, -1)
    X[:, 1], R[:, 1] = R[:, 0], f(R[:, 0].view_as(x0)).reshape(b, -1)
    H = torch.zeros(b, m + 1, m + 1, device=x0.device)
    H[:, 0, 1:] = H[:, 1:, 0] = 1
    y = torch.zeros(b, m + 1, 1, device=x0.device)
    y[:, 0] = 1
    for k in range(2, iters):
        n = min(k, m)
        G = R[:, :n] - X[:, :n]
        H[:, 1 : n + 1, 1 : n + 1] = torch.bmm(G, G.transpose(1, 2)) + lam * torch.eye(n, device=x0.device)[None]
        alpha = torch.linalg.solve(H[:, : n + 1, : n + 1], y[:, : n + 1])[:, 1 : n + 1, 0]
        X[:, k % m] = (alpha[:, None] @ R[:, :n])[:, 0]
        R[:, k % m] = f(X[:, k % m].view_as(x0)).reshape(b, -1)
    return X[:, (iters - 1) % m].view_as(x0)


class DEQ(nn.Module):
    def __init__(self, vocab=5000, d=384):
        super().__init__()
        self.embed, self.pos, self.cell, self.head = nn.Embedding(vocab, d), nn.Embedding(256, d), Cell(d), nn.Linear(d, vocab)

    def forward(self, ids):
        x = self.embed(ids) + self.pos.weight[: ids.shape[1]]
        with torch.no_grad():
            z = anderson(lambda z: self.cell(z, x), torch.zeros_like(x))
        z = self.cell(z, x)
        if self.training:
            z0 = z.detach().requires_grad_()
            f0 = self.cell(z0, x.detach())

            def backward_hook(grad):
                return anderson(lambda y: autograd.grad(f0, z0, y, retain_graph=True)[0] + grad, grad, iters=6)

            z.register_hook(backward_hook)
        return self.head(z)


torch.manual_seed(0)
model = DEQ().cuda()
opt = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)
for step in range(4):
    ids = torch.randint(5000, (16, 129), device="cuda")
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    print(step, loss.item())
