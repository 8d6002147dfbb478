import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
import argparse, time

ap = argparse.ArgumentParser()
ap.add_argument("--ckpt", action="store_true")
ap.add_argument("--bs", type=int, default=64)
ap.add_argument("--depth", type=int, default=8)
ap.add_argument("--dim", type=int, default=384)
ap.add_argument("--bf16", action="store_true")
a = ap.parse_args()


class Attention(nn.Module):
    def __init__(s, d, h=6):
        super().__init__()
        s.h = h
        s.qkv = nn.Linear(d, 3 * d)
        s.proj = nn.Linear(d, d)
        s.scale = (d // h) ** -0.5
        s.attn_drop = nn.Dropout(0.1)

    def forward(s, x):
        B, N, C = x.shape
        q, k, v = s.qkv(x).reshape(B, N, 3, s.h, C // s.h).permute(2, 0, 3, 1, 4).unbind(0)
        attn = s.attn_drop(((q @ k.transpose(-2, -1)) * s.scale).softmax(dim=-1))
        return s.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class DropPath(nn.Module):
    def __init__(s, p):
        super().__init__()
        s.p = p

    def forward(s, x):
        if s.p == 0.0 or not s.training:
            return x
        keep = 1 - s.p
        return (
            x.div(keep)
            * (keep + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype, device=x.device)).floor_()
        )


class Block(nn.Module):
    def __init__(s, d, dp):
        super().__init__()
        s.n1, s.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        s.attn = Attention(d)
        s.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * d, d))
        s.dp = DropPath(dp)
        s.g1, s.g2 = nn.Parameter(1e-5 * torch.ones(d)), nn.Parameter(1e-5 * torch.ones(d))

    def forward(s, x):
        x = x + s.dp(s.g1 * s.attn(s.n1(x)))
        return x + s.dp(s.g2 * s.mlp(s.n2(x)))


class ViT(nn.Module):
    def __init__(s, d, depth, img=128, patch=8, classes=200):
        super().__init__()
        s.patch = nn.Conv2d(3, d, patch, patch)
        n = (img // patch) ** 2
        s.cls = nn.Parameter(torch.zeros(1, 1, d))
        s.pos = nn.Parameter(torch.zeros(1, n + 1, d))
        nn.init.trunc_normal_(s.pos, std=0.02)
        s.blocks = nn.ModuleList([Block(d, float(p)) for p in torch.linspace(0, 0.1, depth)])
        s.norm = nn.LayerNorm(d)
        s.head = nn.Linear(d, classes)

    def forward(s, x):
        x = s.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([s.cls.expand(x.size(0), -1, -1), x], 1) + s.pos
        for b in s.blocks:
            x = checkpoint(b, x, use_reentrant=False) if a.ckpt and s.training else b(x)
        return s.head(s.norm(x)[:, 0])


model = ViT(a.dim, a.depth).cuda().to(memory_format=torch.channels_last)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
dec = [p for p in model.parameters() if p.ndim > 1]
nod = [p for p in model.parameters() if p.ndim <= 1]
opt = torch.optim.AdamW([dict(params=dec, weight_decay=0.05), dict(params=nod, weight_decay=0)], lr=1e-3)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-3, total_steps=100)


def mixup(x, y, alpha=0.8):
    lam = float(torch.distributions.Beta(alpha, alpha).sample())
    idx = torch.randperm(x.size(0), device=x.device)
    return lam * x + (1 - lam) * x[idx], lam * F.one_hot(y, 200).float() + (1 - lam) * F.one_hot(y[idx], 200).float()


start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
torch.cuda.reset_peak_memory_stats()
for it in range(10):
    x = torch.rand(a.bs, 3, 128, 128).cuda(non_blocking=True).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 200, (a.bs,)).cuda()
    start.record()
    x, y = mixup(x, y)
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16, enabled=a.bf16):
        loss = torch.sum(-y * F.log_softmax(model(x), dim=-1), dim=-1).mean()
    opt.zero_grad(set_to_none=True)
    loss.backward()
    gn = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(gn):
        print("skip")
        continue
    opt.step()
    sched.step()
    ema.update_parameters(model)
    end.record()
    torch.cuda.synchronize()
    print(
        f"{it} loss {loss.item():.3f} gn {gn:.2f} {start.elapsed_time(end):.1f} ms  {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB reserved {torch.cuda.memory_reserved() / 2**20:.0f}"
    )
