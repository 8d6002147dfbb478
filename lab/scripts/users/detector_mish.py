"""One-stage detector: CSP backbone with Mish, targets assigned on the GPU by IoU and topk, focal and CIoU losses, EMA."""

import copy, math, torch
from torch import nn
import torch.nn.functional as F


def conv(i, o, k=3, s=1):
    return nn.Sequential(nn.Conv2d(i, o, k, s, k // 2, bias=False), nn.BatchNorm2d(o), nn.Mish())


class CSP(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.a, self.b, self.out = conv(c, c // 2, 1), conv(c, c // 2, 1), conv(c, c, 1)
        self.m = nn.ModuleList(nn.Sequential(conv(c // 2, c // 2, 1), conv(c // 2, c // 2)) for _ in range(n))

    def forward(self, x):
        y = self.a(x)
        for m in self.m:
            y = y + m(y)
        return self.out(torch.cat([y, self.b(x)], 1))


class Detector(nn.Module):
    def __init__(self, classes=20):
        super().__init__()
        self.stem = conv(3, 32)
        self.stages = nn.ModuleList(
            nn.Sequential(conv(c, 2 * c, 3, 2), CSP(2 * c, n)) for c, n in ((32, 1), (64, 1), (128, 2), (256, 2))
        )
        self.lateral = nn.ModuleList(conv(c, 128, 1) for c in (128, 256, 512))
        self.heads = nn.ModuleList(nn.Conv2d(128, 4 + classes, 1) for _ in range(3))

    def forward(self, x):
        x, feats = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            feats.append(x)
        up, outs = None, []
        for f, lateral, head in zip(feats[:0:-1], reversed(self.lateral), reversed(self.heads)):
            y = lateral(f)
            if up is not None:
                y = y + F.interpolate(up, scale_factor=2, mode="bilinear", align_corners=False)
            up = y
            outs.append(head(y))
        return outs


def decode(outs, size):
    boxes, logits = [], []
    for o in outs:
        b, _, h, w = o.shape
        s = size / h
        gy, gx = torch.meshgrid(torch.arange(h, device=o.device), torch.arange(w, device=o.device), indexing="ij")
        grid = torch.stack([gx, gy], -1).view(1, -1, 2)
        t = o[:, :4].flatten(2).transpose(1, 2)
        center, wh = (grid + t[..., :2].sigmoid()) * s, t[..., 2:].clamp(max=4).exp() * s
        boxes.append(torch.cat([center - wh / 2, center + wh / 2], -1))
        logits.append(o[:, 4:].flatten(2).transpose(1, 2))
    return torch.cat(boxes, 1), torch.cat(logits, 1)


def ciou(a, b):
    lt, rb = torch.max(a[..., :2], b[..., :2]), torch.min(a[..., 2:], b[..., 2:])
    inter = (rb - lt).clamp(min=0).prod(-1)
    wa, wb = (a[..., 2:] - a[..., :2]).clamp(min=1e-3), (b[..., 2:] - b[..., :2]).clamp(min=1e-3)
    iou = inter / (wa.prod(-1) + wb.prod(-1) - inter + 1e-7)
    box = torch.max(a[..., 2:], b[..., 2:]) - torch.min(a[..., :2], b[..., :2])
    gap = ((a[..., :2] + a[..., 2:] - b[..., :2] - b[..., 2:]) ** 2).sum(-1) / 4
    v = 4 / math.pi**2 * (torch.atan(wb[..., 0] / wb[..., 1]) - torch.atan(wa[..., 0] / wa[..., 1])) ** 2
    with torch.no_grad():
        alpha = v / (1 - iou + v + 1e-7)
    return iou - gap / (box.pow(2).sum(-1) + 1e-7) - alpha * v, iou


def loss_of(outs, targets, size):
    boxes, logits = decode([o.float() for o in outs], size)
    onehot, box_loss = torch.zeros_like(logits), 0.0
    for n, (gt, cls) in enumerate(targets):
        with torch.no_grad():
            _, iou = ciou(gt[:, None], boxes[n][None])
            cost = -iou - logits[n].sigmoid().t()[cls]
            picked = cost.topk(10, largest=False).indices
        onehot[n, picked.flatten(), cls.repeat_interleave(10)] = 1.0
        box_loss = box_loss + (1 - ciou(boxes[n][picked], gt[:, None].expand(-1, 10, -1))[0]).mean()
    p = logits.sigmoid()
    weight = torch.where(onehot > 0, (1 - p) ** 2 * 0.25, p**2 * 0.75)
    focal = (F.binary_cross_entropy_with_logits(logits, onehot, reduction="none") * weight.detach()).sum()
    return focal / onehot.sum().clamp(min=1) + box_loss / len(targets)


model = Detector().cuda().to(memory_format=torch.channels_last)
ema = copy.deepcopy(model).eval().requires_grad_(False)
decay, plain = [], []
for p in model.parameters():
    (decay if p.ndim > 1 else plain).append(p)
opt = torch.optim.SGD([{"params": decay, "weight_decay": 5e-4}, {"params": plain}], 0.01, momentum=0.937, nesterov=True)
scaler = torch.amp.GradScaler("cuda")
for step in range(5):
    x = torch.rand(12, 3, 320, 320).cuda().to(memory_format=torch.channels_last)
    targets = []
    for n in range(12):
        xy = torch.rand(3 + n % 4, 2) * 200
        targets.append((torch.cat([xy, xy + 20 + torch.rand_like(xy) * 90], 1).cuda(), torch.randint(20, (len(xy),)).cuda()))
    with torch.autocast("cuda", torch.float16):
        outs = model(x)
    loss = loss_of(outs, targets, 320)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    with torch.no_grad():
        d = 0.9998 * (1 - math.exp(-(step + 1) / 2000))
        for a, b in zip(ema.state_dict().values(), model.state_dict().values()):
            if a.dtype.is_floating_point:
                a.mul_(d).add_(b.detach(), alpha=1 - d)
    print(step, float(loss))
