"""REINFORCE with a leave-one-out baseline: generate(), a frozen reference, KL, a reward model, by hand."""

import copy, torch, torch.nn.functional as F
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, GenerationConfig

cfg = GPT2Config(n_layer=6, n_embd=512, n_head=8, vocab_size=20000, bos_token_id=1, eos_token_id=2, pad_token_id=0)
policy = GPT2LMHeadModel(cfg).cuda()
reference = copy.deepcopy(policy).eval().requires_grad_(False)
judge_cfg = copy.deepcopy(cfg)
judge_cfg.num_labels, judge_cfg.n_layer = 1, 3
judge = GPT2ForSequenceClassification(judge_cfg).cuda().eval()
opt = torch.optim.AdamW(policy.parameters(), 1e-6, weight_decay=0.0)
how = GenerationConfig(max_new_tokens=48, min_new_tokens=48, do_sample=True, top_k=50, temperature=0.9, pad_token_id=0, eos_token_id=2)


def logps(model, ids, start):
    logits = model(ids, attention_mask=torch.ones_like(ids)).logits[:, start - 1 : -1].float() / 0.9
    return torch.log_softmax(logits, -1).gather(-1, ids[:, start:, None]).squeeze(-1)


for step in range(3):
    prompts = torch.randint(3, 20000, (8, 64), device="cuda").repeat_interleave(4, 0)
    policy.eval()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        rows = policy.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=how)
        old, ref = logps(policy, rows, 64), logps(reference, rows, 64)
        reward = judge(rows, attention_mask=torch.ones_like(rows)).logits.squeeze(-1).float()
    reward = reward - 0.05 * (old - ref).sum(-1)
    groups = reward.view(8, 4)
    advantage = (groups - (groups.sum(1, keepdim=True) - groups) / 3).flatten()
    policy.train()
    for part in torch.randperm(32, device="cuda").split(16):
        with torch.autocast("cuda", torch.bfloat16):
            now = logps(policy, rows[part], 64)
        ratio = (now.sum(-1) - old[part].sum(-1)).exp()
        loss = -(ratio * advantage[part]).mean()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    print(step, loss.item(), reward.mean().item(), rows.shape)
