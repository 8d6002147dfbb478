"""Two encoders with in-batch negatives and gradient caching: embeddings first, then chunks with their gradients."""

import torch, torch.nn as nn, torch.nn.functional as F
from contextlib import nullcontext
from transformers import BertConfig, BertModel

torch.manual_seed(3)
cfg = BertConfig(hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048, vocab_size=20000)
query, passage = BertModel(cfg, add_pooling_layer=False).cuda(), BertModel(cfg, add_pooling_layer=False).cuda()
temperature = nn.Parameter(torch.tensor(0.05, device="cuda"))
opt = torch.optim.AdamW([*query.parameters(), *passage.parameters(), temperature], 2e-5)


def pooled(model, ids, mask):
    with torch.autocast("cuda", torch.bfloat16):
        h = model(input_ids=ids, attention_mask=mask).last_hidden_state
    m = mask.unsqueeze(-1).to(h.dtype)
    return F.normalize(((h * m).sum(1) / m.sum(1)).float(), dim=-1)


class Rng:
    """Keeps the state of the generators, so that dropout is the same in the second forward pass."""

    def __init__(self):
        self.cpu, self.gpu = torch.get_rng_state(), torch.cuda.get_rng_state()

    def restore(self):
        torch.set_rng_state(self.cpu)
        torch.cuda.set_rng_state(self.gpu)


def batch(n, t):
    ids = torch.randint(1000, 20000, (n, t))
    lengths = torch.randint(t // 2, t + 1, (n,))
    lengths[0] = t
    mask = (torch.arange(t) < lengths[:, None]).long()
    return (ids * mask).cuda(), mask.cuda()


for step in range(3):
    parts = [(query, *batch(256, 48)), (passage, *batch(256, 160))]
    cached, states = [], []
    for model, ids, mask in parts:
        outs, seen = [], []
        with torch.no_grad():
            for i in range(0, len(ids), 32):
                seen.append(Rng())
                outs.append(pooled(model, ids[i : i + 32], mask[i : i + 32]))
        cached.append(torch.cat(outs).requires_grad_())
        states.append(seen)
    scores = cached[0] @ cached[1].T / temperature
    loss = (F.cross_entropy(scores, torch.arange(256, device="cuda")) + F.cross_entropy(scores.T, torch.arange(256, device="cuda"))) / 2
    loss.backward()
    for (model, ids, mask), rows, seen in zip(parts, cached, states):
        for k, i in enumerate(range(0, len(ids), 32)):
            seen[k].restore()
            with nullcontext():
                again = pooled(model, ids[i : i + 32], mask[i : i + 32])
            torch.dot(again.flatten(), rows.grad[i : i + 32].flatten()).backward()
    nn.utils.clip_grad_norm_([*query.parameters(), *passage.parameters()], 1.0)
    opt.step()
    opt.zero_grad()
    print(step, loss.item(), temperature.item())
