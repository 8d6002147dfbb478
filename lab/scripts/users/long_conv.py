"""State space layers as long convolutions: kernels from complex parameters, rfft and irfft, gated, pixel sequences."""

import math, torch
from torch import nn
import torch.nn.functional as F


class S4D(nn.Module):
    def __init__(self, d, n=64):
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(d) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        self.C = nn.Parameter(torch.view_as_real(torch.randn(d, n // 2, dtype=torch.cfloat)))
        self.log_A = nn.Parameter(torch.log(0.5 * torch.ones(d, n // 2)))
        self.A_imag = nn.Parameter(math.pi * torch.arange(n // 2).repeat(d, 1))
        self.D, self.out = nn.Parameter(torch.randn(d)), nn.Conv1d(d, 2 * d, 1)

    def forward(self, u):
        L = u.size(-1)
        dt, A = torch.exp(self.log_dt), -torch.exp(self.log_A) + 1j * self.A_imag
        dtA = A * dt[:, None]
        K = dtA[..., None] * torch.arange(L, device=u.device)
        C = torch.view_as_complex(self.C) * (torch.exp(dtA) - 1.0) / A
        k = 2 * torch.einsum("hn,hnl->hl", C, torch.exp(K)).real
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * L) * torch.fft.rfft(k, n=2 * L), n=2 * L)[..., :L]
        return F.glu(self.out(F.gelu(y + u * self.D[:, None])), dim=1)


class Net(nn.Module):
    def __init__(self, d=128, layers=4, classes=10):
        super().__init__()
        self.enc, self.dec = nn.Linear(3, d), nn.Linear(d, classes)
        self.layers = nn.ModuleList(S4D(d) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(layers))
        self.drop = nn.Dropout1d(0.1)

    def forward(self, x):
        x = self.enc(x).transpose(1, 2)
        for layer, norm in zip(self.layers, self.norms):
            x = x + self.drop(layer(norm(x.transpose(1, 2)).transpose(1, 2)))
        return self.dec(x.mean(-1))


net = Net().cuda()
slow = [p for n, p in net.named_parameters() if any(k in n for k in ("log_dt", "log_A", "A_imag"))]
rest = [p for n, p in net.named_parameters() if not any(k in n for k in ("log_dt", "log_A", "A_imag"))]
opt = torch.optim.AdamW([{"params": rest}, {"params": slow, "lr": 1e-3, "weight_decay": 0.0}], lr=4e-3, weight_decay=0.05)
schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=[4e-3, 1e-3], total_steps=20)
for step in range(5):
    x, y = torch.rand(24, 1024, 3, device="cuda"), torch.randint(10, (24,), device="cuda")
    loss = F.cross_entropy(net(x), y, label_smoothing=0.1)
    loss.backward()
    opt.step(), schedule.step(), opt.zero_grad()
    print(step, loss.item(), schedule.get_last_lr()[0])
