import torch, torch.nn as nn, torch.nn.functional as F
from torch.func import functional_call, vmap, grad

dev = "cuda"
net = nn.Sequential(nn.Linear(1, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)).to(dev)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)


def predict(params, x):
    return functional_call(net, params, (x,))


def inner_loss(params, x, y):
    return F.mse_loss(predict(params, x), y)


def task_loss(params, xs, ys, xq, yq, lr=0.01, steps=2):
    for _ in range(steps):
        g = grad(inner_loss)(params, xs, ys)
        params = {k: p - lr * g[k] for k, p in params.items()}
    return inner_loss(params, xq, yq)


def sample_tasks(n, k=20):
    A, ph = torch.rand(n, 1, 1) * 4.9 + 0.1, torch.rand(n, 1, 1) * 3.14
    x = torch.rand(n, 2 * k, 1) * 10 - 5
    y = A * torch.sin(x + ph)
    return [t.to(dev) for t in (x[:, :k], y[:, :k], x[:, k:], y[:, k:])]


for it in range(20):
    opt.zero_grad()
    params = dict(net.named_parameters())
    loss = vmap(task_loss, in_dims=(None, 0, 0, 0, 0))(params, *sample_tasks(64)).mean()
    loss.backward()
    opt.step()
    if it % 5 == 0:
        print(it, loss.item())
