"""A training loop with the profiler, memory history, NVTX ranges, events for timing and a memory summary."""

import contextlib, json, os, time, torch, torch.nn as nn
from torch.profiler import ProfilerActivity, profile, schedule

assert torch.cuda.is_available(), "this script needs a GPU"
torch.cuda.memory._record_memory_history(max_entries=10000)
name = torch.cuda.get_device_name(0)
major, minor = torch.cuda.get_device_capability()
dtype = torch.bfloat16 if major >= 8 else torch.float16
print(name, f"sm_{major}{minor}", torch.version.cuda, torch.backends.cudnn.version())


class Perceiver(nn.Module):
    def __init__(self, d=512, latents=256, depth=6):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, d) * 0.02)
        self.inp = nn.Linear(66, d)
        self.cross = nn.MultiheadAttention(d, 8, batch_first=True)
        self.body = nn.TransformerDecoder(nn.TransformerDecoderLayer(d, 8, 2048, 0.1, batch_first=True), depth)
        self.out = nn.Linear(d, 50)

    def forward(self, x):
        x = self.inp(x)
        z = self.latents.expand(len(x), -1, -1)
        z = z + self.cross(z, x, x, need_weights=False)[0]
        return self.out(self.body(z, x).mean(1))


model = Perceiver().cuda()
opt = torch.optim.RMSprop(model.parameters(), 1e-4, momentum=0.9, centered=True)
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
os.makedirs("log", exist_ok=True)
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], schedule=schedule(wait=1, warmup=1, active=2), profile_memory=True) as prof:
    for step in range(5):
        began = time.perf_counter()
        torch.cuda.nvtx.range_push(f"step {step}")
        x, y = torch.randn(16, 2048, 66, device="cuda"), torch.randint(50, (16,), device="cuda")
        start.record()
        with torch.autocast("cuda", dtype) if step % 2 == 0 else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        end.record()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()
        stats = torch.cuda.memory_stats()
        print(json.dumps({"step": step, "ms": start.elapsed_time(end), "host": time.perf_counter() - began, "peak": stats["allocated_bytes.all.peak"],
                          "retries": stats["num_alloc_retries"], "inactive": stats["inactive_split_bytes.all.current"]}))  # fmt: skip
        prof.step()
print(torch.cuda.memory_summary(abbreviated=True))
torch.cuda.memory._dump_snapshot("log/snapshot.pickle")
torch.cuda.memory._record_memory_history(enabled=None)
print(prof.key_averages().table(sort_by="self_cuda_memory_usage", row_limit=5)[:400])
