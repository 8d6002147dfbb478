"""A UNet in the manner of SDXL: transformer blocks at depth, two text encoders' states, size conditioning,
v-prediction with min-SNR weights, checkpointing by block, EMA on the CPU, 16-bit frozen encoder."""

import math, torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def sinusoid(t, dim):
    f = torch.exp(-math.log(10000) * torch.arange(dim // 2, device=t.device) / (dim // 2))
    a = t.float()[:, None] * f
    return torch.cat([a.cos(), a.sin()], -1)


class Res(nn.Module):
    def __init__(self, i, o, emb):
        super().__init__()
        self.n1, self.c1, self.e = nn.GroupNorm(32, i), nn.Conv2d(i, o, 3, padding=1), nn.Linear(emb, o)
        self.n2, self.c2 = nn.GroupNorm(32, o), nn.Conv2d(o, o, 3, padding=1)
        self.skip = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(self, x, e):
        h = self.c1(F.silu(self.n1(x))) + self.e(F.silu(e))[:, :, None, None]
        return self.skip(x) + self.c2(F.silu(self.n2(h)))


class Attend(nn.Module):
    def __init__(self, d, ctx, heads):
        super().__init__()
        self.h, self.q, self.k, self.v = heads, nn.Linear(d, d, False), nn.Linear(ctx, d, False), nn.Linear(ctx, d, False)
        self.o = nn.Linear(d, d)

    def forward(self, x, c):
        split = lambda t: t.unflatten(-1, (self.h, -1)).transpose(1, 2)
        return self.o(F.scaled_dot_product_attention(split(self.q(x)), split(self.k(c)), split(self.v(c))).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self, d, ctx, depth):
        super().__init__()
        self.norm, self.inp, self.out = nn.GroupNorm(32, d, eps=1e-6), nn.Linear(d, d), nn.Linear(d, d)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"n1": nn.LayerNorm(d), "a1": Attend(d, d, d // 64), "n2": nn.LayerNorm(d), "a2": Attend(d, ctx, d // 64),
                           "n3": nn.LayerNorm(d), "up": nn.Linear(d, 8 * d), "down": nn.Linear(4 * d, d)}) for _ in range(depth)
        )  # fmt: skip

    def forward(self, x, c):
        b, d, h, w = x.shape
        y = self.inp(self.norm(x).flatten(2).transpose(1, 2))
        for k in self.blocks:
            n = k["n1"](y)
            y = y + k["a1"](n, n)
            y = y + k["a2"](k["n2"](y), c)
            a, g = k["up"](k["n3"](y)).chunk(2, -1)
            y = y + k["down"](a * F.gelu(g))
        return x + self.out(y).transpose(1, 2).view(b, d, h, w)


class UNet(nn.Module):
    def __init__(self, ch=128, ctx=768):
        super().__init__()
        emb = 4 * ch
        self.ch = ch
        self.time = nn.Sequential(nn.Linear(ch, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.size = nn.Sequential(nn.Linear(6 * 64 + 512, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.inp = nn.Conv2d(4, ch, 3, padding=1)
        widths, depths = (ch, 2 * ch, 4 * ch), (0, 1, 4)
        self.down, self.up, skips, last = nn.ModuleList(), nn.ModuleList(), [ch], ch
        for i, (w, n) in enumerate(zip(widths, depths)):
            for _ in range(2):
                self.down.append(nn.ModuleList([Res(last, w, emb), Transformer(w, ctx, n) if n else nn.Identity()]))
                skips.append(w); last = w
            if i < 2:
                self.down.append(nn.ModuleList([nn.Conv2d(w, w, 3, 2, 1)])); skips.append(w)
        self.mid = nn.ModuleList([Res(last, last, emb), Transformer(last, ctx, 4), Res(last, last, emb)])
        for i, (w, n) in reversed(list(enumerate(zip(widths, depths)))):
            for j in range(3):
                self.up.append(nn.ModuleList([Res(last + skips.pop(), w, emb), Transformer(w, ctx, n) if n else nn.Identity()]))
                last = w
                if i and j == 2:
                    self.up[-1].append(nn.Conv2d(w, w, 3, padding=1))
        self.out = nn.Sequential(nn.GroupNorm(32, ch), nn.SiLU(), nn.Conv2d(ch, 4, 3, padding=1))

    def one(self, block, x, e, c):
        x = block[0](x, e)
        return block[1](x, c) if isinstance(block[1], Transformer) else x

    def forward(self, x, t, c, pooled, sizes):
        e = self.time(sinusoid(t, self.ch)) + self.size(torch.cat([sinusoid(sizes.flatten(), 64).view(len(x), -1), pooled], -1))
        x = self.inp(x)
        skips = [x]
        for b in self.down:
            x = b[0](x) if len(b) == 1 else checkpoint(self.one, b, x, e, c, use_reentrant=False)
            skips.append(x)
        x = self.mid[2](self.mid[1](self.mid[0](x, e), c), e)
        for b in self.up:
            x = checkpoint(self.one, b, torch.cat([x, skips.pop()], 1), e, c, use_reentrant=False)
            if len(b) == 3:
                x = b[2](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.out(x)


device = torch.device("cuda")
vae = nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1), nn.SiLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.SiLU(), nn.Conv2d(128, 8, 3, 2, 1)).to(device, torch.float16).requires_grad_(False).eval()
unet = UNet().to(device)
shadow = {k: v.detach().cpu().clone() for k, v in unet.state_dict().items()}
opt = torch.optim.AdamW(unet.parameters(), 1e-5)
alphas = torch.cumprod(1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000, device=device) ** 2, 0)
scaler = torch.amp.GradScaler()
for step in range(4):
    images = torch.rand(4, 3, 512, 512, device=device)
    with torch.no_grad():
        mean, logvar = vae(images.half() * 2 - 1).chunk(2, 1)
        latents = ((mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)) * 0.13).float()
    ctx, pooled = torch.randn(4, 77, 768, device=device), torch.randn(4, 512, device=device)
    ctx = torch.where(torch.rand(4, 1, 1, device=device) < 0.1, torch.zeros_like(ctx), ctx)
    t = torch.randint(0, 1000, (4,), device=device)
    noise, a = torch.randn_like(latents), alphas[t].view(-1, 1, 1, 1)
    noisy, target = a.sqrt() * latents + (1 - a).sqrt() * noise, a.sqrt() * noise - (1 - a).sqrt() * latents
    with torch.autocast("cuda", torch.float16):
        guess = unet(noisy, t, ctx, pooled, torch.full((4, 6), 512, device=device))
    snr = alphas[t] / (1 - alphas[t])
    weight = torch.minimum(snr, torch.full_like(snr, 5.0)) / (snr + 1)
    loss = (F.mse_loss(guess.float(), target, reduction="none").mean((1, 2, 3)) * weight).mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    for k, v in unet.state_dict().items():
        shadow[k].lerp_(v.detach().cpu(), 1e-4)
    print(step, loss.item())
