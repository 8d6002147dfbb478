"""The files of a Hugging Face Space that shows the page."""

from __future__ import annotations

from pathlib import Path

from trainatomy.errors import TrainatomyError
from trainatomy.libraries import version_of

_README = """---
title: trainatomy
emoji: 📊
colorFrom: blue
colorTo: green
sdk: gradio
sdk_version: {gradio}
python_version: "3.12"
app_file: app.py
pinned: false
license: apache-2.0
short_description: GPU memory and time of a training, without a GPU
---

What a PyTorch or Hugging Face training holds in GPU memory and how long a step takes, predicted without a GPU.
The free CPU hardware of a Space is enough. See https://github.com/trainatomy/trainatomy.
"""
_REQUIREMENTS = """--extra-index-url https://download.pytorch.org/whl/cpu
trainatomy[app,lora,bitsandbytes]
"""
_APP = """from trainatomy.app.page import launch

if __name__ == "__main__":
    launch(host="0.0.0.0", port=7860)
"""


def write_space(folder: Path) -> tuple[Path, ...]:
    """Write the files of a Space and return them; files that are there are left alone.

    Raises:
        TrainatomyError: A file exists, or the folder cannot be written.
    """
    texts = {
        "README.md": _README.format(gradio=version_of("gradio") or "6.0.0"),
        "requirements.txt": _REQUIREMENTS,
        "app.py": _APP,
    }
    paths = tuple(folder / name for name in texts)
    if there := [path for path in paths if path.exists()]:
        raise TrainatomyError(f"--space {folder}: {there[0].name} exists; name a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts.values(), strict=True):
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TrainatomyError(f"--space {folder}: cannot be written: {error}") from error
    return paths
