"""MoCo: a momentum encoder, a queue of keys in a buffer, shuffled batches, half precision."""

import copy, torch, torch.nn as nn, torch.nn.functional as F


class Patchify(nn.Module):
    def __init__(self, d=384, depth=6):
        super().__init__()
        self.proj, self.pos = nn.Conv2d(3, d, 16, 16), nn.Parameter(torch.randn(1, 197, d) * 0.02)
        self.cls = nn.Parameter(torch.zeros(1, 1, d))
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, 6, 4 * d, 0.0, "gelu", batch_first=True, norm_first=True), depth, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(d, 2048, bias=False), nn.BatchNorm1d(2048), nn.ReLU(inplace=True), nn.Linear(2048, 256, bias=False), nn.BatchNorm1d(256, affine=False))

    def forward(self, x):
        x = self.proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return F.normalize(self.head(self.enc(x)[:, 0]), dim=1)


class MoCo(nn.Module):
    def __init__(self, size=65536, m=0.996):
        super().__init__()
        self.q = Patchify()
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        self.size, self.m = size, m
        self.register_buffer("queue", F.normalize(torch.randn(256, size), dim=0))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def keys(self, x):
        for a, b in zip(self.q.parameters(), self.k.parameters()):
            b.mul_(self.m).add_(a.detach(), alpha=1 - self.m)
        order = torch.randperm(len(x), device=x.device)
        return self.k(x[order])[order.argsort()]

    @torch.no_grad()
    def push(self, keys):
        at = int(self.at)
        self.queue[:, at : at + len(keys)] = keys.T.float()
        self.at[0] = (at + len(keys)) % self.size

    def forward(self, a, b):
        q, k = self.q(a), self.keys(b)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.2
        self.push(k)
        return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long, device=a.device))


model = MoCo().cuda()
params = [p for p in model.parameters() if p.requires_grad]
opt = torch.optim.SGD(params, 0.03, 0.9, weight_decay=1e-4)
scaler = torch.GradScaler("cuda")
for step in range(6):
    x = torch.rand(64, 3, 224, 224).cuda()
    views = [torch.roll(x, (s, -s), (2, 3)) + 0.1 * torch.randn_like(x) for s in (3, 9)]
    with torch.autocast("cuda"):
        loss = model(*views)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print(step, float(loss))
