"""Further adapters of peft on a small T5 or Qwen, in a plain loop: `peft_more.py prefix|prompt|vera|fourier|boft|ln|randlora|shira`."""

import sys, torch
from peft import BOFTConfig, FourierFTConfig, LNTuningConfig, PrefixTuningConfig, PromptTuningConfig, RandLoraConfig, ShiraConfig, VeraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

kind, where = sys.argv[1], ["q_proj", "down_proj"]
set_seed(4)
configs = {
    "prefix": lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=20, prefix_projection=True, encoder_hidden_size=256),
    "prompt": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=32),
    "vera": lambda: VeraConfig(r=64, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "fourier": lambda: FourierFTConfig(n_frequency=1000, target_modules=where, task_type="CAUSAL_LM"),
    "boft": lambda: BOFTConfig(boft_block_size=8, boft_n_butterfly_factor=2, target_modules=where, task_type="CAUSAL_LM"),
    "ln": lambda: LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm", "norm"], task_type="CAUSAL_LM"),
    "randlora": lambda: RandLoraConfig(r=16, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "shira": lambda: ShiraConfig(r=16, target_modules=where, task_type="CAUSAL_LM"),
}
config = Qwen2Config(hidden_size=640, intermediate_size=1792, num_hidden_layers=6, num_attention_heads=10, num_key_value_heads=2, vocab_size=20000)
model = get_peft_model(Qwen2ForCausalLM(config), configs[kind]()).cuda()
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
model.train()
for step in range(4):
    ids = torch.randint(20000, (6, 256), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    print(step, loss.item())
