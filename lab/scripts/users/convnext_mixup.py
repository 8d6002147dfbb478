"""A ConvNeXt in the style of timm: mixup and CutMix, stochastic depth, EMA, channels_last, cosine schedule."""

import argparse, copy, math
import numpy as np
import torch, torch.nn as nn, torch.nn.functional as F


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training or self.p == 0:
            return x
        keep = 1 - self.p
        return x * x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(keep).div_(keep)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self, d, p):
        super().__init__()
        self.dw, self.norm = nn.Conv2d(d, d, 7, padding=3, groups=d), nn.LayerNorm(d, eps=1e-6)
        self.fc1, self.fc2, self.gamma = nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.Parameter(1e-6 * torch.ones(d))
        self.drop = DropPath(p)

    def forward(self, x):
        y = self.norm(self.dw(x).permute(0, 2, 3, 1))
        return x + self.drop((self.gamma * self.fc2(F.gelu(self.fc1(y)))).permute(0, 3, 1, 2))


class ConvNeXt(nn.Module):
    def __init__(self, dims=(64, 128, 256, 512), depths=(2, 2, 4, 2), classes=1000, rate=0.2):
        super().__init__()
        rates = iter(np.linspace(0, rate, sum(depths)))
        self.stages = nn.Sequential()
        last = 3
        for i, (d, n) in enumerate(zip(dims, depths)):
            down = nn.Sequential(nn.Conv2d(3, d, 4, 4), LayerNorm2d(d)) if i == 0 else nn.Sequential(LayerNorm2d(last), nn.Conv2d(last, d, 2, 2))
            self.stages.append(nn.Sequential(down, *[Block(d, float(next(rates))) for _ in range(n)]))
            last = d
        self.norm, self.head = nn.LayerNorm(last), nn.Linear(last, classes)

    def forward(self, x):
        return self.head(self.norm(self.stages(x).mean((2, 3))))


def mix(x, y, classes, rng):
    hot = F.one_hot(y, classes).float() * 0.9 + 0.1 / classes
    lam = rng.beta(0.8, 0.8)
    flipped = x.flip(0)
    if rng.random() < 0.5:
        h, w = x.shape[-2:]
        ch, cw = int(h * math.sqrt(1 - lam)), int(w * math.sqrt(1 - lam))
        top, left = int(rng.integers(0, h - ch + 1)), int(rng.integers(0, w - cw + 1))
        x[:, :, top : top + ch, left : left + cw] = flipped[:, :, top : top + ch, left : left + cw].clone()
        lam = 1 - ch * cw / (h * w)
    else:
        x = x * lam + flipped * (1 - lam)
    return x, lam * hot + (1 - lam) * hot.flip(0)


class Ema:
    def __init__(self, model, decay=0.9998):
        self.module, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        torch._foreach_lerp_(list(self.module.state_dict().values()), list(model.state_dict().values()), 1 - self.decay)


ap = argparse.ArgumentParser()
ap.add_argument("-b", "--batch-size", type=int, default=64)
ap.add_argument("--img-size", type=int, default=192)
ap.add_argument("--amp-dtype", default="bfloat16", choices=["float16", "bfloat16", "none"])
ap.add_argument("--channels-last", action=argparse.BooleanOptionalAction, default=True)
args = ap.parse_args()
device = torch.device("cuda")
model = ConvNeXt().to(device)
layout = torch.channels_last if args.channels_last else torch.contiguous_format
model = model.to(memory_format=layout)
ema = Ema(model)
opt = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
rng = np.random.default_rng(42)
amp = torch.autocast("cuda", getattr(torch, args.amp_dtype)) if args.amp_dtype != "none" else torch.autocast("cuda", enabled=False)
for step in range(5):
    for g in opt.param_groups:
        g["lr"] = 4e-3 * 0.5 * (1 + math.cos(math.pi * step / 5))
    x = torch.randint(0, 256, (args.batch_size, 3, args.img_size, args.img_size), dtype=torch.uint8).to(device)
    x = x.to(memory_format=layout).float().sub_(128).div_(64)
    y = torch.randint(0, 1000, (args.batch_size,), device=device)
    x, target = mix(x, y, 1000, rng)
    with amp:
        loss = torch.sum(-target * F.log_softmax(model(x).float(), -1), -1).mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 3.0)
    opt.step()
    torch.cuda.synchronize()
    ema.update(model)
    print(f"Train: {step} Loss: {loss.item():#.4g}")
