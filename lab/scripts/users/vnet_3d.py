"""Volumes: a small V-Net of 3d convolutions, Dice and focal loss, GradScaler, accumulation, sliding-window evaluation."""

import torch
from torch import nn
import torch.nn.functional as F


def block(i, o, n):
    layers = []
    for k in range(n):
        layers += [nn.Conv3d(i if k == 0 else o, o, 3, padding=1, bias=False), nn.InstanceNorm3d(o, affine=True), nn.PReLU(o)]
    return nn.Sequential(*layers)


class VNet(nn.Module):
    def __init__(self, base=16, classes=3):
        super().__init__()
        c = [base, 2 * base, 4 * base, 8 * base]
        self.enc = nn.ModuleList([block(1, c[0], 1), block(c[1], c[1], 2), block(c[2], c[2], 2), block(c[3], c[3], 2)])
        self.down = nn.ModuleList(nn.Conv3d(c[n], c[n + 1], 2, 2) for n in range(3))
        self.up = nn.ModuleList(nn.ConvTranspose3d(c[n + 1], c[n], 2, 2) for n in reversed(range(3)))
        self.dec = nn.ModuleList(block(2 * c[n], c[n], 1) for n in reversed(range(3)))
        self.out = nn.Conv3d(c[0], classes, 1)

    def forward(self, x):
        skips = []
        for n, enc in enumerate(self.enc):
            x = enc(x)
            if n < 3:
                skips.append(x)
                x = self.down[n](x)
        for up, dec in zip(self.up, self.dec):
            x = dec(torch.cat([up(x), skips.pop()], 1))
        return self.out(x)


def dice_focal(logits, y):
    p = logits.float().softmax(1)
    t = F.one_hot(y, 3).movedim(-1, 1).float()
    dice = 1 - (2 * (p * t).sum((2, 3, 4)) + 1) / (p.sum((2, 3, 4)) + t.sum((2, 3, 4)) + 1)
    ce = F.cross_entropy(logits.float(), y, reduction="none")
    return dice.mean() + ((1 - torch.exp(-ce)) ** 2 * ce).mean()


net = VNet().cuda()
opt = torch.optim.SGD(net.parameters(), 0.01, momentum=0.99, nesterov=True, weight_decay=3e-5)
scaler = torch.amp.GradScaler()
for step in range(4):
    net.train()
    for micro in range(2):
        x, y = torch.randn(2, 1, 64, 64, 64, device="cuda"), torch.randint(3, (2, 64, 64, 64), device="cuda")
        with torch.autocast("cuda", torch.float16):
            loss = dice_focal(net(x), y) / 2
        scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 12)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    if step == 1:
        net.eval()
        with torch.inference_mode(), torch.autocast("cuda", torch.float16):
            volume = torch.randn(1, 1, 96, 96, 96, device="cuda")
            total = torch.zeros(1, 3, 96, 96, 96, device="cuda")
            for i in range(0, 64, 32):
                for j in range(0, 64, 32):
                    total[..., i : i + 64, j : j + 64, :64] += net(volume[..., i : i + 64, j : j + 64, :64]).float()
    print(step, loss.item())
