"""DiT with adaLN-Zero trained by flow matching on latents, EMA, gradient accumulation, bf16."""

import argparse, copy, logging, os
from collections import OrderedDict
import torch, torch.nn as nn

logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s")
logger = logging.getLogger(__name__)


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.qkv, self.proj = h, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))


class DiTBlock(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.norm1, self.norm2 = (
            nn.LayerNorm(d, elementwise_affine=False, eps=1e-6),
            nn.LayerNorm(d, elementwise_affine=False, eps=1e-6),
        )
        self.attn = Attention(d, h)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(approximate="tanh"), nn.Linear(4 * d, d))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(d, 6 * d))

    def forward(self, x, c):
        s1, c1, g1, s2, c2, g2 = self.ada(c).chunk(6, dim=1)
        x = x + g1.unsqueeze(1) * self.attn(modulate(self.norm1(x), s1, c1))
        return x + g2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), s2, c2))


class DiT(nn.Module):
    def __init__(self, d=384, depth=8, heads=6, p=2, size=32, c=4, classes=1000):
        super().__init__()
        self.p, self.c = p, c
        self.embed = nn.Conv2d(c, d, p, p)
        self.pos = nn.Parameter(torch.zeros(1, (size // p) ** 2, d), requires_grad=False)
        self.t = nn.Sequential(nn.Linear(256, d), nn.SiLU(), nn.Linear(d, d))
        self.y = nn.Embedding(classes + 1, d)
        self.blocks = nn.ModuleList([DiTBlock(d, heads) for _ in range(depth)])
        self.final = nn.Linear(d, p * p * c)

    def forward(self, x, t, y):
        b, c, h, w = x.shape
        f = torch.exp(-9.21 * torch.arange(128, device=t.device) / 128)
        e = t[:, None] * 1000 * f[None]
        cond = self.t(torch.cat([e.cos(), e.sin()], -1)) + self.y(
            torch.where(torch.rand(b, device=y.device) < 0.1, 1000, y)
        )
        z = self.embed(x).flatten(2).transpose(1, 2) + self.pos
        for blk in self.blocks:
            z = blk(z, cond)
        z = self.final(z).reshape(b, h // self.p, w // self.p, self.p, self.p, c)
        return torch.einsum("nhwpqc->nchpwq", z).reshape(b, c, h, w)


@torch.no_grad()
def update_ema(ema, model, decay=0.9999):
    params = OrderedDict(model.named_parameters())
    for name, p in OrderedDict(ema.named_parameters()).items():
        p.mul_(decay).add_(params[name].data, alpha=1 - decay)


def main(args):
    assert torch.cuda.is_available(), "Training currently requires at least one GPU."
    torch.backends.cuda.matmul.allow_tf32 = True
    os.makedirs(args.results_dir, exist_ok=True)
    device = torch.device("cuda", 0)
    model = DiT()
    ema = copy.deepcopy(model).to(device)
    for p in ema.parameters():
        p.requires_grad_(False)
    model = model.to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    update_ema(ema, model, 0)
    model.train()
    ema.eval()
    running = torch.zeros((), device=device)
    for step in range(1, args.max_steps + 1):
        for micro in range(args.accum):
            x1 = torch.randn(args.batch, 4, 32, 32).to(device)
            y = torch.randint(0, 1000, (args.batch,)).to(device)
            x0, t = torch.randn_like(x1), torch.rand(args.batch, device=device)
            xt = (1 - t[:, None, None, None]) * x0 + t[:, None, None, None] * x1
            with torch.autocast("cuda", dtype=torch.bfloat16):
                v = model(xt, t, y)
                loss = ((v - (x1 - x0)) ** 2).mean() / args.accum
            loss.backward()
            running += loss.detach()
        opt.step()
        opt.zero_grad(set_to_none=True)
        update_ema(ema, model)
        if step % 4 == 0:
            torch.cuda.synchronize()
            logger.info(f"(step={step:07d}) loss {running.item() / 4:.4f}")
            running.zero_()
    torch.save(
        {"model": model.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict(), "args": args},
        f"{args.results_dir}/last.pt",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--accum", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=8)
    parser.add_argument("--results-dir", type=str, default="results")
    main(parser.parse_args())
