"""More trainers of TRL on a small Qwen: `trl_more.py kto|reward|rloo|dpo-full|sft-packed`."""

import sys
import numpy as np
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

what, size = sys.argv[1], 9000
vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, size)}}
raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tok = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", bos_token="<s>", unk_token="<unk>")
rng = np.random.default_rng(8)
words = lambda low, high: " ".join(f"w{i}" for i in rng.integers(4, size, rng.integers(low, high)))
config = Qwen2Config(vocab_size=size, hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2,
                     bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=True, num_labels=1)  # fmt: skip
lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
common = dict(output_dir="trl_out", per_device_train_batch_size=4, max_steps=4, logging_steps=1, report_to="none", save_strategy="no", bf16=True, seed=6)
rows = 64
if what == "kto":
    from trl import KTOConfig, KTOTrainer

    data = Dataset.from_dict({"prompt": [words(20, 60) for _ in range(rows)], "completion": [words(30, 100) for _ in range(rows)], "label": [i % 2 == 0 for i in range(rows)]})
    trainer = KTOTrainer(model=Qwen2ForCausalLM(config), args=KTOConfig(**common, max_length=160), train_dataset=data, processing_class=tok, peft_config=lora)
elif what == "reward":
    from trl import RewardConfig, RewardTrainer

    data = Dataset.from_dict({"chosen": [words(60, 180) for _ in range(rows)], "rejected": [words(60, 180) for _ in range(rows)]})
    args = RewardConfig(**common, max_length=200, gradient_accumulation_steps=2, center_rewards_coefficient=0.01)
    trainer = RewardTrainer(model=Qwen2ForSequenceClassification(config), args=args, train_dataset=data, processing_class=tok)
elif what == "rloo":
    from trl import RLOOConfig, RLOOTrainer

    data = Dataset.from_dict({"prompt": [words(24, 48) for _ in range(rows)]})
    args = RLOOConfig(**common, num_generations=4, max_completion_length=32, generation_kwargs={"min_new_tokens": 32})
    trainer = RLOOTrainer(model=Qwen2ForCausalLM(config), args=args, train_dataset=data, processing_class=tok, peft_config=lora,
                          reward_funcs=lambda completions, **kw: [float(len(c)) for c in completions])  # fmt: skip
elif what == "dpo-full":
    from trl import DPOConfig, DPOTrainer

    data = Dataset.from_dict({"prompt": [words(20, 60) for _ in range(rows)], "chosen": [words(30, 120) for _ in range(rows)], "rejected": [words(30, 120) for _ in range(rows)]})
    args = DPOConfig(**common, max_length=200, loss_type="ipo", gradient_checkpointing=True)
    trainer = DPOTrainer(model=Qwen2ForCausalLM(config), ref_model=Qwen2ForCausalLM(config), args=args, train_dataset=data, processing_class=tok)
else:
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"prompt": [words(20, 200) for _ in range(2 * rows)], "completion": [words(30, 300) for _ in range(2 * rows)]})
    args = SFTConfig(**common, max_length=512, packing=True, packing_strategy="wrapped", completion_only_loss=True)
    trainer = SFTTrainer(model=Qwen2ForCausalLM(config), args=args, train_dataset=data, processing_class=tok)
trainer.train()
