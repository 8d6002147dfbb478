"""REINFORCE of a small decoder with its own key-value cache: samples until every row has ended, at most 64 tokens."""

import torch
from torch import nn
import torch.nn.functional as F

V, D, H, L, EOS = 8000, 512, 8, 6, 3


class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x, cache=None):
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if cache is not None:
            if "k" in cache:
                k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
            cache["k"], cache["v"] = k, v
        y = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n1, self.n2 = Attn(), nn.LayerNorm(D), nn.LayerNorm(D)
        self.f = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU("tanh"), nn.Linear(4 * D, D))

    def forward(self, x, cache=None):
        x = x + self.a(self.n1(x), cache)
        return x + self.f(self.n2(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.p = nn.Embedding(V, D), nn.Embedding(256, D)
        self.blocks, self.n, self.h = nn.ModuleList(Block() for _ in range(L)), nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, ids, caches=None, start=0):
        x = self.e(ids) + self.p(torch.arange(start, start + ids.shape[1], device=ids.device))
        for n, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[n])
        return self.h(self.n(x))


@torch.no_grad()
def sample(model, prompt, limit=64):
    caches, ids, done = [{} for _ in range(L)], prompt, torch.zeros(len(prompt), dtype=torch.bool, device="cuda")
    token, start = prompt, 0
    for _ in range(limit):
        logits = model(token, caches, start)[:, -1].float()
        start += token.shape[1]
        kept = logits.topk(50).values[:, -1:]
        token = torch.multinomial(logits.masked_fill(logits < kept, float("-inf")).softmax(-1), 1)
        token = torch.where(done[:, None], torch.full_like(token, EOS), token)
        ids = torch.cat([ids, token], 1)
        done |= token.squeeze(1) == EOS
        if done.all():
            break
        if len(prompt) == 1 and token[0, 0] == EOS:
            break
    return ids


model = LM().cuda()
opt = torch.optim.AdamW(model.parameters(), 1e-5)
baseline = 0.0
for step in range(4):
    prompt = torch.randint(4, V, (24, 32), device="cuda")
    model.eval()
    with torch.autocast("cuda", torch.bfloat16):
        ids = sample(model, prompt)
    reward = (ids[:, 32:] % 7 == 0).float().mean(1)
    model.train()
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(ids[:, :-1])[:, 31:]
    logp = torch.distributions.Categorical(logits=logits.float())
    chosen, entropy = logp.log_prob(ids[:, 32:]), logp.entropy()
    alive = ((ids[:, 32:] == EOS).cumsum(1) <= 1).float()
    loss = -(((reward - baseline)[:, None] * chosen + 0.01 * entropy) * alive).sum() / alive.sum()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    baseline = 0.9 * baseline + 0.1 * reward.mean().item()
    print(step, loss.item(), ids.shape)
