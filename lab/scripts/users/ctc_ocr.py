import string
import torch
from torch import nn
from torch.utils.data import Dataset, DataLoader

CHARS = "-" + string.ascii_lowercase + string.digits


class Synth(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(1)
        self.images = torch.rand(n, 1, 32, 160, generator=g)
        self.lengths = torch.randint(3, 12, (n,), generator=g)
        self.texts = [torch.randint(1, len(CHARS), (int(l),), generator=g) for l in self.lengths]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.texts[i]


def collate(batch):
    images, texts = zip(*batch)
    return torch.stack(images), torch.cat(texts), torch.tensor([len(t) for t in texts])


class BidirectionalLSTM(nn.Module):
    def __init__(self, i, h, o):
        super().__init__()
        self.rnn = nn.LSTM(i, h, bidirectional=True)
        self.embedding = nn.Linear(h * 2, o)

    def forward(self, x):
        recurrent, _ = self.rnn(x)
        T, b, h = recurrent.size()
        return self.embedding(recurrent.view(T * b, h)).view(T, b, -1)


class CRNN(nn.Module):
    def __init__(self, classes, hidden=256):
        super().__init__()
        cnn = nn.Sequential()
        nm = [64, 128, 256, 256, 512, 512, 512]
        for i in range(7):
            k, p = (2, 0) if i == 6 else (3, 1)
            cnn.add_module(f"conv{i}", nn.Conv2d(1 if i == 0 else nm[i - 1], nm[i], k, 1, p))
            if i in (2, 4, 6):
                cnn.add_module(f"batchnorm{i}", nn.BatchNorm2d(nm[i]))
            cnn.add_module(f"relu{i}", nn.ReLU(True))
            if i in (0, 1):
                cnn.add_module(f"pooling{i}", nn.MaxPool2d(2, 2))
            if i in (3, 5):
                cnn.add_module(f"pooling{i}", nn.MaxPool2d((2, 2), (2, 1), (0, 1)))
        self.cnn = cnn
        self.rnn = nn.Sequential(BidirectionalLSTM(512, hidden, hidden), BidirectionalLSTM(hidden, hidden, classes))

    def forward(self, x):
        conv = self.cnn(x)
        conv = conv.squeeze(2).permute(2, 0, 1)
        return self.rnn(conv)


def weights_init(m):
    name = m.__class__.__name__
    if name.find("Conv") != -1:
        m.weight.data.normal_(0.0, 0.02)
    elif name.find("BatchNorm") != -1:
        m.weight.data.normal_(1.0, 0.02)
        m.bias.data.fill_(0)


crnn = CRNN(len(CHARS))
crnn.apply(weights_init)
criterion = nn.CTCLoss(zero_infinity=True)
crnn.cuda()
criterion = criterion.cuda()
optimizer = torch.optim.RMSprop(crnn.parameters(), lr=0.001)
train_loader = DataLoader(Synth(512), batch_size=64, shuffle=False, collate_fn=collate, num_workers=1)
for epoch in range(1):
    for images, text, length in train_loader:
        preds = crnn(images.cuda()).log_softmax(2)
        preds_size = torch.full((images.size(0),), preds.size(0), dtype=torch.long)
        cost = criterion(preds, text.cuda(), preds_size.cuda(), length.cuda())
        crnn.zero_grad()
        cost.backward()
        optimizer.step()
        print(cost.item())
    crnn.eval()
    with torch.no_grad():
        images, text, length = next(iter(train_loader))
        _, best = crnn(images.cuda()).max(2)
        decoded = best.transpose(1, 0).contiguous().tolist()
        print("".join(CHARS[c] for c in decoded[0] if c))
