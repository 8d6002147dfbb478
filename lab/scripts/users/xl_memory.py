"""Transformer-XL: relative positions with the shift trick, memories carried over segments, adaptive softmax, Adam in fp16 scaler."""

import torch
from torch import nn
import torch.nn.functional as F

V, D, H, L, T, M, B = 60000, 512, 8, 8, 192, 192, 16


class RelAttn(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.r, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.u, self.v, self.norm = nn.Parameter(torch.zeros(H, D // H)), nn.Parameter(torch.zeros(H, D // H)), nn.LayerNorm(D)

    def forward(self, x, pos, mem, mask):
        cat = torch.cat([mem, x], 1)
        q, k, v = (t.unflatten(-1, (H, -1)) for t in self.qkv(self.norm(cat)).chunk(3, -1))
        q = q[:, -x.shape[1] :]
        r = self.r(pos).unflatten(-1, (H, -1))
        ac = torch.einsum("bihd,bjhd->bhij", q + self.u, k)
        bd = torch.einsum("bihd,jhd->bhij", q + self.v, r)
        b, h, i, j = bd.shape
        bd = F.pad(bd, (1, 0)).view(b, h, j + 1, i)[:, :, 1:].view_as(bd)
        scores = (ac + bd) * (D // H) ** -0.5
        p = F.dropout(scores.masked_fill(mask, -65000.0).softmax(-1), 0.1, self.training)
        return x + self.o(torch.einsum("bhij,bjhd->bihd", p, v).flatten(2))


class XL(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.attn = nn.ModuleList(RelAttn() for _ in range(L))
        self.ff = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2048), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2048, D)) for _ in range(L))
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(D, V, [5000, 20000], div_value=4.0)

    def forward(self, ids, target, mems):
        x, kept = self.embed(ids), []
        j = mems[0].shape[1] + ids.shape[1]
        place = torch.arange(j - 1, -1, -1.0, device=x.device)
        angle = torch.outer(place, 1 / 10000 ** (torch.arange(0, D, 2.0, device=x.device) / D))
        pos = torch.cat([angle.sin(), angle.cos()], -1)
        mask = torch.ones(ids.shape[1], j, dtype=torch.bool, device=x.device).triu(1 + j - ids.shape[1])
        for attn, ff, mem in zip(self.attn, self.ff, mems):
            kept.append(torch.cat([mem, x], 1)[:, -M:].detach())
            x = attn(x, pos, mem, mask)
            x = x + ff(x)
        return self.loss(x.flatten(0, 1), target.flatten()).loss, kept


model = XL().cuda()
opt = torch.optim.Adam(model.parameters(), 2.5e-4)
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
mems = [torch.zeros(B, 0, D, device="cuda") for _ in range(L)]
stream = torch.randint(V, (B, 8 * T + 1))
for step in range(6):
    piece = stream[:, step * T : (step + 1) * T + 1].cuda()
    with torch.autocast("cuda", torch.float16):
        loss, mems = model(piece[:, :-1], piece[:, 1:], mems)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    print(step, loss.item())
