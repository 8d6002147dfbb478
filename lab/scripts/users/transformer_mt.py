import math, random, torch, torch.nn as nn
from torch.nn.utils.rnn import pad_sequence

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
random.seed(0)
PAD, BOS, EOS, VS, VT = 1, 2, 3, 12000, 10000


class PositionalEncoding(nn.Module):
    def __init__(self, emb, dropout, maxlen=5000):
        super().__init__()
        den = torch.exp(-torch.arange(0, emb, 2) * math.log(10000) / emb)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        pe = torch.zeros((maxlen, emb))
        pe[:, 0::2] = torch.sin(pos * den)
        pe[:, 1::2] = torch.cos(pos * den)
        pe = pe.unsqueeze(-2)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pos_embedding", pe)

    def forward(self, x):
        return self.dropout(x + self.pos_embedding[: x.size(0), :])


class Seq2SeqTransformer(nn.Module):
    def __init__(self, n=3, emb=512, heads=8, ff=512, dropout=0.1):
        super().__init__()
        self.transformer = nn.Transformer(
            d_model=emb, nhead=heads, num_encoder_layers=n, num_decoder_layers=n, dim_feedforward=ff, dropout=dropout
        )
        self.generator = nn.Linear(emb, VT)
        self.src_tok_emb, self.tgt_tok_emb = nn.Embedding(VS, emb), nn.Embedding(VT, emb)
        self.positional_encoding = PositionalEncoding(emb, dropout)
        self.emb = emb

    def forward(self, src, trg, src_mask, tgt_mask, src_pad, tgt_pad, mem_pad):
        s = self.positional_encoding(self.src_tok_emb(src.long()) * math.sqrt(self.emb))
        t = self.positional_encoding(self.tgt_tok_emb(trg.long()) * math.sqrt(self.emb))
        return self.generator(self.transformer(s, t, src_mask, tgt_mask, None, src_pad, tgt_pad, mem_pad))


def gen_mask(sz):
    m = (torch.triu(torch.ones((sz, sz), device=DEVICE)) == 1).transpose(0, 1)
    return m.float().masked_fill(m == 0, float("-inf")).masked_fill(m == 1, float(0.0))


def create_mask(src, tgt):
    return (
        torch.zeros((src.shape[0], src.shape[0]), device=DEVICE).type(torch.bool),
        gen_mask(tgt.shape[0]),
        (src == PAD).transpose(0, 1),
        (tgt == PAD).transpose(0, 1),
    )


data = [
    (
        torch.tensor([BOS] + [random.randrange(4, VS) for _ in range(random.randint(5, 40))] + [EOS]),
        torch.tensor([BOS] + [random.randrange(4, VT) for _ in range(random.randint(5, 40))] + [EOS]),
    )
    for _ in range(1000)
]


def collate_fn(b):
    return pad_sequence([s for s, _ in b], padding_value=PAD), pad_sequence([t for _, t in b], padding_value=PAD)


model = Seq2SeqTransformer()
for p in model.parameters():
    if p.dim() > 1:
        nn.init.xavier_uniform_(p)
model = model.to(DEVICE)
loss_fn = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
sched = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 512**-0.5 * min((s + 1) ** -0.5, (s + 1) * 4000**-1.5))


def run(dl, train=True):
    model.train(train)
    losses = 0
    for src, tgt in dl:
        src, tgt = src.to(DEVICE), tgt.to(DEVICE)
        tgt_in = tgt[:-1, :]
        sm, tm, sp, tp = create_mask(src, tgt_in)
        logits = model(src, tgt_in, sm, tm, sp, tp, sp)
        out = tgt[1:, :]
        loss = loss_fn(logits.reshape(-1, logits.shape[-1]), out.reshape(-1))
        if train:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sched.step()
        losses += loss.item()
    return losses / len(dl)


for epoch in range(1, 4):
    tl = run(torch.utils.data.DataLoader(data[:900], batch_size=128, shuffle=True, collate_fn=collate_fn))
    with torch.no_grad():
        vl = run(torch.utils.data.DataLoader(data[900:], batch_size=128, collate_fn=collate_fn), False)
    print(f"Epoch: {epoch}, Train loss: {tl:.3f}, Val loss: {vl:.3f}")
