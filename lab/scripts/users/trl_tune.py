"""SFT, DPO or GRPO with TRL on a small Llama with LoRA: `trl_tune.py sft|dpo|grpo`."""

import sys
import numpy as np
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

what = sys.argv[1] if len(sys.argv) > 1 else "sft"
size = 12000
vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, size)}}
raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tok = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", bos_token="<s>", unk_token="<unk>")
rng = np.random.default_rng(3)
words = lambda n: " ".join(f"w{i}" for i in rng.integers(4, size, n))
model = LlamaForCausalLM(LlamaConfig(vocab_size=size, hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12,
                                     num_key_value_heads=4, bos_token_id=1, eos_token_id=2, pad_token_id=0))  # fmt: skip
lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
common = dict(output_dir="trl_out", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4, logging_steps=1,
              report_to="none", save_strategy="no", bf16=True, learning_rate=1e-4)  # fmt: skip
if what == "sft":
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"text": [words(400) for _ in range(64)]})
    args = SFTConfig(**common, max_length=256, packing=False, gradient_checkpointing=True)
    trainer = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tok, peft_config=lora)
elif what == "dpo":
    from trl import DPOConfig, DPOTrainer

    data = Dataset.from_dict({"prompt": [words(64) for _ in range(64)], "chosen": [words(120) for _ in range(64)], "rejected": [words(90) for _ in range(64)]})
    args = DPOConfig(**common, beta=0.1, max_length=256)
    trainer = DPOTrainer(model=model, args=args, train_dataset=data, processing_class=tok, peft_config=lora)
else:
    from trl import GRPOConfig, GRPOTrainer

    data = Dataset.from_dict({"prompt": [words(48) for _ in range(64)]})
    args = GRPOConfig(**common, num_generations=4, max_completion_length=40, beta=0.04, generation_kwargs={"min_new_tokens": 40})
    trainer = GRPOTrainer(model=model, args=args, train_dataset=data, processing_class=tok, peft_config=lora,
                          reward_funcs=lambda completions, **kw: [float(len(set(c.split()))) for c in completions])  # fmt: skip
trainer.train()
