"""Dependency parser: BiLSTM over packed sentences, biaffine arcs, bilinear labels, CRF tagger with logsumexp."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

WORDS, TAGS, LABELS, B, T = 30000, 24, 40, 32, 40


class CRF(nn.Module):
    def __init__(self, tags):
        super().__init__()
        self.trans = nn.Parameter(torch.randn(tags, tags) / 10)
        self.start, self.end = nn.Parameter(torch.zeros(tags)), nn.Parameter(torch.zeros(tags))

    def forward(self, emissions, tags, mask):
        score = self.start + emissions[:, 0]
        gold = self.start[tags[:, 0]] + emissions[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, emissions.shape[1]):
            nxt = torch.logsumexp(score[:, :, None] + self.trans + emissions[:, t, None], 1)
            score = torch.where(mask[:, t, None], nxt, score)
            step = self.trans[tags[:, t - 1], tags[:, t]] + emissions[:, t].gather(1, tags[:, t, None]).squeeze(1)
            gold = gold + step * mask[:, t]
        return (torch.logsumexp(score + self.end, 1) - gold).mean()


class Parser(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 200, padding_idx=0)
        self.lstm = nn.LSTM(200, 256, 2, batch_first=True, bidirectional=True, dropout=0.3)
        self.head, self.dep = (nn.Sequential(nn.Linear(512, 300), nn.LeakyReLU(0.1), nn.Dropout(0.3)) for _ in range(2))
        self.arc = nn.Parameter(torch.randn(301, 300) / 20)
        self.label = nn.Bilinear(300, 300, LABELS)
        self.tag, self.crf = nn.Linear(512, TAGS), CRF(TAGS)

    def forward(self, words, lengths, heads, labels, tags):
        mask = words != 0
        packed = pack_padded_sequence(self.embed(words), lengths.cpu(), batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=words.shape[1])
        head, dep = self.head(h), self.dep(h)
        ones = torch.ones_like(dep[..., :1])
        arcs = torch.cat([dep, ones], -1) @ self.arc @ head.transpose(1, 2)
        arcs = arcs.masked_fill(~mask[:, None], float("-inf"))
        loss = nn.functional.cross_entropy(arcs[mask], heads[mask])
        chosen = head.gather(1, heads[..., None].expand(-1, -1, 300))
        loss = loss + nn.functional.cross_entropy(self.label(dep[mask], chosen[mask]), labels[mask])
        return loss + self.crf(self.tag(h), tags, mask)


model = Parser().cuda()
opt = torch.optim.Adam(model.parameters(), 2e-3, betas=(0.9, 0.9))
sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.999)
generator = torch.Generator().manual_seed(3)
for step in range(5):
    lengths = torch.randint(8, T + 1, (B,), generator=generator)
    lengths[0] = T
    words = torch.randint(1, WORDS, (B, T), generator=generator)
    words[torch.arange(T)[None] >= lengths[:, None]] = 0
    heads = (torch.rand(B, T, generator=generator) * lengths[:, None]).long()
    labels, tags = torch.randint(LABELS, (B, T), generator=generator), torch.randint(TAGS, (B, T), generator=generator)
    loss = model(words.cuda(), lengths, heads.cuda(), labels.cuda(), tags.cuda())
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    opt.step()
    sched.step()
    print(f"{step} {loss:.3f}")
