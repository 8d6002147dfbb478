"""What a trainer does besides its steps: executed once after the last one, as its configuration says."""

from __future__ import annotations

from textwrap import dedent

import pytest
from script_types import RunScript

from trainatomy.reporters.script_sentences import not_reached, script_sentences
from trainatomy.reporters.text.prediction import prediction_page
from trainatomy.reporters.text.rendering import render
from trainatomy.results.prediction import Prediction
from trainatomy.scripts.job import Outcome

TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

configuration = GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=3000, n_positions=64)
rows = [{"input_ids": [1] * 64, "labels": [1] * 64}] * 40
given = dict(per_device_train_batch_size=4, per_device_eval_batch_size=4, report_to=[], disable_tqdm=True)

def train(metrics=None, eval_dataset=rows, kind=Trainer, **keywords):
    arguments = TrainingArguments("out", **{**given, **keywords})
    model = GPT2LMHeadModel(configuration)
    trainer = kind(model, arguments, train_dataset=rows, eval_dataset=eval_dataset, compute_metrics=metrics)
    trainer.train()
    return trainer

def accuracy(found):
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

"""


def tasks_of(outcome: Outcome) -> list[tuple[str, int | None, int | None]]:
    assert outcome.message == ""
    assert outcome.prediction is not None and outcome.prediction.script is not None
    return sorted((task.kind, task.after, task.executed_after) for task in outcome.prediction.script.tasks)


def said(prediction: Prediction | None) -> str:
    assert prediction is not None and prediction.script is not None
    return "\n".join(script_sentences(prediction.script))


def test_callbacks_of_the_user_may_do_more_later(run_script: RunScript) -> None:
    text = """
from transformers import TrainerCallback
class Sampled(TrainerCallback):
    pass
class Sampling(Trainer):
    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, callbacks=[Sampled()], **keywords)
"""
    call = "train(kind={}, eval_dataset=None, save_strategy='no')"
    outcome = run_script(TRAINER + text + call.format("Sampling"))
    assert tasks_of(outcome) == [("callbacks", 3, None)]
    assert "Sampled may do more in later steps" in said(outcome.prediction)
    assert tasks_of(run_script(TRAINER + text + call.format("Trainer"))) == []


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ("eval_strategy='epoch', save_strategy='no'", [("evaluation", 10)]),
        ("eval_strategy='steps', eval_steps=7, save_steps=9", [("evaluation", 7), ("saving", 9)]),
        ("eval_strategy='steps', eval_steps=0.5, save_strategy='no', max_steps=16", [("evaluation", 8)]),
        ("eval_strategy='epoch', eval_delay=2, save_strategy='epoch'", [("evaluation", 20), ("saving", 10)]),
        ("eval_strategy='epoch', eval_on_start=True, save_strategy='no'", [("evaluation", 10)]),
        ("save_steps=500", [("evaluation", None), ("saving", 30)]),
        ("do_eval=True, save_strategy='no'", [("evaluation", 30)]),
        ("eval_strategy='no', save_strategy='no', eval_dataset=None", []),
        (
            "eval_strategy='epoch', save_strategy='best', metric_for_best_model='accuracy', metrics=accuracy",
            [("evaluation", 10), ("saving", 10)],
        ),
        (
            "eval_strategy='epoch', save_strategy='epoch', load_best_model_at_end=True",
            [("evaluation", 10), ("saving", 10)],
        ),
    ],
)
def test_what_the_trainer_plans_is_executed_after_the_last_step(
    run_script: RunScript, keywords: str, expected: list[tuple[str, int | None]]
) -> None:
    outcome = run_script(f"{TRAINER}train({keywords})\n")
    assert tasks_of(outcome) == sorted((kind, after, None if after is None else 3) for kind, after in expected)
    assert outcome.prediction is not None and outcome.prediction.script is not None
    assert outcome.prediction.script.total_steps == (16 if "max_steps" in keywords else 30)
    left = {kind for kind, after in expected if after is None}
    assert not_reached(outcome.prediction.script) == ("evaluation after the training" if left else "")


def test_the_whole_training_of_a_script_takes_its_steps(run_script: RunScript) -> None:
    outcome = run_script(f"{TRAINER}train(eval_strategy='epoch', save_strategy='no')\n")
    assert outcome.prediction is not None and outcome.prediction.time is not None
    found, time = outcome.prediction.duration, outcome.prediction.time
    assert found is not None and (found.steps, found.epochs, found.made_up_samples) == (30, None, False)
    assert found.seconds == pytest.approx(30 * time.step_seconds + time.first_step_extra_seconds)
    assert found.left_out == ("starting up", "waiting for data", "evaluations")


def test_the_steps_of_several_trainers_add_up(run_script: RunScript) -> None:
    text = "kept = [train(max_steps=4, save_strategy='no', eval_dataset=None) for _ in range({})]"
    for line in (text.format(3), text.format(2) + "; kept.clear(); train(max_steps=4, eval_dataset=None)"):
        found = run_script(TRAINER + line, steps=99).prediction
        assert found is not None and found.script is not None and found.time is not None
        assert found.script.steps == found.script.total_steps == 12


def test_rows_that_were_made_up_do_not_pass_for_the_data_set(run_script: RunScript) -> None:
    load = "from datasets import load_dataset\nload_dataset('imdb')\n"
    outcome = run_script(f"{TRAINER}{load}train(eval_strategy='no', save_strategy='no')\n")
    assert outcome.prediction is not None
    assert "(its data set was made up: --samples says how many rows it has)" in render(
        prediction_page(outcome.prediction), 300
    )


@pytest.mark.parametrize(
    "keywords",
    [
        "eval_strategy='steps', eval_steps=5, per_device_eval_batch_size=32, save_steps=6",
        "eval_strategy='steps', eval_steps=5, metrics=accuracy, bf16=True, save_steps=6",
        "eval_strategy='steps', eval_steps=5, metrics=accuracy, eval_accumulation_steps=3, save_steps=6",
    ],
)
def test_an_evaluation_that_is_reached_takes_the_same_memory(run_script: RunScript, keywords: str) -> None:
    found = [run_script(f"{TRAINER}train({keywords})\n", steps=steps) for steps in (3, 5, 7)]
    peaks = [
        (each.prediction.memory.peak_allocated_bytes, each.prediction.memory.peak_reserved_bytes)
        for each in found
        if each.prediction is not None
    ]
    assert peaks[0] == peaks[1] == peaks[2]
    assert [tasks_of(each)[0] for each in found] == [("evaluation", 5, 3), ("evaluation", 5, 5), ("evaluation", 5, 5)]
    without = run_script(f"{TRAINER}train({keywords})\n", look_ahead=False).prediction
    assert without is not None and without.script is not None and not without.script.tasks
    assert without.memory.peak_allocated_bytes < peaks[0][0]
    assert found[0].prediction is not None and found[0].prediction.time is not None and without.time is not None
    assert found[0].prediction.time.step_seconds == without.time.step_seconds


def test_methods_of_the_trainer_that_a_framework_replaces_are_followed(run_script: RunScript) -> None:
    text = dedent(
        """
        import inspect, sys, textwrap

        for name in ("evaluation_loop", "_maybe_log_save_evaluate"):
            written = {}
            source = textwrap.dedent(inspect.getsource(getattr(Trainer, name)))
            exec(source, vars(sys.modules["transformers.trainer"]), written)
            setattr(Trainer, name, written[name])
        train(eval_strategy="steps", eval_steps=7, save_steps=9)
        """
    )
    assert tasks_of(run_script(TRAINER + text)) == [("evaluation", 7, 3), ("saving", 9, 3)]


def test_an_evaluation_that_fails_is_not_reached(run_script: RunScript) -> None:
    text = dedent(
        """
        class Own(Trainer):
            def prediction_step(self, *arguments, **keywords):
                raise ValueError("no such column")

        train(kind=Own, eval_strategy="epoch", save_strategy="epoch")
        """
    )
    outcome = run_script(TRAINER + text)
    assert tasks_of(outcome) == [("evaluation", 10, None), ("saving", 10, 3)]
    assert outcome.prediction is not None and outcome.prediction.script is not None
    assert not_reached(outcome.prediction.script) == "evaluation after step 10"
    assert "evaluation after step 10: not reached: ValueError: no such column" in said(outcome.prediction)
    assert "saving: executed after step 3, as the script would after step 10" in said(outcome.prediction)


def test_an_evaluation_after_a_training_that_ends_is_the_scripts_own(run_script: RunScript) -> None:
    text = "trainer = train(max_steps=2, save_strategy='no')\nassert trainer.evaluate()['eval_loss'] == 0\n"
    assert tasks_of(run_script(TRAINER + text)) == [("evaluation", 2, 2)]


def test_batches_that_show_nothing_new_are_left_out(run_script: RunScript) -> None:
    outcome = run_script(f"{TRAINER}train(eval_strategy='epoch', eval_dataset=rows * 50, save_strategy='no')\n")
    assert "3 of 500 batches; the others show nothing new" in said(outcome.prediction)
    text = "train(eval_strategy='epoch', eval_dataset=rows[:9], save_strategy='no', metrics=accuracy)\n"
    assert "as the script would after step 10: 3 batches" in said(run_script(TRAINER + text).prediction)


def test_what_follows_the_steps_of_a_plain_loop_is_not_known(run_script: RunScript) -> None:
    text = """
        import torch
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for step in range({steps}):
            model(torch.ones(4, 8, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """
    stopped, ended = (run_script(text.format(steps=steps)).prediction for steps in (9, 2))
    assert stopped is not None and stopped.script is not None and ended is not None and ended.script is not None
    assert not_reached(stopped.script) == "whatever follows step 3 (an evaluation, saving)"
    assert not_reached(ended.script) == ""
