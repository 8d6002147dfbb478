import itertools, random
import torch
import torch.nn as nn


class ImagePool:
    def __init__(self, size=50):
        self.size, self.images = size, []

    def query(self, images):
        out = []
        for image in images.data:
            image = torch.unsqueeze(image, 0)
            if len(self.images) < self.size:
                self.images.append(image)
                out.append(image)
            elif random.uniform(0, 1) > 0.5:
                i = random.randint(0, self.size - 1)
                out.append(self.images[i].clone())
                self.images[i] = image
            else:
                out.append(image)
        return torch.cat(out, 0)


class ResnetBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.conv = nn.Sequential(
            nn.ReflectionPad2d(1),
            nn.Conv2d(d, d, 3),
            nn.InstanceNorm2d(d),
            nn.ReLU(True),
            nn.ReflectionPad2d(1),
            nn.Conv2d(d, d, 3),
            nn.InstanceNorm2d(d),
        )

    def forward(self, x):
        return x + self.conv(x)


def generator(ngf=64, blocks=6):
    m = [nn.ReflectionPad2d(3), nn.Conv2d(3, ngf, 7), nn.InstanceNorm2d(ngf), nn.ReLU(True)]
    for i in range(2):
        m += [nn.Conv2d(ngf * 2**i, ngf * 2 ** (i + 1), 3, 2, 1), nn.InstanceNorm2d(ngf * 2 ** (i + 1)), nn.ReLU(True)]
    m += [ResnetBlock(ngf * 4) for _ in range(blocks)]
    for i in (2, 1):
        m += [
            nn.ConvTranspose2d(ngf * 2**i, ngf * 2 ** (i - 1), 3, 2, 1, output_padding=1),
            nn.InstanceNorm2d(ngf * 2 ** (i - 1)),
            nn.ReLU(True),
        ]
    return nn.Sequential(*m, nn.ReflectionPad2d(3), nn.Conv2d(ngf, 3, 7), nn.Tanh())


def discriminator(ndf=64):
    m = [nn.Conv2d(3, ndf, 4, 2, 1), nn.LeakyReLU(0.2, True)]
    for i, s in ((1, 2), (2, 2), (3, 1)):
        m += [
            nn.Conv2d(ndf * 2 ** (i - 1), ndf * 2**i, 4, s, 1),
            nn.InstanceNorm2d(ndf * 2**i),
            nn.LeakyReLU(0.2, True),
        ]
    return nn.Sequential(*m, nn.Conv2d(ndf * 8, 1, 4, 1, 1))


device = torch.device("cuda:0")
G_A, G_B, D_A, D_B = (
    generator().to(device),
    generator().to(device),
    discriminator().to(device),
    discriminator().to(device),
)
opt_G = torch.optim.Adam(itertools.chain(G_A.parameters(), G_B.parameters()), lr=2e-4, betas=(0.5, 0.999))
opt_D = torch.optim.Adam(itertools.chain(D_A.parameters(), D_B.parameters()), lr=2e-4, betas=(0.5, 0.999))
schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1.0 - max(0, e - 1) / 2) for o in (opt_G, opt_D)]
gan, l1 = nn.MSELoss(), nn.L1Loss()
pool_A, pool_B = ImagePool(), ImagePool()
for it in range(6):
    A, B = torch.rand(2, 3, 128, 128).to(device) * 2 - 1, torch.rand(2, 3, 128, 128).to(device) * 2 - 1
    fake_B, fake_A = G_A(A), G_B(B)
    rec_A, rec_B = G_B(fake_B), G_A(fake_A)
    for net in (D_A, D_B):
        for p in net.parameters():
            p.requires_grad = False
    opt_G.zero_grad()
    pa, pb = D_A(fake_B), D_B(fake_A)
    loss_G = (
        gan(pa, torch.tensor(1.0).to(device).expand_as(pa))
        + gan(pb, torch.tensor(1.0).to(device).expand_as(pb))
        + 10 * (l1(rec_A, A) + l1(rec_B, B))
        + 5 * (l1(G_A(B), B) + l1(G_B(A), A))
    )
    loss_G.backward()
    opt_G.step()
    for net in (D_A, D_B):
        for p in net.parameters():
            p.requires_grad = True
    opt_D.zero_grad()
    for net, real, fake in ((D_A, B, pool_B.query(fake_B)), (D_B, A, pool_A.query(fake_A))):
        r, f = net(real), net(fake.detach())
        loss_D = 0.5 * (gan(r, torch.ones_like(r)) + gan(f, torch.zeros_like(f)))
        loss_D.backward()
    opt_D.step()
    print(it, loss_G.item(), loss_D.item())
for s in schedulers:
    s.step()
