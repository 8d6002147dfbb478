"""Speech separation: learnt filterbank, dilated depthwise convolutions, permutation-invariant SI-SDR."""

import itertools, torch
from torch import nn


class Block(nn.Module):
    def __init__(self, c, h, d):
        super().__init__()
        self.a, self.pa, self.na = nn.Conv1d(c, h, 1), nn.PReLU(), nn.GroupNorm(1, h, 1e-8)
        self.dw, self.pb, self.nb = nn.Conv1d(h, h, 3, padding=d, dilation=d, groups=h), nn.PReLU(), nn.GroupNorm(1, h, 1e-8)
        self.res, self.skip = nn.Conv1d(h, c, 1), nn.Conv1d(h, c, 1)

    def forward(self, x):
        y = self.nb(self.pb(self.dw(self.na(self.pa(self.a(x))))))
        return x + self.res(y), self.skip(y)


class TasNet(nn.Module):
    def __init__(self, n=256, c=128, h=256, sources=2):
        super().__init__()
        self.enc, self.dec = nn.Conv1d(1, n, 16, 8, bias=False), nn.ConvTranspose1d(n, 1, 16, 8, bias=False)
        self.norm, self.inp = nn.GroupNorm(1, n), nn.Conv1d(n, c, 1)
        self.blocks = nn.ModuleList(Block(c, h, 2**d) for _ in range(2) for d in range(6))
        self.mask = nn.Sequential(nn.PReLU(), nn.Conv1d(c, n * sources, 1))
        self.sources = sources

    def forward(self, x):
        w = torch.relu(self.enc(x[:, None]))
        y, total = self.inp(self.norm(w)), 0
        for block in self.blocks:
            y, s = block(y)
            total = total + s
        m = torch.sigmoid(self.mask(total)).view(len(x), self.sources, -1, w.shape[-1])
        return self.dec((m * w[:, None]).flatten(0, 1)).view(len(x), self.sources, -1)


def si_sdr(est, ref):
    est, ref = est - est.mean(-1, keepdim=True), ref - ref.mean(-1, keepdim=True)
    target = (est * ref).sum(-1, keepdim=True) / (ref.pow(2).sum(-1, keepdim=True) + 1e-8) * ref
    return 10 * torch.log10(target.pow(2).sum(-1) / ((est - target).pow(2).sum(-1) + 1e-8) + 1e-8)


model = TasNet().cuda()
opt = torch.optim.Adam(model.parameters(), 1e-3)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=3)
for step in range(5):
    sources = torch.randn(6, 2, 16000, device="cuda")
    est = model(sources.sum(1))
    length = min(est.shape[-1], 16000)
    scores = torch.stack([si_sdr(est[..., :length], sources[:, list(p), :length]).mean(1) for p in itertools.permutations(range(2))], 1)
    loss = -scores.max(1).values.mean()
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5)
    opt.step()
    plateau.step(loss.item())
    print(step, loss.item())
