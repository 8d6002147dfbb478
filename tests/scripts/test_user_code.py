"""Code that users write: old tensor types, default devices, evaluations, checkpoints that are read again, monitors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from script_types import RunScript

from trainatomy.results.prediction import Prediction
from trainatomy.scripts.job import Outcome

LOOP = """
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
def step(x, y):
    model.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss
x, y = torch.randn(32, 64).cuda(), torch.randint(0, 10, (32,)).cuda()
"""


def prediction(outcome: Outcome) -> Prediction:
    assert outcome.message == ""
    assert outcome.prediction is not None
    return outcome.prediction


def peak(outcome: Outcome) -> int:
    return prediction(outcome).memory.peak_allocated_bytes


def kinds(outcome: Outcome) -> list[str]:
    script = prediction(outcome).script
    assert script is not None
    return [one.kind for one in script.stand_ins]


@pytest.mark.parametrize(
    "made",
    [
        "torch.cuda.FloatTensor(32, 64).normal_()",
        "torch.cuda.FloatTensor([[0.5] * 64] * 32)",
        "torch.zeros(32, 64).type(torch.cuda.FloatTensor)",
        "torch.zeros(32, 64).double().type('torch.cuda.FloatTensor')",
    ],
)
def test_old_tensor_types_make_tensors_on_the_gpu(run_script: RunScript, made: str) -> None:
    plain = peak(run_script(LOOP + "for _ in range(5): step(torch.empty(32, 64, device='cuda'), y)\n"))
    text = f"""
for _ in range(5):
    x = {made}
    assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x.cpu(), torch.cuda.FloatTensor)
    step(x, y)
"""
    found = peak(run_script(LOOP.replace("torch.randn(32, 64).cuda()", "None") + text))
    assert 0 <= plain - found <= 32 * 64 * 4  # ``x`` of the loop's beginning


def test_new_makes_tensors_where_the_other_one_is(run_script: RunScript) -> None:
    """As fastai asks a model on the host for the sizes of its features."""
    text = """
body = nn.Conv2d(3, 4, 3)
with torch.no_grad(): body(body.weight.new(1, 3, 8, 8).uniform_(-1, 1))
for like in (body.weight, torch.ones(2)):
    for made in (like.new(2, 3), like.new([1.0]), like.new(torch.Size([4])), like.new(), like.data.new(2)):
        assert made.device.type == "cpu" and made.dtype == torch.float32, made
assert like.new([1.0, 2.0]).tolist() == [1.0, 2.0] and model[0].weight.new(2, 3).is_cuda
for _ in range(5): step(x, y)
"""
    assert peak(run_script(LOOP + text)) == peak(run_script(LOOP + "for _ in range(5): step(x, y)\n"))


@pytest.mark.parametrize(
    "default",
    ["torch.set_default_device('cuda')", "torch.set_default_tensor_type('torch.cuda.FloatTensor')"],
)
def test_factories_make_tensors_on_the_default_gpu(run_script: RunScript, default: str) -> None:
    named = LOOP + "for _ in range(5): step(x, y)\n"
    unnamed = named.replace(".cuda()", "").replace("import torch\n", f"import torch\n{default}\n", 1)
    assert prediction(run_script(unnamed)).memory.components == prediction(run_script(named)).memory.components


def test_a_device_as_a_context_makes_tensors_there(run_script: RunScript) -> None:
    text = "for _ in range(5):\n    with torch.device('cuda'):\n        x = torch.randn(32, 64)\n    step(x, y)\n"
    moved = text.replace("'cuda'", "'cpu'").replace("(x", "(x.cuda()")
    assert peak(run_script(LOOP + text)) == peak(run_script(LOOP + moved))


def test_a_mask_of_computed_values_selects_everything_and_is_noted(run_script: RunScript) -> None:
    text = """
for _ in range(5):
    keep = model(x).detach().amax(-1) > 0.5
    step(x[keep], y[keep.nonzero().squeeze(1)])
    torch.masked_select(x, x > 0), torch.unique(x), torch.where(x > 0)
"""
    found = run_script(LOOP + text)
    everything = "for _ in range(5):\n    model(x).detach().amax(-1) > 0.5\n    step(x[:], y[:])\n"
    assert "selection" in kinds(found)
    assert 0 <= peak(found) - peak(run_script(LOOP + everything)) < 2**20


def test_copies_of_checkpoints_are_loaded(run_script: RunScript) -> None:
    text = """
import os, shutil
for _ in range(5):
    step(x, y)
    torch.save(model.state_dict(), "a.pt")
    shutil.copy("a.pt", "b.pt")
    os.rename("a.pt", "c.pt")
    assert all(torch.load(name)["0.weight"].shape == (256, 64) for name in ("b.pt", "c.pt"))
    for content in ({"x": torch.ones(3)}, {"x": torch.ones(3), "model": model.state_dict()}):
        with open("d.pt", "wb") as file:
            torch.save(content, file)
        assert torch.load("d.pt")["x"].sum() == 3
    try:
        torch.load("missing.pt")
    except FileNotFoundError:
        continue
    raise AssertionError
"""
    prediction(run_script(LOOP + text))


def test_a_mask_that_is_set_at_some_entries_selects_no_more(run_script: RunScript) -> None:
    text = """
shapes = []
for _ in range(5):
    scores = model(x).detach().amax(-1)
    sampled = torch.zeros_like(scores, dtype=torch.uint8)
    sampled[(scores > 0.5).nonzero().squeeze(1)[:3]] = 1
    other = torch.zeros(32, dtype=torch.bool, device="cuda")
    other[scores.argsort()[:4]] = True
    either = sampled.bool() | other
    shapes += [x[mask].shape[0] for mask in (sampled, either, either & other, ~other)]
    either[scores.argsort()[:5]] = True
    shapes += [torch.where(either)[0].shape[0], torch.masked_select(x, other[:, None]).shape[0]]
    other.logical_not_()
    shapes += [x[other].shape[0]]
    step(x, y)
assert shapes[:7] == [3, 7, 4, 32, 12, 4 * 64, 32], shapes
"""
    assert "selection" in kinds(run_script(LOOP + text))


@pytest.mark.parametrize("is_training", [True, False])
def test_inference_mode_holds_what_no_grad_does(run_script: RunScript, is_training: bool) -> None:
    """PyTorch does not divide composite operations there; the simulation has to."""
    text = """
encoder = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Flatten(1), nn.Linear(32 * 36, 64)).cuda()
for _ in range(5):
    step(x, y)
    optimizer.zero_grad()
    model.train(TRAINING)
    with torch.MODE():
        out = model(F.layer_norm(encoder(torch.randn(4096, 3, 8, 8).cuda()), (64,)))
        loss = F.cross_entropy(out, torch.zeros(4096).long().cuda())
        print(loss.item(), (out.softmax(-1).argmax(-1) == 0).float().mean().item(), out.cpu().numpy().mean())
""".replace("TRAINING", str(is_training))
    found = [prediction(run_script(LOOP + text.replace("MODE", mode))) for mode in ("inference_mode", "no_grad")]
    assert found[0].memory == found[1].memory
    assert found[0].time == found[1].time


@pytest.mark.parametrize("evaluated", ["model", "average"])
def test_an_evaluation_belongs_to_no_step(run_script: RunScript, evaluated: str) -> None:
    """Neither that of the model nor that of an average of its weights (EMA)."""
    text = """
import copy
average = copy.deepcopy(model)
for _ in range(5):
    step(x, y)
    if EVALUATES:
        EVALUATED.eval()
        with torch.no_grad():
            for _ in range(50):
                found = EVALUATED(x)
            for _ in range(50):
                found.argmax(-1)
""".replace("EVALUATED", evaluated)
    found = [prediction(run_script(LOOP + text.replace("EVALUATES", str(one)))) for one in (True, False)]
    assert found[0].time is not None and found[1].time is not None
    assert found[0].time.step_seconds == pytest.approx(found[1].time.step_seconds, rel=0.1)
    assert [any("its time is in no step" in note for note in one.notes) for one in found] == [True, False]


def test_an_evaluation_within_a_step_does_not_belong_to_it(run_script: RunScript) -> None:
    """Its gradients are of batches of several epochs, as Ultralytics' are of small data sets."""
    text = """
import copy
from torch.utils.data import DataLoader
average, rows = copy.deepcopy(model).eval(), list(zip(x.cpu(), y.cpu()))
for epoch in range(16):
    for some, labels in DataLoader(rows, 32):
        F.cross_entropy(model(some.cuda()), labels.cuda()).backward()
    if epoch == 0 or epoch % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
    if EVALUATES:
        with torch.no_grad():
            for others, _ in DataLoader(rows, 8):
                for _ in range(50):
                    average(others.cuda()).argmax(-1)
"""
    found = [prediction(run_script(LOOP + text.replace("EVALUATES", str(one)))) for one in (True, False)]
    times = [one.time for one in found]
    assert times[0] is not None and times[1] is not None
    assert times[0].step_seconds == pytest.approx(times[1].step_seconds, rel=0.1)
    assert [one.workload["train"]["per_device_train_batch_size"] for one in found] == [32, 32]


def test_another_model_without_gradients_belongs_to_the_step(run_script: RunScript) -> None:
    text = """
teacher = nn.Linear(64, 10).cuda().eval()
for _ in range(5):
    with torch.no_grad():
        for _ in range(150):
            teacher(x)
    step(x, y)
"""
    times = [prediction(run_script(LOOP + text.replace("150", str(count)))).time for count in (150, 1)]
    assert times[0] is not None and times[1] is not None
    assert times[0].step_seconds > 2 * times[1].step_seconds


def test_transforms_of_functions_are_simulated(run_script: RunScript) -> None:
    text = """
from torch.func import functional_call, grad, vmap
def loss(parameters, x, y):
    return F.cross_entropy(functional_call(model, parameters, (x,)), y)
for _ in range(5):
    optimizer.zero_grad()
    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(dict(model.named_parameters()), x[:, None], y[:, None])
    assert gradients["0.weight"].shape == (32, 256, 64)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].mean(0)
    optimizer.step()
"""
    assert peak(run_script(LOOP + text)) > 32 * 256 * 64 * 4


def test_a_module_may_be_called_with_gradients_before_it_moves(run_script: RunScript) -> None:
    made = "model = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(64, 256)), nn.Linear(256, 10)).cuda()"
    text = LOOP.replace("optimizer =", f"{made}\noptimizer =", 1) + "for _ in range(5): step(x, y)\n"
    found = prediction(run_script(text))
    assert found.script is not None and found.script.steps == 3


def test_data_is_assigned_between_the_host_and_the_gpu(run_script: RunScript) -> None:
    text = """
model = nn.Linear(64, 10)
model.weight.data = torch.randn(10, 64)
model.register_buffer("scale", torch.ones(10))
model.scale.copy_(nn.LayerNorm(10).weight)  # frozen norms take the weights of trained ones so, on the host
for tensor in [*model.parameters(), *model.buffers()]:
    tensor.data = tensor.data.cuda()
model.register_buffer("count", torch.tensor(3))
model.count.data = model.count.cuda()
assert model.count.cpu() == 3 and model.count.is_cuda
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    (model(x) * model.scale).sum().backward()
    for parameter in model.parameters():
        parameter.grad.data = parameter.grad.data.clamp(-1, 1)
    optimizer.step()
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-1, 1)
assert model.scale.is_cuda and model.weight.is_cuda and model.weight.requires_grad
"""
    found = prediction(run_script(LOOP + text))
    assert found.script is not None and found.script.models[-1].bytes == 4 * 650


def test_a_model_is_called_on_the_host_before_it_moves(run_script: RunScript) -> None:
    text = """
model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(10))
model(torch.randn(2, 3, 8, 8))
model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.randn(2, 3, 8, 8).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    prediction(run_script(LOOP + text))


def test_bytes_of_a_buffer_hold_what_was_saved(run_script: RunScript) -> None:
    text = """
import io, pickle
torch.save(model.state_dict(), buffer := io.BytesIO())
with open("copied.pt", "wb") as file:
    file.write(buffer.getvalue())
for source in ("copied.pt", io.BytesIO(buffer.getvalue())):
    model.load_state_dict(torch.load(source))
assert pickle.loads(pickle.dumps([torch.arange(3)]))[0].tolist() == [0, 1, 2]
for _ in range(5): step(x, y)
"""
    prediction(run_script(LOOP + text))


@pytest.mark.parametrize(("place", "copies"), [("", 1), (", map_location='cuda'", 1), (", map_location='cpu'", 0)])
@pytest.mark.parametrize("file", ["'best.pt'", "io.BytesIO()"])
def test_a_checkpoint_of_the_run_is_loaded_where_pytorch_would(
    run_script: RunScript, place: str, copies: int, file: str
) -> None:
    text = f"""
import io
for index in range(5):
    step(x, y)
    optimizer.zero_grad()
    file = {file}
    torch.save({{"model": model.state_dict(), "index": index}}, file)
    if not isinstance(file, str):
        file.seek(0)
    before = torch.cuda.memory_allocated()
    loaded = torch.load(file{place})
    model.load_state_dict(loaded["model"])
    assert loaded["index"] == index
    held = torch.cuda.memory_allocated() - before
    assert held == {copies} * sum(-(-one.nbytes // 512) * 512 for one in model.state_dict().values()), held
    del loaded
"""
    found = prediction(run_script(LOOP + text))
    assert found.script is not None and found.script.steps == 3


def test_a_checkpoint_on_disk_is_loaded_where_its_tensors_were(run_script: RunScript, tmp_path: Path) -> None:
    import torch

    torch.save({"weight": torch.ones(1000)}, tmp_path / "cpu.pt")
    text = """
assert not torch.load("cpu.pt")["weight"].is_cuda
assert torch.load("cpu.pt", map_location="cuda:0")["weight"].is_cuda
for _ in range(5): step(x, y)
"""
    prediction(run_script(LOOP + text))


def test_monitors_find_the_simulated_gpu(run_script: RunScript) -> None:
    pytest.importorskip("pynvml")
    text = """
import pynvml
pynvml.nvmlInit()
memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
assert memory.total == torch.cuda.mem_get_info()[1] and memory.used > 0
torch.cuda.utilization(), torch.cuda.temperature()
with torch.profiler.profile(on_trace_ready=torch.profiler.tensorboard_trace_handler("log")) as profiler:
    for _ in range(5):
        step(x, y)
        profiler.step()
        print(profiler.key_averages().table(sort_by="cuda_time_total"))
"""
    assert kinds(run_script(LOOP + text)) == ["monitor", "tracker"]


@pytest.mark.parametrize("options", ["", "num_beams=3", "do_sample=True, top_k=5"])
def test_generate_goes_on_to_its_maximum_length(run_script: RunScript, options: str) -> None:
    text = f"""
import torch
from transformers import GPT2Config, GPT2LMHeadModel
sizes = dict(n_layer=1, n_embd=64, n_head=2, vocab_size=100, bos_token_id=1, eos_token_id=2, pad_token_id=0)
model = GPT2LMHeadModel(GPT2Config(**sizes)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(5):
    prompts = torch.randint(3, 100, (2, 7)).cuda()
    rows = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=5, {options})
    assert rows.shape == (2, 12), rows.shape
    model(rows, labels=rows).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    assert "generation" in kinds(run_script(text))


def test_a_loop_that_waits_for_a_token_reaches_its_last_round(run_script: RunScript) -> None:
    text = """
for _ in range(5):
    done = torch.zeros(4, dtype=torch.bool, device="cuda")
    for rounds in range(1, 9):
        token = model(x[:4]).repeat(1, 200).softmax(-1).multinomial(1).squeeze(1)
        done |= token == 2
        if done.all() or token[0] == 2 or token[0].item() == 2:
            break
    assert rounds == 8
    done |= torch.full((4,), True, device="cuda")
    assert done.all()
    step(x, y)
"""
    assert any("assumed to differ" in note for note in prediction(run_script(LOOP + text)).notes)


def test_forward_mode_derivatives_load_their_decompositions(run_script: RunScript) -> None:
    text = """
for _ in range(5):
    torch.func.jvp(lambda z: torch.logsumexp(z, 0).sum(), (torch.ones(4, 4).cuda(),), (torch.ones(4, 4).cuda(),))
    step(x, y)
"""
    prediction(run_script(LOOP + text))


def test_random_numbers_of_distributions(run_script: RunScript) -> None:
    text = """
for _ in range(5):
    for kind in (torch.distributions.Beta, torch.distributions.Gamma):
        assert kind(torch.ones(3).cuda(), torch.ones(3).cuda()).rsample().shape == (3,)
    torch.distributions.Dirichlet(torch.ones(4, 3).cuda()).rsample()
    step(x, y)
"""
    prediction(run_script(LOOP + text))


def test_local_files_are_loaded_as_a_data_set(tmp_path: Path) -> None:
    """In a process of its own, whose cache of data sets is a folder of the run."""
    pytest.importorskip("datasets")
    (tmp_path / "rows.jsonl").write_text('{"text": "one two"}\n' * 8)
    text = "from datasets import load_dataset\nrows = load_dataset('json', data_files='rows.jsonl', split='train')\n"
    (tmp_path / "train.py").write_text(text + LOOP + "for _ in rows: step(x, y)\n")
    words = [sys.executable, "-m", "trainatomy", "run", "--gpu", "t4", "--time-limit", "60", "train.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=180)
    assert "was stopped after 3 optimizer steps" in done.stdout, done.stderr[-500:]


def test_lazy_modules_get_their_parameters_on_the_gpu(run_script: RunScript) -> None:
    text = LOOP.replace("nn.Linear(64, 256)", "nn.LazyLinear(256)").replace(
        "optimizer =", "model(torch.ones(1, 64).cuda())\noptimizer =", 1
    )
    found = prediction(run_script(text + "for _ in range(5): step(x, y)\n"))
    plain = prediction(run_script(LOOP + "for _ in range(5): step(x, y)\n"))
    assert found.memory.components.weights == plain.memory.components.weights


def test_torchscript_is_left_out_and_noted(run_script: RunScript) -> None:
    text = """
@torch.jit.script
def gelu(x):
    return x * 0.5 * (1.0 + torch.erf(x / 1.41421))
traced = torch.jit.trace(model, x)
for _ in range(5): step(gelu(x), y)
torch.jit.save(torch.jit.script(model), "model.pt")
"""
    assert kinds(run_script(LOOP + text)) == ["torchscript", "torchscript"]


def test_a_loop_goes_on_until_each_optimizer_has_stepped_twice(run_script: RunScript) -> None:
    """A GAN whose critic steps more often: the generator's step with its states counts."""
    text = """
generator, critic = nn.Linear(64, 64).cuda(), nn.Linear(64, 1).cuda()
slow, fast = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
for index in range(100):
    fast.zero_grad()
    critic(generator(x).detach()).mean().backward()
    fast.step()
    if index % 4 == 0:
        slow.zero_grad()
        (-critic(generator(x))).mean().backward()
        slow.step()
"""
    found = prediction(run_script(LOOP.split("model =")[0] + "x = torch.randn(32, 64).cuda()" + text))
    assert found.script is not None and found.time is not None
    assert [one.steps for one in found.script.optimizers] == [2, 6]
    assert found.time.phases["forward"] > 0 and found.time.phases["backward"] > 0


MODULES = """
import io
from copy import deepcopy
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(256, 256)
        self.tied = nn.Linear(256, 256, bias=False)
        self.tied.weight = self.inner.weight
        self.register_buffer("scale", torch.ones(256))
        self.inner.bias.requires_grad_(False)
        self.names = ["a", "b"]
    def forward(self, x):
        return self.tied(self.inner(x)) * self.scale

model = Block().cuda()
{before}
torch.save({saved}, {file})
{between}
before = torch.cuda.memory_allocated()
again = {loaded}
assert type(again) is Block and again is not model and again.names == ["a", "b"] and again.names is not model.names
assert again.inner.weight is again.tied.weight and again.inner.weight is not model.inner.weight
assert again.scale.shape == (256,) and not again.inner.bias.requires_grad
again = again.cuda()
held = [*again.parameters(), *again.buffers()]
assert torch.cuda.memory_allocated() - before == sum(-(-one.nbytes // 512) * 512 for one in held)
optimizer = torch.optim.SGD(again.parameters(), 0.1)
while True:
    again(torch.zeros(8, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("saved", "file", "between", "loaded"),
    [
        ("model", "'a.pt'", "", "torch.load('a.pt', weights_only=False)"),
        (
            "{'model': deepcopy(model).half(), 'epoch': 3}",
            "'a.pt'",
            "",
            "torch.load('a.pt', map_location='cpu', weights_only=False)['model'].float()",
        ),
        (
            "{'ema': [model]}",
            "buffer",
            "open('a.pt', 'wb').write(buffer.getvalue())",
            "torch.load('a.pt', weights_only=False)['ema'][0]",
        ),
    ],
)
def test_modules_that_are_saved_as_a_whole_come_back_as_copies(
    saved: str, file: str, between: str, loaded: str, run_script: RunScript
) -> None:
    text = MODULES.format(before="buffer = io.BytesIO()", saved=saved, file=file, between=between, loaded=loaded)
    outcome = run_script(text)
    assert outcome.message == ""
    assert outcome.prediction is not None
    assert outcome.prediction.script is not None and outcome.prediction.script.steps == 3


def test_a_module_that_pickle_refuses_cannot_be_saved(run_script: RunScript) -> None:
    text = MODULES.format(
        before="model.act = lambda x: x", saved="model", file="'a.pt'", between="", loaded="torch.load('a.pt')"
    )
    outcome = run_script(text)
    assert "raised PicklingError: Can't pickle <function <lambda>" in outcome.message


def test_groups_of_parameters_that_are_updated_one_by_one_are_one_step(run_script: RunScript) -> None:
    """DeepSpeed's optimizers call the one inside for each of its groups of parameters, with no other group in it."""
    text = """
    import torch
    model = torch.nn.Linear(16, 16).cuda()
    groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    for _ in range(3):
        model(torch.zeros(4, 16).cuda()).sum().backward()
        groups = optimizer.param_groups
        for group in groups:
            optimizer.param_groups = [group]
            optimizer.step()
        optimizer.param_groups = groups
        optimizer.zero_grad()
    """
    found = run_script(text, steps=4).prediction
    assert found is not None and found.script is not None
    assert (found.script.steps, found.script.ending) == (3, "finished")
    assert [one.steps for one in found.script.optimizers] == [3]


def test_what_moves_to_the_host_at_the_end_was_held(run_script: RunScript, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lightning does with its model and its optimizers' states, which its trainer keeps."""
    monkeypatch.setattr("torch.kept", None, raising=False)
    text = (
        "for _ in range(2): step(x, y)\ntorch.kept = [model, optimizer]\nmodel.cpu()\n"
        "for state in optimizer.state.values():\n    state.update({key: value.cpu() for key, value in state.items()})\n"
    )
    script = prediction(run_script(LOOP + text)).script
    assert script is not None
    assert script.models[0].bytes > 0 and script.optimizers[0].state_bytes > script.models[0].bytes


def test_an_optimizer_that_never_steps_does_not_keep_a_loop_going(run_script: RunScript) -> None:
    text = "other = torch.optim.SGD(model.parameters(), 0.1)\nfor _ in range(1000): step(x, y)\n"
    script = prediction(run_script(LOOP + text)).script
    assert script is not None and script.steps == 12


def test_losses_that_are_kept_with_their_graphs_are_told(run_script: RunScript) -> None:
    kept = LOOP + "losses = []\nfor _ in range(99):\n    losses.append({loss})\n"
    loss = "F.cross_entropy(model(x.repeat(500, 1)), y.repeat(500))"
    rest = "    losses[-1].backward(retain_graph=True)\n    optimizer.step()\n    optimizer.zero_grad()\n"
    script = prediction(run_script(kept.format(loss=loss) + rest)).script
    assert script is not None and script.growth is not None
    assert script.growth.bytes_per_step >= 32 * 500 * 256 * 4  # what the first layer returned
    assert script.growth.operation in ("aten::addmm", "aten::relu")
    healthy = prediction(run_script(kept.format(loss="step(x.repeat(500, 1), y.repeat(500))"))).script
    assert healthy is not None and healthy.growth is not None
    assert healthy.growth.bytes_per_step == 512  # the losses themselves


def test_private_memory_pools_are_refused_by_name(run_script: RunScript) -> None:
    outcome = run_script(LOOP + "step(x, y)\ngraph = torch.cuda.CUDAGraph()\n")
    assert "torch.cuda.CUDAGraph keeps what is allocated while a graph is captured in a memory pool" in outcome.message


def test_the_inverse_of_a_spectrogram_runs(run_script: RunScript) -> None:
    text = """
window = torch.hann_window(64, device="cuda")
for _ in range(5):
    spectrum = torch.stft(torch.randn(32, 63 * 16, device="cuda"), 64, 16, window=window, return_complex=True)
    waves = torch.istft(spectrum, 64, 16, window=window)
    assert waves.shape == (32, 63 * 16)
    step(waves[:, :64], y)
"""
    assert prediction(run_script(LOOP + text)).script is not None


def test_a_checkpoint_that_was_saved_to_an_open_file_is_loaded_by_its_name(run_script: RunScript) -> None:
    text = """
import numpy
torch.save(numpy.arange(12.0), open("data.pt", "wb"))
torch.save(model.state_dict(), "model.pt")
assert torch.load("data.pt", weights_only=False).shape == (12,)
with open("model.pt", "rb") as file:
    model.load_state_dict(torch.load(file))
for _ in range(5): step(x, y)
"""
    assert prediction(run_script(LOOP + text)).script is not None


LANGUAGE_MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.body, self.head = nn.Embedding(9000, 16), nn.Linear(16, 16), nn.Linear(16, 9000, bias=False)

    def forward(self, x):
        return self.head(self.body(self.tokens(x)))

net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters())
for _ in range(3):
    x = torch.zeros(4, 33, dtype=torch.long, device="cuda")
    logits = net(x)
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, 9000), x[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_logits_of_a_models_own_head_and_their_shifted_copy_are_a_line(run_script: RunScript) -> None:
    found = run_script(LANGUAGE_MODEL).prediction
    assert found is not None and found.memory.peak.phase == "backward"
    logits, shifted = 4 * 33 * 9000 * 4, 4 * 32 * 9000 * 4
    counted = found.memory.logits_and_loss
    assert counted["activations"] == pytest.approx(logits + shifted, rel=0.02)  # made in forward, and its log_softmax
    assert counted["temporary"] >= 2 * shifted
