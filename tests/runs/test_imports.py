"""What processes import, and when: libraries take longer than many predictions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainatomy.runs import pools
from trainatomy.training.parallel.deepspeed import _compiled_late


@pytest.mark.parametrize(
    "what",
    [
        "import trainatomy.cli.run",
        "import pickle, trainatomy.api.fitting as api; pickle.dumps([api.predict_candidate, api.predict_row])",
        "import trainatomy.cli.compare, trainatomy.cli.gpus, trainatomy.api.comparing",
    ],
)
def test_a_process_that_leaves_predicting_to_others_imports_no_pytorch(what: str) -> None:
    code = f"{what}; import sys; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@pytest.mark.parametrize("deepspeed", [False, True])
def test_workers_get_deepspeed_where_a_training_uses_it(monkeypatch: pytest.MonkeyPatch, *, deepspeed: bool) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(pools, "_start_server", lambda: seen.append(os.environ.get(pools.DEEPSPEED)))
    pools.start_importing(2, deepspeed=deepspeed)
    assert seen == (["1"] if deepspeed else [""])
    assert pools.DEEPSPEED not in os.environ


def test_a_process_that_was_started_early_is_told_what_workers_need(monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str | None] = []
    monkeypatch.setattr(pools, "_ensure_server", lambda: paths.append(os.environ.get(pools.NEEDS)))
    monkeypatch.setattr(pools.forkserver._forkserver, "_forkserver_pid", None)
    pools.start_early()
    with Path(str(paths[0])).open(encoding="utf-8") as told:
        pools.start_importing(2, ["peft", "scipy"], deepspeed=True)
        assert told.read() == "peft scipy\n1\n"
    pools.start_importing(2)
    assert paths[1:] == [None, None]


def test_a_process_that_was_started_early_hides_what_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "needs").write_text("peft scipy\n\n")
    code = (
        "import trainatomy.runs.preload, sys; sys.exit(sys.modules['scipy'] is not None or 'torch' not in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), pools.NEEDS: str(tmp_path / "needs")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_deepspeeds_functions_are_compiled_when_they_are_called() -> None:
    compiled: list[dict[str, Any]] = []

    def compiler(function: Any, **options: Any) -> Any:
        compiled.append(options)
        return lambda *args: ("compiled", function(*args))

    def double(number: int) -> int:
        return 2 * number

    plain, decorated = _compiled_late(compiler, double), _compiled_late(compiler, backend="eager")(double)
    assert not compiled and plain.__name__ == "double"
    assert [plain(1), plain(2), decorated(3)] == [("compiled", 2), ("compiled", 4), ("compiled", 6)]
    assert compiled == [{}, {"backend": "eager"}]
