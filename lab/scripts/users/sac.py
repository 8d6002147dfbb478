import copy, numpy as np, torch, torch.nn as nn, torch.nn.functional as F
from torch.distributions import Normal

dev = torch.device("cuda")


class ReplayBuffer:
    def __init__(s, n, o, a):
        s.o, s.a, s.r, s.o2, s.d = (
            np.zeros((n, o), np.float32),
            np.zeros((n, a), np.float32),
            np.zeros(n, np.float32),
            np.zeros((n, o), np.float32),
            np.zeros(n, np.float32),
        )
        s.p = s.size = 0
        s.n = n

    def store(s, *t):
        for b, v in zip((s.o, s.a, s.r, s.o2, s.d), t):
            b[s.p] = v
        s.p = (s.p + 1) % s.n
        s.size = min(s.size + 1, s.n)

    def sample(s, b):
        i = np.random.randint(0, s.size, b)
        return [torch.as_tensor(x[i], device=dev) for x in (s.o, s.a, s.r, s.o2, s.d)]


def mlp(i, o, h=512):
    return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, o))


class Actor(nn.Module):
    def __init__(s):
        super().__init__()
        s.net = mlp(24, 512)
        s.mu, s.ls = nn.Linear(512, 6), nn.Linear(512, 6)

    def forward(s, o):
        h = F.relu(s.net(o))
        mu, std = s.mu(h), s.ls(h).clamp(-20, 2).exp()
        pi = Normal(mu, std)
        u = pi.rsample()
        lp = pi.log_prob(u).sum(-1) - (2 * (np.log(2) - u - F.softplus(-2 * u))).sum(1)
        return torch.tanh(u), lp


actor, q1, q2 = Actor().to(dev), mlp(30, 1).to(dev), mlp(30, 1).to(dev)
q1t, q2t = copy.deepcopy(q1), copy.deepcopy(q2)
log_alpha = torch.zeros(1, requires_grad=True, device=dev)
pi_opt, q_opt, a_opt = (
    torch.optim.Adam(actor.parameters(), 3e-4),
    torch.optim.Adam([*q1.parameters(), *q2.parameters()], 3e-4),
    torch.optim.Adam([log_alpha], 3e-4),
)
buf = ReplayBuffer(100000, 24, 6)
o = np.random.randn(24).astype("f4")
for t in range(1500):
    a = (
        np.random.uniform(-1, 1, 6)
        if t < 1000
        else actor(torch.as_tensor(o, device=dev)[None])[0].detach().cpu().numpy()[0]
    )
    o2, r, d = np.random.randn(24).astype("f4"), np.random.randn(), False
    buf.store(o, a, r, o2, d)
    o = o2
    if t < 1000:
        continue
    obs, act, rew, obs2, done = buf.sample(256)
    with torch.no_grad():
        a2, lp2 = actor(obs2)
        x = torch.cat([obs2, a2], -1)
        backup = rew + 0.99 * (1 - done) * (torch.min(q1t(x), q2t(x)).squeeze(-1) - log_alpha.exp() * lp2)
    x = torch.cat([obs, act], -1)
    lq = ((q1(x).squeeze(-1) - backup) ** 2).mean() + ((q2(x).squeeze(-1) - backup) ** 2).mean()
    q_opt.zero_grad()
    lq.backward()
    q_opt.step()
    for p in [*q1.parameters(), *q2.parameters()]:
        p.requires_grad = False
    api, lp = actor(obs)
    x = torch.cat([obs, api], -1)
    lpi = (log_alpha.exp().detach() * lp - torch.min(q1(x), q2(x)).squeeze(-1)).mean()
    pi_opt.zero_grad()
    lpi.backward()
    pi_opt.step()
    for p in [*q1.parameters(), *q2.parameters()]:
        p.requires_grad = True
    la = -(log_alpha * (lp.detach() - 6)).mean()
    a_opt.zero_grad()
    la.backward()
    a_opt.step()
    with torch.no_grad():
        for m, mt in ((q1, q1t), (q2, q2t)):
            for p, pt in zip(m.parameters(), mt.parameters()):
                pt.data.mul_(0.995)
                pt.data.add_(0.005 * p.data)
    if t % 100 == 0:
        print(t, lq.item(), lpi.item(), log_alpha.exp().item())
