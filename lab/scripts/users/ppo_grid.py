"""PPO with a recurrent policy in a vectorised grid world that runs on the GPU: GAE, clipping, minibatches."""

import torch, torch.nn as nn
from torch.distributions import Categorical

ENVS, HORIZON, SIZE, EPOCHS, PARTS = 256, 64, 11, 2, 4
dev = "cuda" if torch.cuda.is_available() else "cpu"


class Grid:
    def __init__(self):
        self.pos = torch.randint(0, SIZE, (ENVS, 2), device=dev)
        self.goal = torch.randint(0, SIZE, (ENVS, 2), device=dev)
        self.moves = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0], [0, 0]], device=dev)

    def see(self):
        x = torch.zeros(ENVS, 2, SIZE, SIZE, device=dev)
        rows = torch.arange(ENVS, device=dev)
        x[rows, 0, self.pos[:, 0], self.pos[:, 1]] = 1
        x[rows, 1, self.goal[:, 0], self.goal[:, 1]] = 1
        return x

    def step(self, action):
        self.pos = (self.pos + self.moves[action]).clamp(0, SIZE - 1)
        done = (self.pos == self.goal).all(-1)
        fresh = torch.randint(0, SIZE, (ENVS, 2), device=dev)
        self.goal = torch.where(done[:, None], fresh, self.goal)
        return self.see(), done.float() - 0.01, done


class Agent(nn.Module):
    def __init__(self, hidden=512):
        super().__init__()
        self.eyes = nn.Sequential(nn.Flatten(), nn.Linear(2 * SIZE * SIZE, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.memory = nn.GRUCell(hidden, hidden)
        self.actor, self.critic = nn.Linear(hidden, 5), nn.Linear(hidden, 1)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.orthogonal_(m.weight, 2**0.5)
                nn.init.zeros_(m.bias)

    def forward(self, obs, h, done):
        h = self.memory(self.eyes(obs), h * (1 - done.float()).unsqueeze(1))
        return Categorical(logits=self.actor(h)), self.critic(h).squeeze(-1), h


env, agent = Grid(), Agent().to(dev)
opt = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
obs, done, h = env.see(), torch.zeros(ENVS, dtype=torch.bool, device=dev), torch.zeros(ENVS, 512, device=dev)
for update in range(3):
    for group in opt.param_groups:
        group["lr"] = 2.5e-4 * (1 - update / 3)
    buf = {k: [] for k in ("obs", "act", "logp", "val", "rew", "done")}
    h0 = h.clone()
    with torch.no_grad():
        for _ in range(HORIZON):
            dist, value, h = agent(obs, h, done)
            action = dist.sample()
            buf["obs"].append(obs); buf["act"].append(action); buf["logp"].append(dist.log_prob(action))
            buf["val"].append(value); buf["done"].append(done)
            obs, reward, done = env.step(action)
            buf["rew"].append(reward)
        buf = {k: torch.stack(v) for k, v in buf.items()}
        last = agent(obs, h, done)[1]
        adv, acc = torch.zeros_like(buf["rew"]), 0
        for t in reversed(range(HORIZON)):
            alive = 1 - (done if t == HORIZON - 1 else buf["done"][t + 1]).float()
            after = last if t == HORIZON - 1 else buf["val"][t + 1]
            delta = buf["rew"][t] + 0.99 * after * alive - buf["val"][t]
            acc = delta + 0.99 * 0.95 * alive * acc
            adv[t] = acc
        ret = adv + buf["val"]
    for _ in range(EPOCHS):
        for some in torch.randperm(ENVS, device=dev).chunk(PARTS):
            hidden, logps, values, entropy = h0[some], [], [], []
            for t in range(HORIZON):
                dist, value, hidden = agent(buf["obs"][t, some], hidden, buf["done"][t, some])
                logps.append(dist.log_prob(buf["act"][t, some])); values.append(value); entropy.append(dist.entropy())
            logp, value = torch.stack(logps), torch.stack(values)
            ratio = (logp - buf["logp"][:, some]).exp()
            a = adv[:, some]
            a = (a - a.mean()) / (a.std() + 1e-8)
            pg = torch.max(-a * ratio, -a * ratio.clamp(0.8, 1.2)).mean()
            clipped = buf["val"][:, some] + (value - buf["val"][:, some]).clamp(-0.2, 0.2)
            vf = 0.5 * torch.max((value - ret[:, some]) ** 2, (clipped - ret[:, some]) ** 2).mean()
            loss = pg + 0.5 * vf - 0.01 * torch.stack(entropy).mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            opt.step()
        kl = (buf["logp"][:, some] - logp).mean().item()
        if kl > 0.05:
            break
    print(f"update {update}: reward {buf['rew'].mean().item():.4f} kl {kl:.4f}")
