import torch, random
from torch.utils.data import IterableDataset, DataLoader
from transformers import RobertaConfig, RobertaForMaskedLM, get_linear_schedule_with_warmup


class Stream(IterableDataset):
    def __init__(self, n=200, lo=30, hi=200):
        self.n, self.lo, self.hi = n, lo, hi

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        for _ in range(self.n // (info.num_workers if info else 1)):
            yield [random.randint(5, 29999) for _ in range(random.randint(self.lo, self.hi))]


def collate(b):
    n = max(map(len, b))
    ids = torch.full((len(b), n), 1)
    att = torch.zeros(len(b), n, dtype=torch.long)
    for i, x in enumerate(b):
        ids[i, : len(x)] = torch.tensor(x)
        att[i, : len(x)] = 1
    lab = ids.clone()
    prob = torch.full(lab.shape, 0.15).masked_fill(att == 0, 0)
    m = torch.bernoulli(prob).bool()
    lab[~m] = -100
    ids[torch.bernoulli(torch.full(lab.shape, 0.8)).bool() & m] = 4
    return dict(input_ids=ids, attention_mask=att, labels=lab)


model = RobertaForMaskedLM(
    RobertaConfig(
        vocab_size=30000,
        hidden_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        intermediate_size=2048,
        max_position_embeddings=514,
    )
)
model.gradient_checkpointing_enable()
model.cuda()
opt = torch.optim.AdamW(model.parameters(), 1e-4)
sch = get_linear_schedule_with_warmup(opt, 10, 100)
model.train()
for i, b in enumerate(DataLoader(Stream(), 16, collate_fn=collate, num_workers=2)):
    b = {k: v.to("cuda") for k, v in b.items()}
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(**b)
    (out.loss / 2).backward()
    if (i + 1) % 2 == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sch.step()
        opt.zero_grad()
    print(i, out.loss.item(), b["input_ids"].shape)
