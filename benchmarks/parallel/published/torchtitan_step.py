"""Train torchtitan's own Llama 3 by FSDP2, as its published benchmarks do: ``torchrun ... torchtitan_step.py``.

With torchtitan 0.1.0 (``pip install torchtitan==0.1.0``), without a GPU:
``trainatomy run --gpu h100-96gb torchrun --nproc-per-node 8 torchtitan_step.py``.
"""

from __future__ import annotations

import argparse
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.models.llama3 import Transformer, llama3_configs
from torchtitan.models.llama3.infra.parallelize import apply_ac, apply_fsdp

VOCABULARY = 128256

parser = argparse.ArgumentParser()
parser.add_argument("--size", default="8B")
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--length", type=int, default=8192)
parser.add_argument("--checkpointing", default="selective", choices=("none", "selective", "full"))
parser.add_argument("--option", default="op", help="of selective checkpointing: op, or every N-th layer")
parser.add_argument("--steps", type=int, default=3)
options = parser.parse_args()

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp_shard_cp",))
config = llama3_configs[options.size]
config.vocab_size, config.max_seq_len = VOCABULARY, options.length
with torch.device("meta"):
    model = Transformer(config)
if options.checkpointing != "none":
    apply_ac(model, SimpleNamespace(mode=options.checkpointing, selective_ac_option=options.option))
apply_fsdp(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, pp_enabled=False)
model.to_empty(device="cuda")
with torch.no_grad():
    model.init_weights(buffer_device="cuda")
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
for _ in range(options.steps):
    tokens, labels = (torch.randint(0, VOCABULARY, (options.batch, options.length)).cuda() for _ in range(2))
    optimizer.zero_grad()
    logits = model(tokens)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
    del logits
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
dist.destroy_process_group()
