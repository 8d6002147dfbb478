import random, torch
import torch.nn as nn, torch.nn.functional as F
from torch import optim
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
random.seed(3)
torch.manual_seed(3)
SOS, EOS, PAD, V, H, MAXLEN = 0, 1, 2, 8000, 512, 20

pairs = [
    (
        [random.randrange(3, V) for _ in range(random.randint(4, MAXLEN - 1))],
        [random.randrange(3, V) for _ in range(random.randint(4, MAXLEN - 1))],
    )
    for _ in range(2000)
]


class EncoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, H, padding_idx=PAD)
        self.gru = nn.GRU(H, H, num_layers=2, bidirectional=True, dropout=0.1, batch_first=True)
        self.fc = nn.Linear(2 * H, H)

    def forward(self, src, lengths):
        x = pack_padded_sequence(self.embedding(src), lengths, batch_first=True, enforce_sorted=False)
        out, h = self.gru(x)
        out, _ = pad_packed_sequence(out, batch_first=True)
        h = torch.tanh(self.fc(torch.cat([h[-2], h[-1]], dim=1)))
        return self.fc(out), h


class AttnDecoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, H, padding_idx=PAD)
        self.Wa, self.Ua, self.Va = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, 1)
        self.cell = nn.GRUCell(2 * H, H)
        self.out = nn.Linear(H, V)

    def step(self, tok, h, enc, mask):
        e = self.embedding(tok)
        scores = self.Va(torch.tanh(self.Wa(h).unsqueeze(1) + self.Ua(enc))).squeeze(-1)
        scores = scores.masked_fill(mask, float("-inf"))
        ctx = torch.bmm(F.softmax(scores, -1).unsqueeze(1), enc).squeeze(1)
        h = self.cell(torch.cat([e, ctx], -1), h)
        return self.out(h), h

    def forward(self, enc, h, mask, target=None, teacher_forcing=0.5):
        tok = torch.full((enc.size(0),), SOS, dtype=torch.long, device=enc.device)
        outs = []
        for t in range(MAXLEN):
            logits, h = self.step(tok, h, enc, mask)
            outs.append(logits)
            if target is not None and random.random() < teacher_forcing:
                tok = target[:, t]
            else:
                tok = logits.topk(1)[1].squeeze(-1).detach()
        return F.log_softmax(torch.stack(outs, 1), dim=-1)


def collate(batch):
    src = pad_sequence([torch.tensor(s + [EOS]) for s, _ in batch], batch_first=True, padding_value=PAD)
    tgt = torch.full((len(batch), MAXLEN), PAD)
    for i, (_, t) in enumerate(batch):
        tgt[i, : len(t) + 1] = torch.tensor(t + [EOS])
    return src, torch.tensor([len(s) + 1 for s, _ in batch]), tgt


loader = torch.utils.data.DataLoader(pairs, batch_size=64, shuffle=True, collate_fn=collate)
enc, dec = EncoderRNN().to(device), AttnDecoderRNN().to(device)
eo, do = optim.Adam(enc.parameters(), lr=1e-3), optim.Adam(dec.parameters(), lr=1e-3)
crit = nn.NLLLoss(ignore_index=PAD)
for epoch in range(2):
    tot = 0
    for src, lens, tgt in loader:
        src, tgt = src.to(device), tgt.to(device)
        eo.zero_grad()
        do.zero_grad()
        e, h = enc(src, lens)
        out = dec(e, h, (src == PAD)[:, : e.size(1)], tgt)
        loss = crit(out.view(-1, V), tgt.view(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(list(enc.parameters()) + list(dec.parameters()), 1.0)
        eo.step()
        do.step()
        tot += loss.item()
    print(epoch, tot / len(loader))
