"""Adapters of peft on a small decoder in a plain loop with accelerate: --kind loha, ia3, oft, dora, adalora, lokr."""

import argparse, torch
from accelerate import Accelerator
from peft import AdaLoraConfig, IA3Config, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import Qwen2Config, Qwen2ForCausalLM, get_cosine_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--kind", default="dora")
args = parser.parse_args()
where = ["q_proj", "v_proj", "down_proj"]
configs = {
    "dora": lambda: LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, use_dora=True, target_modules=where, task_type="CAUSAL_LM"),
    "pissa": lambda: LoraConfig(r=8, init_lora_weights="pissa_niter_2", target_modules=where, task_type="CAUSAL_LM"),
    "rs": lambda: LoraConfig(r=32, use_rslora=True, bias="lora_only", modules_to_save=["lm_head"], target_modules="all-linear", task_type="CAUSAL_LM"),
    "adalora": lambda: AdaLoraConfig(init_r=12, target_r=6, total_step=10, tinit=1, tfinal=2, target_modules=where, task_type="CAUSAL_LM"),
    "loha": lambda: LoHaConfig(r=8, alpha=16, target_modules=where, task_type="CAUSAL_LM"),
    "lokr": lambda: LoKrConfig(r=8, alpha=16, target_modules=where, task_type="CAUSAL_LM"),
    "ia3": lambda: IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    "oft": lambda: OFTConfig(r=0, oft_block_size=32, target_modules=where, task_type="CAUSAL_LM"),
}
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
config = Qwen2Config(hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12, num_key_value_heads=4, vocab_size=32000)
model = get_peft_model(Qwen2ForCausalLM(config), configs[args.kind]())
model.print_trainable_parameters()
rows = [{"input_ids": torch.randint(32000, (384,))} for _ in range(64)]
loader = DataLoader(rows, batch_size=4, shuffle=True)
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 2e-4)
schedule = get_cosine_schedule_with_warmup(opt, 2, 16)
model, opt, loader, schedule = accelerator.prepare(model, opt, loader, schedule)
model.train()
for step, batch in enumerate(loader):
    with accelerator.accumulate(model):
        loss = model(**batch, labels=batch["input_ids"]).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        schedule.step()
        opt.zero_grad()
    if step >= 9:
        break
print(loss.item())
