"""Self-distillation: student and teacher of one's own ViT, crops of two sizes, centring, momentum, weight-normed head."""

import torch
from torch import nn
import torch.nn.functional as F


class ViT(nn.Module):
    def __init__(self, d=256, depth=6, heads=4, patch=8, size=96):
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, d, patch, patch), nn.Parameter(torch.zeros(1, 1, d))
        self.pos, self.n = nn.Parameter(torch.randn(1, d, size // patch, size // patch) * 0.02), size // patch
        layer = nn.TransformerEncoderLayer(d, heads, 4 * d, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth, nn.LayerNorm(d), enable_nested_tensor=False)

    def forward(self, x):
        x = self.patch(x)
        pos = self.pos if x.shape[-1] == self.n else F.interpolate(self.pos, x.shape[-2:], mode="bicubic")
        x = (x + pos).flatten(2).transpose(1, 2)
        return self.body(torch.cat([self.cls.expand(len(x), -1, -1), x], 1))[:, 0]


class Head(nn.Module):
    def __init__(self, d=256, out=8192):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(d, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 128))
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(128, out, bias=False))
        self.last.parametrizations.weight.original0.data.fill_(1)
        self.last.parametrizations.weight.original0.requires_grad = False

    def forward(self, x):
        return self.last(F.normalize(self.mlp(x), dim=-1))


student, teacher = (nn.Sequential(ViT(), Head()).cuda() for _ in range(2))
teacher.load_state_dict(student.state_dict())
teacher.requires_grad_(False)
centre = torch.zeros(1, 8192, device="cuda")
decay, plain = [], []
for p in student.parameters():
    if p.requires_grad:
        (decay if p.ndim > 1 else plain).append(p)
opt = torch.optim.AdamW([{"params": decay}, {"params": plain, "weight_decay": 0}], 5e-4, weight_decay=0.04)
scaler = torch.amp.GradScaler("cuda")
for step in range(5):
    big = [torch.randn(24, 3, 96, 96, device="cuda") for _ in range(2)]
    small = [torch.randn(24, 3, 48, 48, device="cuda") for _ in range(4)]
    with torch.autocast("cuda", torch.float16):
        with torch.no_grad():
            t = teacher(torch.cat(big))
        s = torch.cat([student(torch.cat(big)), student(torch.cat(small))])
        targets = F.softmax((t - centre) / 0.04, -1).detach().chunk(2)
        logs = [F.log_softmax(o / 0.1, -1) for o in s.chunk(6)]
        terms = [-(q * l).sum(-1).mean() for i, q in enumerate(targets) for j, l in enumerate(logs) if i != j]
        loss = sum(terms) / len(terms)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(student.parameters(), 3.0)
    if step < 2:
        for p in student[1].last.parameters():
            p.grad = None
    scaler.step(opt)
    scaler.update()
    with torch.no_grad():
        centre.mul_(0.9).add_(t.mean(0, keepdim=True), alpha=0.1)
        for p, q in zip(student.parameters(), teacher.parameters()):
            q.data.mul_(0.996).add_(p.detach().data, alpha=0.004)
    print(step, loss.item())
