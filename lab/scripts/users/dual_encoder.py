"""Dense retrieval: two BERT encoders, hard negatives, lengths that differ, GradScaler, checkpointing, a seeded loader."""

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertModel, set_seed
import torch.nn.functional as F


class Pairs(Dataset):
    def __init__(self, n=600):
        g = torch.Generator().manual_seed(5)
        self.q = [torch.randint(1000, 30000, (int(k),), generator=g) for k in torch.randint(6, 32, (n,), generator=g)]
        self.d = [torch.randint(1000, 30000, (int(k),), generator=g) for k in torch.randint(40, 220, (3 * n,), generator=g)]

    def __len__(self):
        return len(self.q)

    def __getitem__(self, i):
        return self.q[i], self.d[3 * i : 3 * i + 3]


def pad(rows):
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def collate(batch):
    return pad([q for q, _ in batch]), pad([d[k] for k in range(3) for _, d in batch])


set_seed(7)
config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536)
query, document = BertModel(config, add_pooling_layer=False).cuda(), BertModel(config, add_pooling_layer=False).cuda()
document.gradient_checkpointing_enable()
query.train(), document.train()
loader = DataLoader(Pairs(), 24, shuffle=True, collate_fn=collate, drop_last=True)
opt = torch.optim.AdamW([*query.parameters(), *document.parameters()], 2e-5)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
for step, (q, d) in enumerate(loader):
    q, d = ({k: v.cuda(non_blocking=True) for k, v in one.items()} for one in (q, d))
    with torch.autocast("cuda", torch.float16):
        a = query(**q).last_hidden_state[:, 0]
        h = document(**d).last_hidden_state
        b = (h * d["attention_mask"][..., None]).sum(1) / d["attention_mask"].sum(1, keepdim=True)
        loss = F.cross_entropy(a.float() @ b.float().t() / 8, torch.arange(len(a), device="cuda"))
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_([*query.parameters(), *document.parameters()], 2.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    print(step, tuple(d["input_ids"].shape), loss.item())
    if step == 5:
        break
