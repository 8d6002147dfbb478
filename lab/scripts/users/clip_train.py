import argparse
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--bs", type=int, default=128)
p.add_argument("--dim", type=int, default=512)
p.add_argument("--steps", type=int, default=20)
p.add_argument("--accum", type=int, default=1)
args = p.parse_args()


class Block(nn.Module):
    def __init__(self, d, heads, causal=False):
        super().__init__()
        self.attn = nn.MultiheadAttention(d, heads)
        self.ln_1 = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.ln_2 = nn.LayerNorm(d)
        self.causal = causal

    def forward(self, x):
        mask = None
        if self.causal:
            n = x.shape[0]
            mask = torch.full((n, n), float("-inf"), device=x.device).triu_(1).to(x.dtype)
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class CLIP(nn.Module):
    def __init__(self, d, layers=6, vocab=49408, ctx=77, patch=16, size=128):
        super().__init__()
        self.conv1 = nn.Conv2d(3, d, patch, patch, bias=False)
        self.class_embedding = nn.Parameter(d**-0.5 * torch.randn(d))
        self.positional_embedding = nn.Parameter(d**-0.5 * torch.randn((size // patch) ** 2 + 1, d))
        self.ln_pre, self.ln_post = nn.LayerNorm(d), nn.LayerNorm(d)
        self.visual = nn.Sequential(*[Block(d, d // 64) for _ in range(layers)])
        self.proj = nn.Parameter(d**-0.5 * torch.randn(d, d))
        self.token_embedding = nn.Embedding(vocab, d)
        self.text_positions = nn.Parameter(torch.empty(ctx, d).normal_(std=0.01))
        self.text = nn.Sequential(*[Block(d, d // 64, True) for _ in range(layers)])
        self.ln_final = nn.LayerNorm(d)
        self.text_projection = nn.Parameter(torch.empty(d, d).normal_(std=d**-0.5))
        self.logit_scale = nn.Parameter(torch.ones([]) * np.log(1 / 0.07))

    def encode_image(self, x):
        x = self.conv1(x).flatten(2).permute(0, 2, 1)
        x = torch.cat(
            [
                self.class_embedding.to(x.dtype)
                + torch.zeros(x.shape[0], 1, x.shape[-1], dtype=x.dtype, device=x.device),
                x,
            ],
            1,
        )
        x = self.ln_pre(x + self.positional_embedding.to(x.dtype)).permute(1, 0, 2)
        x = self.visual(x).permute(1, 0, 2)
        return self.ln_post(x[:, 0]) @ self.proj

    def encode_text(self, t):
        x = (self.token_embedding(t) + self.text_positions).permute(1, 0, 2)
        x = self.ln_final(self.text(x).permute(1, 0, 2))
        return x[torch.arange(x.shape[0], device=x.device), t.argmax(dim=-1)] @ self.text_projection

    def forward(self, image, text):
        i = F.normalize(self.encode_image(image), dim=1)
        t = F.normalize(self.encode_text(text), dim=1)
        return i, t, self.logit_scale.exp()


def clip_loss(i, t, scale):
    logits = scale * i @ t.t()
    labels = torch.arange(len(i), device=i.device, dtype=torch.long)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


device = "cuda"
model = CLIP(args.dim).to(device)
exclude = lambda n, p: p.ndim < 2 or "bn" in n or "ln" in n or "bias" in n or "logit_scale" in n
named = list(model.named_parameters())
optimizer = torch.optim.AdamW(
    [
        {"params": [p for n, p in named if exclude(n, p) and p.requires_grad], "weight_decay": 0.0},
        {"params": [p for n, p in named if not exclude(n, p) and p.requires_grad], "weight_decay": 0.2},
    ],
    lr=5e-4, betas=(0.9, 0.98), eps=1e-6,
)  # fmt: skip
for step in range(args.steps):
    images = torch.randn(args.bs, 3, 128, 128).to(device, non_blocking=True)
    texts = torch.randint(1, 49407, (args.bs, 77)).to(device, non_blocking=True)
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = clip_loss(*model(images, texts))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=2.0)
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, np.log(100))
    if step % 5 == 0:
        print(step, loss.item(), model.logit_scale.item())
