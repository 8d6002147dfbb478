"""Segmentation: dilated backbone, pyramid pooling, Lovász softmax by sorting, OHEM, Dice, mIoU by bincount, poly rate."""

import torch
from torch import nn
import torch.nn.functional as F

K = 19


def conv(i, o, k=3, s=1, d=1):
    return nn.Sequential(nn.Conv2d(i, o, k, s, d * (k // 2), d, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class Res(nn.Module):
    def __init__(self, c, d):
        super().__init__()
        self.body = nn.Sequential(conv(c, c // 4, 1), conv(c // 4, c // 4, 3, 1, d), nn.Conv2d(c // 4, c, 1, bias=False), nn.BatchNorm2d(c))

    def forward(self, x):
        return F.relu(x + self.body(x), inplace=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(conv(3, 64, 3, 2), conv(64, 64), conv(64, 128), nn.MaxPool2d(3, 2, 1))
        self.body = nn.Sequential(conv(128, 256, 3, 2), Res(256, 1), Res(256, 1), conv(256, 512), Res(512, 2), Res(512, 4))
        self.pools = nn.ModuleList(nn.Sequential(nn.AdaptiveAvgPool2d(b), nn.Conv2d(512, 128, 1), nn.ReLU()) for b in (1, 2, 3, 6))
        self.head = nn.Sequential(conv(1024, 256), nn.Dropout2d(0.1), nn.Conv2d(256, K, 1))
        self.aux = nn.Sequential(conv(128, 64), nn.Conv2d(64, K, 1))

    def forward(self, x):
        s = self.stem(x)
        f = self.body(s)
        parts = [F.interpolate(p(f), size=f.shape[-2:], mode="bilinear", align_corners=True) for p in self.pools]
        up = lambda t: F.interpolate(t, size=x.shape[-2:], mode="bilinear", align_corners=True)
        return up(self.head(torch.cat([f, *parts], 1))), up(self.aux(s))


def lovasz(probs, labels):
    probs, labels = probs.permute(0, 2, 3, 1).reshape(-1, K), labels.view(-1)
    losses = []
    for c in range(K):
        fg = (labels == c).float()
        errors, order = torch.sort((fg - probs[:, c]).abs(), descending=True)
        sorted_fg = fg[order]
        total = sorted_fg.sum()
        inter, union = total - sorted_fg.cumsum(0), total + (1 - sorted_fg).cumsum(0)
        jaccard = 1 - inter / union
        jaccard[1:] = jaccard[1:] - jaccard[:-1]
        losses.append(torch.dot(errors, jaccard))
    return torch.stack(losses).mean()


def ohem(logits, labels, keep=0.25):
    losses = F.cross_entropy(logits, labels, ignore_index=255, reduction="none").flatten()
    return losses.topk(int(keep * losses.numel())).values.mean()


model = Net().cuda()
opt = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=5e-4)
sched = torch.optim.lr_scheduler.PolynomialLR(opt, 100, 0.9)
for step in range(5):
    model.train()
    x, y = torch.randn(4, 3, 256, 256).cuda(), torch.randint(K, (4, 256, 256)).cuda()
    out, aux = model(x)
    p = out.softmax(1)
    onehot = F.one_hot(y, K).permute(0, 3, 1, 2)
    dice = 1 - (2 * (p * onehot).sum((0, 2, 3)) / (p.pow(2) + onehot).sum((0, 2, 3))).mean()
    loss = ohem(out, y) + 0.4 * F.cross_entropy(aux, y) + lovasz(p, y) + dice
    opt.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    model.eval()
    with torch.inference_mode():
        pred = model(x)[0].argmax(1)
        hist = torch.bincount((K * y + pred).flatten(), minlength=K * K).view(K, K)
        iou = hist.diag() / (hist.sum(0) + hist.sum(1) - hist.diag()).clamp(min=1)
    print(step, loss.item(), iou.mean().item())
