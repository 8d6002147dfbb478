import numpy as np
import torch
import torch.nn as nn

torch.set_default_dtype(torch.float32)
device = torch.device("cuda:0")


class MLP(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.net = nn.Sequential()
        for i in range(len(layers) - 1):
            self.net.add_module(f"linear_{i}", nn.Linear(layers[i], layers[i + 1]))
            if i < len(layers) - 2:
                self.net.add_module(f"tanh_{i}", nn.Tanh())
        self.apply(self.init)

    def init(self, m):
        if isinstance(m, nn.Linear):
            nn.init.xavier_normal_(m.weight)
            nn.init.zeros_(m.bias)

    def forward(self, x):
        return self.net(x)


class PhysicsInformedNN:
    def __init__(self, n_u=100, n_f=20000):
        self.x_u = torch.tensor(np.random.rand(n_u, 1), requires_grad=True).float().to(device)
        self.t_u = torch.tensor(np.random.rand(n_u, 1), requires_grad=True).float().to(device)
        self.x_f = torch.tensor(np.random.rand(n_f, 1), requires_grad=True).float().to(device)
        self.t_f = torch.tensor(np.random.rand(n_f, 1), requires_grad=True).float().to(device)
        self.u = torch.tensor(np.random.rand(n_u, 1)).float().to(device)
        self.nu = torch.nn.Parameter(torch.tensor([0.01], requires_grad=True).to(device))
        self.dnn = MLP([2, 128, 128, 128, 128, 1]).to(device)
        self.dnn.register_parameter("nu", self.nu)
        self.optimizer = torch.optim.Adam(self.dnn.parameters())
        self.iter = 0

    def net_u(self, x, t):
        return self.dnn(torch.cat([x, t], dim=1))

    def net_f(self, x, t):
        u = self.net_u(x, t)
        u_t = torch.autograd.grad(u, t, grad_outputs=torch.ones_like(u), retain_graph=True, create_graph=True)[0]
        u_x = torch.autograd.grad(u, x, grad_outputs=torch.ones_like(u), retain_graph=True, create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, grad_outputs=torch.ones_like(u_x), retain_graph=True, create_graph=True)[0]
        return u_t + u * u_x - self.nu * u_xx

    def train(self, n_iter):
        self.dnn.train()
        for epoch in range(n_iter):
            loss = torch.mean((self.u - self.net_u(self.x_u, self.t_u)) ** 2) + torch.mean(
                self.net_f(self.x_f, self.t_f) ** 2
            )
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if epoch % 2 == 0:
                print("It: %d, Loss: %.3e, nu %.5f" % (epoch, loss.item(), self.nu.item()))


model = PhysicsInformedNN()
model.train(10)
