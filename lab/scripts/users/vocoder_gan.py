"""A vocoder in the manner of HiFi-GAN: weight-normed transposed convolutions, period discriminators, feature matching."""

import itertools, torch, torch.nn as nn, torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


class ResBlock(nn.Module):
    def __init__(self, c, k, dilations=(1, 3, 5)):
        super().__init__()
        self.convs = nn.ModuleList(weight_norm(nn.Conv1d(c, c, k, dilation=d, padding=(k * d - d) // 2)) for d in dilations)

    def forward(self, x):
        for c in self.convs:
            x = x + c(F.leaky_relu(x, 0.1))
        return x


class Generator(nn.Module):
    def __init__(self, mels=80, c=256, rates=(8, 8, 4)):
        super().__init__()
        self.pre = weight_norm(nn.Conv1d(mels, c, 7, padding=3))
        self.ups, self.res = nn.ModuleList(), nn.ModuleList()
        for i, r in enumerate(rates):
            self.ups.append(weight_norm(nn.ConvTranspose1d(c >> i, c >> (i + 1), 2 * r, r, r // 2)))
            self.res.append(nn.ModuleList(ResBlock(c >> (i + 1), k) for k in (3, 7)))
        self.post = weight_norm(nn.Conv1d(c >> len(rates), 1, 7, padding=3))

    def forward(self, x):
        x = self.pre(x)
        for up, blocks in zip(self.ups, self.res):
            x = up(F.leaky_relu(x, 0.1))
            x = sum(b(x) for b in blocks) / len(blocks)
        return torch.tanh(self.post(F.leaky_relu(x)))


class Period(nn.Module):
    def __init__(self, p):
        super().__init__()
        sizes = (1, 32, 128, 256)
        self.p, self.convs = p, nn.ModuleList(weight_norm(nn.Conv2d(a, b, (5, 1), (3, 1), (2, 0))) for a, b in zip(sizes, sizes[1:]))
        self.last = spectral_norm(nn.Conv2d(256, 1, (3, 1), padding=(1, 0)))

    def forward(self, x):
        n = x.size(-1)
        if n % self.p:
            x = F.pad(x, (0, self.p - n % self.p), "reflect")
        x, feats = x.view(len(x), 1, -1, self.p), []
        for c in self.convs:
            x = F.leaky_relu(c(x), 0.1)
            feats.append(x)
        return self.last(x).flatten(1), feats


dev = "cuda"
gen, discs = Generator().to(dev), nn.ModuleList(Period(p) for p in (2, 3, 5, 7)).to(dev)
opt_g = torch.optim.AdamW(gen.parameters(), 2e-4, (0.8, 0.99))
opt_d = torch.optim.AdamW(itertools.chain(discs.parameters()), 2e-4, (0.8, 0.99))
scheds = [torch.optim.lr_scheduler.ExponentialLR(o, 0.999) for o in (opt_g, opt_d)]
for step in range(4):
    mel, wav = torch.randn(16, 80, 32, device=dev), torch.rand(16, 1, 32 * 256, device=dev) * 2 - 1
    fake = gen(mel)
    opt_d.zero_grad()
    loss_d = 0
    for d in discs:
        loss_d = loss_d + ((1 - d(wav)[0]) ** 2).mean() + (d(fake.detach())[0] ** 2).mean()
    loss_d.backward()
    opt_d.step()
    opt_g.zero_grad()
    loss_g = 45 * F.l1_loss(torch.stft(fake.squeeze(1), 512, 128, window=torch.hann_window(512, device=dev), return_complex=True).abs(),
                            torch.stft(wav.squeeze(1), 512, 128, window=torch.hann_window(512, device=dev), return_complex=True).abs())  # fmt: skip
    for d in discs:
        (a, fa), (_, fb) = d(fake), d(wav)
        loss_g = loss_g + ((1 - a) ** 2).mean() + 2 * sum(F.l1_loss(x, y.detach()) for x, y in zip(fa, fb))
    loss_g.backward()
    opt_g.step()
    for s in scheds:
        s.step()
    print(step, loss_d.item(), loss_g.item())
