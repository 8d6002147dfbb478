"""What jobs of Slurm and SkyPilot ask for, and the gate before them."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainatomy.cli import main
from trainatomy.errors import WorkloadError
from trainatomy.scripts.batch_jobs import read_job

JOB = """\
#!/bin/bash
#SBATCH --job-name=ft
#SBATCH --nodes=2
#SBATCH --gres=gpu:a100:4
MODEL="Qwen/Qwen2.5-7B"
source venv/bin/activate
echo starting $MODEL
srun torchrun --nproc-per-node 4 train.py --model $MODEL \\
  --epochs 2 > log.txt
"""


def test_a_job_of_slurm(tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    file.write_text(JOB, encoding="utf-8")
    job = read_job(["sbatch", "--time", "1:00:00", str(file)])
    assert (job.gpu, job.gpus, job.nodes) == ("a100", 4, 2)
    assert job.command[:7] == (
        "torchrun",
        "--nproc-per-node",
        "4",
        "train.py",
        "--model",
        "Qwen/Qwen2.5-7B",
        "--epochs",
    )
    assert read_job(["sbatch", "--gres=gpu:h100:1", "-N", "1", str(file)]).gpu == "h100"
    assert read_job(["sbatch", "--gpus=16", "--nodes", "2", "--wrap", "python train.py"]).gpus == 8


def test_where_output_goes_is_no_argument_of_the_script() -> None:
    wrapped = "cd work; BS=8\npython train.py --batch $BS --name 'a > b' > log.txt 2>&1 & wait"
    assert read_job(["sbatch", "--wrap", wrapped]).command == ("python", "train.py", "--batch", "8", "--name", "a > b")


def test_a_task_of_skypilot(tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(
        "resources: {accelerators: {L4: 2}}\nenvs: {BS: 4}\nrun: |\n  cd work\n"
        "  trl sft --per_device_train_batch_size $BS --num_processes $SKYPILOT_NUM_GPUS_PER_NODE\n",
        encoding="utf-8",
    )
    job = read_job(["sky", "jobs", "launch", "-c", "mine", str(file)])
    assert (job.gpu, job.gpus, job.nodes) == ("L4", 2, 1)
    assert job.command == ("trl", "sft", "--per_device_train_batch_size", "4", "--num_processes", "2")
    assert read_job(["sky", "launch", "--gpus", "A100:8", str(file)]).gpus == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#!/bin/bash\necho hello\n", "no command of it is known to train"),
        ("python train.py --lr $LEARNING\n", "$LEARNING is not known here"),
    ],
)
def test_what_cannot_be_checked_is_said(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "job.sh"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(WorkloadError) as caught:
        read_job(["sbatch", str(file)])
    assert message in str(caught.value)
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_job(["sbatch", str(tmp_path / "none.sh")])


def test_the_gate_exits_by_what_the_job_asks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration that fits, and one that does not; a job that names no card."""
    file = tmp_path / "job.sh"
    command = "trl sft --model_name_or_path openai-community/gpt2 --max_length 64 --per_device_train_batch_size 1"
    file.write_text(f"#SBATCH --gres=gpu:1\n{command}\n", encoding="utf-8")
    assert main(["check", "--", "sbatch", str(file)]) == 2
    assert "does not say which GPU it asks for: give --gpu" in capsys.readouterr().err
    assert main(["check", "--", "sbatch", "--gres=gpu:t4:1", str(file)]) == 0
    assert capsys.readouterr().out.startswith("fits on T4")
    assert main(["check", "--gpu", "rtx-3060", "--", *command.replace("gpt2", "gpt2-xl").split()]) == 8
    assert "does not fit on GeForce RTX 3060" in capsys.readouterr().err
