"""A vision-language model put together by hand: frozen ViT, a trained projector, a decoder with LoRA."""

import torch, torch.nn as nn
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPVisionConfig, CLIPVisionModel, Qwen2Config, Qwen2ForCausalLM, get_scheduler

IMAGE = 9


class Pairs(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        words = torch.randint(10, 20000, (90 + 40 * (i % 3),), generator=g)
        return {"pixels": torch.rand(3, 224, 224, generator=g), "ids": torch.cat([torch.full((256,), IMAGE), words]), "prompt": 276}


def collate(rows):
    n = max(len(r["ids"]) for r in rows)
    n = (n + 63) // 64 * 64
    ids = torch.zeros(len(rows), n, dtype=torch.long)
    labels = torch.full((len(rows), n), -100)
    for i, r in enumerate(rows):
        ids[i, : len(r["ids"])] = r["ids"]
        labels[i, r["prompt"] : len(r["ids"])] = r["ids"][r["prompt"] :]
    return {"pixels": torch.stack([r["pixels"] for r in rows]), "ids": ids, "labels": labels, "mask": (ids != 0).long()}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = CLIPVisionModel(CLIPVisionConfig(hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8, patch_size=14)).to(torch.bfloat16)
        self.tower.requires_grad_(False)
        llm = Qwen2ForCausalLM(Qwen2Config(vocab_size=20000, hidden_size=896, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=14, num_key_value_heads=2)).to(torch.bfloat16)
        self.llm = get_peft_model(llm, LoraConfig(r=32, lora_alpha=64, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM", use_rslora=True))
        self.projector = nn.Sequential(nn.Linear(512, 896), nn.GELU(), nn.Linear(896, 896))

    def forward(self, pixels, ids, labels, mask):
        with torch.no_grad():
            seen = self.tower(pixels.to(torch.bfloat16), output_hidden_states=True).hidden_states[-2][:, 1:]
        embeds = self.llm.get_input_embeddings()(ids)
        where = (ids == IMAGE).unsqueeze(-1).expand_as(embeds)
        embeds = embeds.masked_scatter(where, self.projector(seen.float()).to(embeds.dtype))
        return self.llm(inputs_embeds=embeds, attention_mask=mask, labels=labels, use_cache=False).loss


model = Model().cuda()
model.llm.print_trainable_parameters()
model.llm.gradient_checkpointing_enable()
model.llm.enable_input_require_grads()
loader = DataLoader(Pairs(), 8, collate_fn=collate, shuffle=False)
trained = [p for p in model.parameters() if p.requires_grad]
opt = torch.optim.AdamW(trained, 1e-4)
sched = get_scheduler("cosine", opt, num_warmup_steps=1, num_training_steps=6)
model.train()
model.tower.eval()
for step, batch in enumerate(loader):
    loss = model(**{k: v.cuda() for k, v in batch.items()})
    (loss / 2).backward()
    if step % 2:
        nn.utils.clip_grad_norm_(trained, 1.0)
        opt.step()
        sched.step()
        opt.zero_grad()
    print(step, f"{loss.item():.3f}")
