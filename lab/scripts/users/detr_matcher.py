"""Set prediction: CNN, nn.Transformer, Hungarian matching on the host by SciPy, auxiliary losses of every layer."""

import torch
from scipy.optimize import linear_sum_assignment
from torch import nn
import torch.nn.functional as F


class DETR(nn.Module):
    def __init__(self, classes=20, d=256, queries=60):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(3, 64, 7, 4, 3), nn.GroupNorm(8, 64), nn.ReLU(),
            nn.Conv2d(64, 128, 3, 2, 1), nn.GroupNorm(8, 128), nn.ReLU(),
            nn.Conv2d(128, d, 3, 2, 1), nn.GroupNorm(8, d), nn.ReLU(),
        )  # fmt: skip
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, 8, 1024, 0.1, batch_first=True), 3)
        self.layers = nn.ModuleList(nn.TransformerDecoderLayer(d, 8, 1024, 0.1, batch_first=True) for _ in range(3))
        self.query, self.row, self.col = nn.Embedding(queries, d), nn.Parameter(torch.rand(50, d // 2)), nn.Parameter(torch.rand(50, d // 2))
        self.cls, self.box = nn.Linear(d, classes + 1), nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 4))

    def forward(self, x):
        f = self.cnn(x)
        h, w = f.shape[-2:]
        pos = torch.cat([self.col[:w].unsqueeze(0).repeat(h, 1, 1), self.row[:h].unsqueeze(1).repeat(1, w, 1)], -1).flatten(0, 1)
        memory = self.enc(f.flatten(2).transpose(1, 2) + pos)
        q, found = self.query.weight.unsqueeze(0).repeat(len(x), 1, 1), []
        for layer in self.layers:
            q = layer(q, memory)
            found.append((self.cls(q), self.box(q).sigmoid()))
        return found


def iou(a, b):
    a, b = (torch.cat([t[..., :2] - t[..., 2:] / 2, t[..., :2] + t[..., 2:] / 2], -1) for t in (a, b))
    lt, rb = torch.max(a[:, None, :2], b[None, :, :2]), torch.min(a[:, None, 2:], b[None, :, 2:])
    inter = (rb - lt).clamp(min=0).prod(-1)
    area = [(t[:, 2:] - t[:, :2]).prod(-1) for t in (a, b)]
    return inter / (area[0][:, None] + area[1][None] - inter + 1e-6)


@torch.no_grad()
def match(logits, boxes, targets):
    pairs = []
    for l, b, (cls, gt) in zip(logits, boxes, targets):
        cost = -l.softmax(-1)[:, cls] + 5 * torch.cdist(b, gt, p=1) - 2 * iou(b, gt)
        rows, cols = linear_sum_assignment(cost.cpu().numpy())
        pairs.append((torch.as_tensor(rows, device=b.device), torch.as_tensor(cols, device=b.device)))
    return pairs


def criterion(outputs, targets):
    total, empty = 0, torch.ones(21, device="cuda")
    empty[-1] = 0.1
    for logits, boxes in outputs:
        pairs = match(logits, boxes, targets)
        batch = torch.cat([torch.full_like(r, n) for n, (r, _) in enumerate(pairs)])
        rows = torch.cat([r for r, _ in pairs])
        wanted = torch.full(logits.shape[:2], 20, dtype=torch.long, device="cuda")
        wanted[batch, rows] = torch.cat([t[0][c] for t, (_, c) in zip(targets, pairs)])
        gt = torch.cat([t[1][c] for t, (_, c) in zip(targets, pairs)])
        picked = boxes[batch, rows]
        total = total + F.cross_entropy(logits.transpose(1, 2), wanted, empty) + 5 * F.l1_loss(picked, gt)
        total = total + 2 * (1 - iou(picked, gt).diagonal()).mean()
    return total


model = DETR().cuda()
opt = torch.optim.AdamW([
    {"params": [p for n, p in model.named_parameters() if "cnn" not in n]},
    {"params": model.cnn.parameters(), "lr": 1e-5},
], 1e-4, weight_decay=1e-4)  # fmt: skip
for step in range(5):
    images = torch.randn(8, 3, 384, 384).cuda()
    targets = [(torch.randint(20, (n % 5 + 2,)).cuda(), torch.rand(n % 5 + 2, 4).cuda() * 0.4 + 0.3) for n in range(8)]
    loss = criterion(model(images), targets)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    if torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).isnan():
        continue
    opt.step()
    print(step, loss.item())
