"""Samples that differ in length: the loop trains on the longest one once, or its batch is named as not reached."""

from __future__ import annotations

import datasets
import pytest
import torch
from script_types import RunScript
from torch.utils.data import TensorDataset

from trainatomy.reporters.script_sentences import not_reached, script_sentences
from trainatomy.results.prediction import Prediction
from trainatomy.results.script import BatchLengths
from trainatomy.scripts.longest import length_of, longest_sample

LOOP = """
import random, torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

random.seed(1)
lengths = [random.randint(20, 60) for _ in range(200)]
lengths[130] = 900
rows = [torch.ones(length, dtype=torch.long) for length in lengths]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, 64), nn.Linear(64, 100)
    def forward(self, ids):
        return self.head(self.embedding(ids)).square().mean()

def padded(rows):
    return pad_sequence(rows, batch_first=True)

model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters())

def step(*batches):
    for batch in batches:
        model(batch.cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()

"""
REACHED = {
    "plain": "for batch in DataLoader(rows, 8, collate_fn=padded): step(batch)",
    "shuffled": "torch.manual_seed(0)\nfor batch in DataLoader(rows, 8, shuffle=True, collate_fn=padded): step(batch)",
    "zeroed first": """
for batch in DataLoader(rows, 8, collate_fn=padded):
    optimizer.zero_grad()
    model(batch.cuda()).backward()
    optimizer.step()
""",
    "one ahead": """
following = iter(DataLoader(rows, 8, collate_fn=padded))
batch = next(following)
for later in following:
    step(batch)
    batch = later
""",
    "accumulation": """
loader = iter(DataLoader(rows, 8, collate_fn=padded))
while True: step(*(next(loader) for _ in range(3)))
""",
    "in the loop": "for batch in DataLoader(rows, 8, collate_fn=list): step(padded(batch))",
    "dictionaries": """
rows = [{"ids": row, "text": "x"} for row in rows]
collate = lambda rows: {"ids": padded([row["ids"] for row in rows])}
for batch in DataLoader(rows, 8, collate_fn=collate): step(batch["ids"])
""",
    "objects": """
class Batch:
    def __init__(self, ids): self.parts, self.whole = {"ids": ids}, self
    def to(self, device): return Batch(self.parts["ids"].to(device))
class Taking(Model):
    def forward(self, batch): return super().forward(batch.parts["ids"])
model = Taking().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for batch in DataLoader(rows, 8, collate_fn=lambda rows: Batch(padded(rows))):
    model(batch.to("cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}
NOT_REACHED = {
    "budget of tokens": (
        "sampler = [list(range(at, at + 4 + at % 3)) for at in range(0, 120, 4)]\n"
        "for batch in DataLoader(rows, batch_sampler=sampler, collate_fn=padded): step(batch)",
        "the sampler chooses how many samples a batch has",
    ),
    "stream": (
        "class Stream(IterableDataset):\n    def __iter__(self): return iter(rows)\n"
        "for batch in DataLoader(Stream(), 8, collate_fn=padded): step(batch)",
        "no DataLoader fetches them",
    ),
    "no loader": ("for at in range(0, 120, 8): step(padded(rows[at : at + 8]))", "no DataLoader fetches them"),
    "unreadable": (
        "class Rows(Dataset):\n    def __len__(self): return 200\n    def __getitem__(self, at):\n"
        "        if at == 77: raise OSError('disk')\n        return rows[at]\n"
        "for batch in DataLoader(Rows(), 8, collate_fn=padded): step(batch)",
        "its samples cannot be read: OSError: disk",
    ),
}
SAME = {
    "equal": "rows = [row[:20] for row in rows]\nfor batch in DataLoader(rows, 8, collate_fn=padded): step(batch)",
    "cut": "for batch in DataLoader(rows, 8, collate_fn=lambda rows: padded([row[:20] for row in rows])): step(batch)",
    "networks in turn": """
other = Model().cuda()
second = torch.optim.AdamW(other.parameters())
for number in range(99):
    step(rows[0][None])
    other(rows[1][None].cuda()).backward()
    second.step()
    second.zero_grad()
""",
    "evaluation of the same rows": """
rows = [row[:20] for row in rows[:40]]
while True:
    for batch in DataLoader(rows, 8, collate_fn=padded):
        step(batch)
        model.eval()
        with torch.no_grad():
            for batch in DataLoader(rows, 12, collate_fn=padded): model(batch.cuda())
        model.train()
""",
    "last of an epoch": "rows = [row[:20] for row in rows[:20]]\nwhile True:\n"
    "    for batch in DataLoader(rows, 8, collate_fn=padded): step(batch)",
}


def predicted(run_script: RunScript, text: str, **options: object) -> Prediction:
    found = run_script(LOOP + text + "\n", **options)
    assert found.message == ""
    assert found.prediction is not None and found.prediction.script is not None
    return found.prediction


@pytest.mark.parametrize("name", REACHED)
def test_the_loop_trains_on_the_longest_sample(run_script: RunScript, name: str) -> None:
    found, short = (predicted(run_script, REACHED[name], look_ahead=ahead) for ahead in (True, False))
    assert found.script is not None and found.script.lengths is not None and found.script.steps <= 3 + 4
    lengths = found.script.lengths
    assert lengths.longest == (8, 900) and (lengths.read, lengths.samples) == (200, 200)
    assert lengths.seen[1] <= 60
    assert found.memory.peak_allocated_bytes > short.memory.peak_allocated_bytes + 8 * 800 * 64 * 4
    assert "a further step had the longest of 200 samples: 8 × 900" in "\n".join(script_sentences(found.script))
    assert "batches" not in not_reached(found.script)
    assert short.script is not None and "batches larger than 8 × " in not_reached(short.script)


def test_a_trainer_trains_on_the_longest_sample_and_evaluates(run_script: RunScript) -> None:
    text = """
del optimizer
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=3000, n_positions=1024))
rows = [{"input_ids": [1] * length} for length in lengths]
def collate(rows):
    ids = padded([torch.tensor(row["input_ids"]) for row in rows])
    return {"input_ids": ids, "labels": ids}
arguments = TrainingArguments("out", per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to=[],
    disable_tqdm=True, eval_strategy="epoch", save_strategy="no")
Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8], data_collator=collate).train()
"""
    found = predicted(run_script, text)
    assert found.script is not None and found.script.lengths is not None and found.time is not None
    assert found.script.lengths.longest == (4, 900) and found.script.steps <= 6
    assert [(task.kind, task.after, task.executed_after) for task in found.script.tasks] == [("evaluation", 25, 3)]
    assert not_reached(found.script) == ""
    assert found.time.samples_per_second * found.time.step_seconds == pytest.approx(8)


@pytest.mark.parametrize("name", NOT_REACHED)
def test_where_it_is_not_reached_the_verdict_says_so(run_script: RunScript, name: str) -> None:
    text, reason = NOT_REACHED[name]
    found = predicted(run_script, text)
    assert found.script is not None and found.script.lengths is not None
    assert found.script.lengths.longest is None and found.script.lengths.reason.startswith(reason)
    assert not_reached(found.script).startswith("batches larger than ")


@pytest.mark.parametrize("name", SAME)
def test_batches_that_do_not_differ_are_left_alone(run_script: RunScript, name: str) -> None:
    found = predicted(run_script, SAME[name])
    assert found.script is not None and found.script.lengths is None and found.script.steps == 3


def test_a_longest_sample_that_was_seen_needs_no_further_step(run_script: RunScript) -> None:
    text = "rows.insert(3, rows.pop(130))\nfor batch in DataLoader(rows, 8, collate_fn=padded): step(batch)"
    found = predicted(run_script, text).script
    assert found is not None and found.lengths == BatchLengths((8, 900), (8, 900), 200, 200)
    assert "as large as with the longest of 200 samples" in "\n".join(script_sentences(found))


def test_the_time_is_that_of_the_steps_that_were_asked_for(run_script: RunScript) -> None:
    found, short = (predicted(run_script, REACHED["plain"], look_ahead=ahead) for ahead in (True, False))
    assert found.time is not None and short.time is not None
    assert found.time.step_seconds == pytest.approx(short.time.step_seconds, rel=0.02)


def test_random_numbers_go_on_as_without_a_look(run_script: RunScript, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
class Rows(Dataset):
    def __len__(self): return 80
    def __getitem__(self, at): return rows[at][: random.randint(9, 20)]
for batch in DataLoader(Rows(), 8, collate_fn=padded):
    print("drawn", random.random())
    step(batch)
"""
    drawn = []
    for steps, looks_ahead in ((3, True), (5, False)):
        predicted(run_script, text, steps=steps, look_ahead=looks_ahead)
        drawn.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("drawn")][:5])
    assert len(drawn[0]) > 3 and drawn[0] == drawn[1][: len(drawn[0])]


def test_the_longest_row_of_a_table_is_found_by_its_columns() -> None:
    rows = datasets.Dataset.from_dict({"ids": [[1] * (1 + at % 97) for at in range(2500)], "label": [0] * 2500})
    assert longest_sample(rows, 2500) == (96, 2500)
    chosen = rows.select(range(100, 300)).with_format("torch")
    assert len(chosen[longest_sample(chosen, 200)[0]]["ids"]) == 97
    texts = datasets.Dataset.from_dict({"text": ["a", "abc", "ab"]})
    assert longest_sample(texts, 3) == (1, 3)


@pytest.mark.parametrize(
    ("sample", "length"),
    [
        (torch.zeros(3, 4), 12),
        ([1, 2, 3], 3),
        ({"input_ids": [1] * 9, "text": "abc"}, 12),
        ((torch.zeros(3, 2, 2), 7), 13),
        ([], 0),
        (object(), 1),
    ],
)
def test_the_length_of_a_sample(sample: object, length: int) -> None:
    assert length_of(sample) == length


def test_as_many_samples_are_read_as_there_is_time_for() -> None:
    rows = TensorDataset(torch.zeros(100, 3))
    assert longest_sample(rows, 100, seconds=-1.0)[1] == 1
