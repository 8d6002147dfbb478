"""The optimizer step in the backward pass (post-accumulate hooks), with a hand-written factored optimizer."""

import torch, torch.nn as nn
from transformers import LlamaConfig, LlamaForCausalLM


class Factored(torch.optim.Optimizer):
    """Adafactor without momentum, for one tensor at a time."""

    def __init__(self, params, lr=1e-3, eps=1e-30, decay=0.8):
        super().__init__(params, dict(lr=lr, eps=eps, decay=decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g, state = p.grad.float(), self.state[p]
                if not state:
                    state["step"] = 0
                    if g.dim() == 2:
                        state["r"], state["c"] = torch.zeros(g.size(0), device=g.device), torch.zeros(g.size(1), device=g.device)
                    else:
                        state["v"] = torch.zeros_like(g)
                state["step"] += 1
                beta = 1 - state["step"] ** -group["decay"]
                sq = g.square().add_(group["eps"])
                if g.dim() == 2:
                    state["r"].lerp_(sq.mean(1), 1 - beta)
                    state["c"].lerp_(sq.mean(0), 1 - beta)
                    scale = (state["r"] / state["r"].mean()).rsqrt().unsqueeze(1) * state["c"].rsqrt().unsqueeze(0)
                    g.mul_(scale)
                else:
                    state["v"].lerp_(sq, 1 - beta)
                    g.mul_(state["v"].rsqrt())
                g.div_(torch.clamp(g.norm() / g.numel() ** 0.5, min=1.0))
                p.sub_((group["lr"] * g).to(p.dtype))


config = LlamaConfig(vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
                     num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=2048)  # fmt: skip
model = LlamaForCausalLM(config).to(torch.bfloat16).cuda()
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.config.use_cache = False
optimizers = {p: Factored([p]) for p in model.parameters()}


def step_now(p):
    optimizers[p].step()
    optimizers[p].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(step_now)
model.train()
for step in range(4):
    ids = torch.randint(0, 32000, (4, 1024), device="cuda")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    print(step, round(loss.item(), 4), torch.cuda.max_memory_allocated() >> 20, "MiB")
