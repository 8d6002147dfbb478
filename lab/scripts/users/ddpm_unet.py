import math, copy, torch, torch.nn as nn, torch.nn.functional as F
from functools import partial

device = "cuda"


class EMA:
    def __init__(self, beta):
        self.beta = beta
        self.step = 0

    def update_model_average(self, ma, cur):
        for c, m in zip(cur.parameters(), ma.parameters()):
            m.data = m.data * self.beta + (1 - self.beta) * c.data

    def step_ema(self, ema_model, model, start=1):
        if self.step < start:
            ema_model.load_state_dict(model.state_dict())
            self.step += 1
            return
        self.update_model_average(ema_model, model)
        self.step += 1


class SelfAttention(nn.Module):
    def __init__(self, c, size):
        super().__init__()
        self.c, self.size = c, size
        self.mha = nn.MultiheadAttention(c, 4, batch_first=True)
        self.ln = nn.LayerNorm([c])
        self.ff = nn.Sequential(nn.LayerNorm([c]), nn.Linear(c, c), nn.GELU(), nn.Linear(c, c))

    def forward(self, x):
        x = x.view(-1, self.c, self.size * self.size).swapaxes(1, 2)
        y = self.ln(x)
        a, _ = self.mha(y, y, y)
        a = a + x
        a = self.ff(a) + a
        return a.swapaxes(2, 1).view(-1, self.c, self.size, self.size)


class DoubleConv(nn.Module):
    def __init__(self, i, o, mid=None, residual=False):
        super().__init__()
        self.residual = residual
        mid = mid or o
        self.net = nn.Sequential(
            nn.Conv2d(i, mid, 3, padding=1, bias=False),
            nn.GroupNorm(1, mid),
            nn.GELU(),
            nn.Conv2d(mid, o, 3, padding=1, bias=False),
            nn.GroupNorm(1, o),
        )

    def forward(self, x):
        return F.gelu(x + self.net(x)) if self.residual else self.net(x)


class Down(nn.Module):
    def __init__(self, i, o, emb=256):
        super().__init__()
        self.m = nn.Sequential(nn.MaxPool2d(2), DoubleConv(i, i, residual=True), DoubleConv(i, o))
        self.emb = nn.Sequential(nn.SiLU(), nn.Linear(emb, o))

    def forward(self, x, t):
        x = self.m(x)
        return x + self.emb(t)[:, :, None, None].repeat(1, 1, x.shape[-2], x.shape[-1])


class Up(nn.Module):
    def __init__(self, i, o, emb=256):
        super().__init__()
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.conv = nn.Sequential(DoubleConv(i, i, residual=True), DoubleConv(i, o, i // 2))
        self.emb = nn.Sequential(nn.SiLU(), nn.Linear(emb, o))

    def forward(self, x, skip, t):
        x = self.conv(torch.cat([skip, self.up(x)], dim=1))
        return x + self.emb(t)[:, :, None, None].repeat(1, 1, x.shape[-2], x.shape[-1])


class UNet(nn.Module):
    def __init__(self, c=3, time_dim=256, w=32):
        super().__init__()
        self.time_dim = time_dim
        self.inc = DoubleConv(c, w)
        self.d1, self.s1 = Down(w, 2 * w), SelfAttention(2 * w, 16)
        self.d2, self.s2 = Down(2 * w, 4 * w), SelfAttention(4 * w, 8)
        self.d3, self.s3 = Down(4 * w, 4 * w), SelfAttention(4 * w, 4)
        self.b1, self.b2 = DoubleConv(4 * w, 8 * w), DoubleConv(8 * w, 4 * w)
        self.u1, self.s4 = Up(8 * w, 2 * w), SelfAttention(2 * w, 8)
        self.u2, self.s5 = Up(4 * w, w), SelfAttention(w, 16)
        self.u3 = Up(2 * w, w)
        self.outc = nn.Conv2d(w, c, 1)

    def pos_encoding(self, t, ch):
        inv = 1.0 / (10000 ** (torch.arange(0, ch, 2, device=t.device).float() / ch))
        a = t.repeat(1, ch // 2) * inv
        return torch.cat([torch.sin(a), torch.cos(a)], dim=-1)

    def forward(self, x, t):
        t = self.pos_encoding(t.unsqueeze(-1).type(torch.float), self.time_dim)
        x1 = self.inc(x)
        x2 = self.s1(self.d1(x1, t))
        x3 = self.s2(self.d2(x2, t))
        x4 = self.s3(self.d3(x3, t))
        x4 = self.b2(self.b1(x4))
        x = self.s4(self.u1(x4, x3, t))
        x = self.s5(self.u2(x, x2, t))
        x = self.u3(x, x1, t)
        return self.outc(x)


class Diffusion:
    def __init__(self, steps=1000, b0=1e-4, b1=0.02, size=32):
        self.steps, self.size = steps, size
        self.beta = torch.linspace(b0, b1, steps).to(device)
        self.alpha = 1.0 - self.beta
        self.alpha_hat = torch.cumprod(self.alpha, dim=0)

    def noise_images(self, x, t):
        a = torch.sqrt(self.alpha_hat[t])[:, None, None, None]
        b = torch.sqrt(1 - self.alpha_hat[t])[:, None, None, None]
        e = torch.randn_like(x)
        return a * x + b * e, e

    def sample_timesteps(self, n):
        return torch.randint(low=1, high=self.steps, size=(n,))

    @torch.no_grad()
    def sample(self, model, n):
        model.eval()
        x = torch.randn((n, 3, self.size, self.size)).to(device)
        for i in reversed(range(self.steps - 3, self.steps)):
            t = (torch.ones(n) * i).long().to(device)
            p = model(x, t)
            a, ah, be = (
                self.alpha[t][:, None, None, None],
                self.alpha_hat[t][:, None, None, None],
                self.beta[t][:, None, None, None],
            )
            noise = torch.randn_like(x) if i > 1 else torch.zeros_like(x)
            x = 1 / torch.sqrt(a) * (x - ((1 - a) / (torch.sqrt(1 - ah))) * p) + torch.sqrt(be) * noise
        model.train()
        return ((x.clamp(-1, 1) + 1) / 2 * 255).type(torch.uint8)


model = UNet().to(device)
opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
mse, diffusion, ema = nn.MSELoss(), Diffusion(), EMA(0.995)
ema_model = copy.deepcopy(model).eval().requires_grad_(False)
images = torch.rand(512, 3, 32, 32) * 2 - 1
for epoch in range(2):
    for i in range(0, 512, 64):
        x = images[i : i + 64].to(device)
        t = diffusion.sample_timesteps(x.shape[0]).to(device)
        x_t, noise = diffusion.noise_images(x, t)
        loss = mse(noise, model(x_t, t))
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.step_ema(ema_model, model)
    sampled = diffusion.sample(model, n=16)
    print(epoch, loss.item(), sampled.shape)
