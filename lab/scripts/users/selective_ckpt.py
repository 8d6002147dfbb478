"""Selective activation checkpointing: a policy keeps matrix products and attention and recomputes the rest."""

import functools, os
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KEEP = {
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}  # fmt: skip


def make_policy():
    seen = {"mm": 0}

    def policy(ctx, op, *args, **kwargs):
        if op == torch.ops.aten.mm.default:
            if not ctx.is_recompute:
                seen["mm"] += 1
            return CheckpointPolicy.MUST_SAVE if seen["mm"] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if op in KEEP else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate, self.up, self.down = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, 3 * d, bias=False), nn.Linear(3 * d, d, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class LM(nn.Module):
    def __init__(self, vocab=16000, d=768, depth=8, heads=12):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Block(d, heads) for _ in range(depth))
        self.norm, self.out = nn.RMSNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        for i, layer in enumerate(self.layers):
            if i % 4 == 3:
                x = layer(x)
            elif i % 2:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = checkpoint(layer, x, use_reentrant=False,
                               context_fn=functools.partial(create_selective_checkpoint_contexts, make_policy()))  # fmt: skip
        return self.out(self.norm(x))


rank = int(os.environ.get("LOCAL_RANK", 0))
torch.cuda.set_device(rank)
torch.manual_seed(0)
model = LM().to(device="cuda", dtype=torch.bfloat16)
print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
opt = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 4))
for step in range(5):
    ids = torch.randint(0, 16000, (8, 1025), device="cuda")
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.float().view(-1, logits.size(-1)), ids[:, 1:].reshape(-1))
    loss.backward()
    gn = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    opt.step()
    sched.step()
    opt.zero_grad(set_to_none=True)
    print(step, f"{loss.item():.3f} {gn.item():.3f}")
