"""Rainbow without Atari: noisy dueling network, distributional loss, prioritised replay on the GPU, target network."""

import copy, math, torch
from torch import nn
import torch.nn.functional as F


class Noisy(nn.Module):
    def __init__(self, i, o, sigma=0.5):
        super().__init__()
        self.wm, self.ws = nn.Parameter(torch.empty(o, i).uniform_(-(i**-0.5), i**-0.5)), nn.Parameter(torch.full((o, i), sigma / math.sqrt(i)))
        self.bm, self.bs = nn.Parameter(torch.empty(o).uniform_(-(i**-0.5), i**-0.5)), nn.Parameter(torch.full((o,), sigma / math.sqrt(o)))

    def forward(self, x):
        f = lambda n: (e := torch.randn(n, device=x.device)).sign() * e.abs().sqrt()
        a, b = f(self.wm.shape[1]), f(self.wm.shape[0])
        return F.linear(x, self.wm + self.ws * b.outer(a), self.bm + self.bs * b)


class Rainbow(nn.Module):
    def __init__(self, state=256, actions=18, atoms=51):
        super().__init__()
        self.a, self.n = actions, atoms
        self.body = nn.Sequential(nn.Linear(state, 1024), nn.LayerNorm(1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
        self.value = nn.Sequential(Noisy(1024, 512), nn.ReLU(), Noisy(512, atoms))
        self.adv = nn.Sequential(Noisy(1024, 512), nn.ReLU(), Noisy(512, actions * atoms))

    def forward(self, x, log=False):
        h = self.body(x)
        v, a = self.value(h)[:, None], self.adv(h).view(-1, self.a, self.n)
        q = v + a - a.mean(1, keepdim=True)
        return q.log_softmax(-1) if log else q.softmax(-1)


device, size, batch = "cuda", 50_000, 1024
online = Rainbow().to(device)
target = copy.deepcopy(online).requires_grad_(False)
opt = torch.optim.RAdam(online.parameters(), 6e-5, eps=1.5e-4)
states, nexts = torch.randn(size, 256, device=device), torch.randn(size, 256, device=device)
acts, rewards, done = torch.randint(18, (size,), device=device), torch.randn(size, device=device), torch.zeros(size, device=device)
priority = torch.ones(size, device=device)
support = torch.linspace(-10, 10, 51, device=device)
dz = 20 / 50
for step in range(6):
    probs = priority.pow(0.5)
    probs /= probs.sum()
    idx = torch.multinomial(probs, batch)
    weight = (size * probs[idx]).pow(-0.4)
    weight /= weight.max()
    with torch.no_grad():
        best = (online(nexts[idx]) * support).sum(-1).argmax(1)
        p = target(nexts[idx])[torch.arange(batch, device=device), best]
        tz = (rewards[idx, None] + 0.99**3 * (1 - done[idx, None]) * support).clamp(-10, 10)
        b = (tz + 10) / dz
        l, u = b.floor().long(), b.ceil().long()
        m = torch.zeros(batch, 51, device=device)
        offset = torch.arange(0, batch * 51, 51, device=device)[:, None]
        m.view(-1).index_add_(0, (l + offset).view(-1), (p * (u.float() - b)).view(-1))
        m.view(-1).index_add_(0, (u + offset).view(-1), (p * (b - l.float())).view(-1))
    logp = online(states[idx], log=True)[torch.arange(batch, device=device), acts[idx]]
    loss = -(m * logp).sum(1)
    opt.zero_grad()
    (weight * loss).mean().backward()
    nn.utils.clip_grad_norm_(online.parameters(), 10)
    opt.step()
    priority[idx] = loss.detach() + 1e-6
    torch._foreach_lerp_(list(target.parameters()), [p.detach() for p in online.parameters()], 0.005)
    print(step, loss.mean().item())
