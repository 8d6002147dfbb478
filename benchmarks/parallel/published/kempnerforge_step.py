"""Train KempnerForge's own 13B model by FSDP2, as its published benchmark does: ``torchrun ... kempnerforge_step.py``.

With a checkout of github.com/KempnerInstitute/KempnerForge (5666d0d) on ``PYTHONPATH``, without a GPU:
``trainatomy run --gpu h200 torchrun --nnodes 2 --nproc-per-node 4 kempnerforge_step.py``.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from kempnerforge.config.schema import ActivationCheckpointing, ModelConfig
from kempnerforge.distributed.parallel import apply_ac, apply_fsdp2
from kempnerforge.distributed.utils import clip_grad_norm_
from kempnerforge.model.position import precompute_rope_frequencies
from kempnerforge.model.transformer import Transformer
from kempnerforge.training.grad import maybe_no_sync
from torch.distributed.device_mesh import init_device_mesh

VOCABULARY, BATCH, ACCUMULATION, LENGTH, BASE = 128256, 4, 4, 4096, 500000.0

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
config = ModelConfig(
    dim=5120, n_layers=40, n_heads=40, n_kv_heads=8, vocab_size=VOCABULARY, ffn_dim_multiplier=1.3,
    max_seq_len=LENGTH, rope_theta=BASE,
)  # fmt: skip
with torch.device("meta"):
    model = Transformer(config)
model.to_empty(device="cuda")
model.to(torch.bfloat16)
frequencies = precompute_rope_frequencies(config.head_dim, LENGTH, BASE)
model._rope_cos, model._rope_sin = (each.cuda() for each in frequencies)
apply_ac(model, ActivationCheckpointing.full)
apply_fsdp2(model, mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for _ in range(2):
    for micro in range(ACCUMULATION):
        tokens, labels = (torch.randint(0, VOCABULARY, (BATCH, LENGTH)).cuda() for _ in range(2))
        with maybe_no_sync(model, micro, ACCUMULATION):
            logits = model(tokens)
            loss = torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
            (loss / ACCUMULATION).backward()
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
