"""Stand-ins reach libraries whoever imports them, and keep the signatures of what they replace."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from script_types import RunScript

from trainatomy.alike import alike
from trainatomy.catalog.gpus import find_gpu
from trainatomy.scripts.imports import ImportHook, preload
from trainatomy.scripts.session import Session, Settings
from trainatomy.scripts.standins.notes import StandIns

LIBRARIES = (
    "accelerate", "bitsandbytes", "datasets", "evaluate", "liger_kernel.transformers", "peft", "safetensors.torch",
    "torchvision.datasets", "transformers.trainer", "transformers.generation.utils", "triton.runtime.autotuner",
    "transformers.models.auto.tokenization_auto", "transformers.models.auto.modeling_auto", "trl.trainer.sft_trainer",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder of modules, which are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, name: str, text: str) -> None:
    folder.joinpath(f"{name}.py").write_text(dedent(text))


def test_a_function_is_called_once_when_a_module_is_complete(folder: Path) -> None:
    write(folder, "late_module", "value = 1\n")
    hook, seen = ImportHook(), list[Any]()
    with hook.installed():
        hook.when("late_module", lambda: seen.append(sys.modules["late_module"].value))
        assert seen == []
        import late_module  # type: ignore[import-not-found]

        assert seen == [1]
        hook.when("late_module", lambda: seen.append("at once"))
    assert seen == [1, "at once"]
    assert hook not in sys.meta_path
    assert late_module.__loader__ is late_module.__spec__.loader
    assert inspect.getsource(late_module) == "value = 1\n"


def test_a_package_sees_what_was_put_into_its_own_module(folder: Path) -> None:
    """As ``datasets`` does, which imports ``load_dataset`` from its module ``load``."""
    folder.joinpath("outer").mkdir()
    folder.joinpath("outer", "__init__.py").write_text("from outer.inner import function\n")
    folder.joinpath("outer", "inner.py").write_text("def function(): return 'real'\n")
    hook = ImportHook()
    with hook.installed():
        hook.when("outer.inner", lambda: setattr(sys.modules["outer.inner"], "function", lambda: "replaced"))
        import outer  # type: ignore[import-not-found]
    assert outer.function() == "replaced"


def test_several_modules_are_waited_for_in_any_order(folder: Path) -> None:
    write(folder, "first_of_two", "")
    write(folder, "second_of_two", "")
    hook, seen = ImportHook(), list[str]()
    with hook.installed():
        hook.when(("first_of_two", "second_of_two"), lambda: seen.append("both"))
        import second_of_two  # type: ignore[import-not-found] # noqa: F401

        assert seen == []
        import first_of_two  # type: ignore[import-not-found] # noqa: F401
    assert seen == ["both"]


def test_one_of_several_modules_imports_the_other(folder: Path) -> None:
    write(folder, "inner_of_two", "")
    write(folder, "outer_of_two", "import inner_of_two\nvalue = 1\n")
    hook, seen = ImportHook(), list[int]()
    with hook.installed():
        hook.when(("inner_of_two", "outer_of_two"), lambda: seen.append(sys.modules["outer_of_two"].value))
        import outer_of_two  # type: ignore[import-not-found] # noqa: F401
    assert seen == [1]


def test_an_import_that_fails_calls_nothing_and_may_be_repeated(folder: Path) -> None:
    write(folder, "fails_once", "import builtins\nif not hasattr(builtins, '_tried'):\n    raise ImportError('no')\n")
    hook, seen = ImportHook(), list[str]()
    with hook.installed():
        hook.when("fails_once", lambda: seen.append("imported"))
        with pytest.raises(ImportError, match="no"):
            import fails_once  # type: ignore[import-not-found]
        assert seen == []
        write(folder, "fails_once", "")
        sys.path_importer_cache.clear()
        import fails_once  # noqa: F401
    assert seen == ["imported"]


def test_threads_that_import_one_module_call_once(folder: Path) -> None:
    write(folder, "slow_module", "import time\ntime.sleep(0.05)\n")
    hook, seen = ImportHook(), list[int]()
    with hook.installed():
        hook.when("slow_module", lambda: seen.append(1))
        threads = [threading.Thread(target=__import__, args=("slow_module",)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == [1]


@pytest.mark.parametrize(
    "importing",
    [
        "transformers = importlib.import_module('transformers')",
        "transformers = __import__('transformers')",
        "exec('import transformers')",
        "import framework; transformers = framework.transformers",
    ],
)
def test_stand_ins_reach_what_a_framework_imports(run_script: RunScript, tmp_path: Path, importing: str) -> None:
    tmp_path.joinpath("framework.py").write_text(
        "import importlib\ntransformers = importlib.import_module('transformers')"
    )
    found = run_script(
        f"""
        import importlib
        {importing}
        torch = importlib.import_module("torch")
        config = transformers.AutoConfig.from_pretrained("openai-community/gpt2", n_layer=1, vocab_size=512)
        model = transformers.AutoModelForCausalLM.from_pretrained("openai-community/gpt2", config=config).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            tokens = torch.zeros(2, 32, dtype=torch.long, device="cuda")
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """
    )
    assert found.message == ""


# -- signatures --------------------------------------------------------------------------------------------------------


def test_a_replacement_is_called_by_the_names_of_the_original() -> None:
    def original(first: int, second: int = 2, *, third: int = 3) -> None:
        """Do something."""

    def replacement(a: int, *rest: Any, **more: Any) -> Any:
        return a, rest, more

    made = alike(original, replacement)
    assert inspect.signature(made) == inspect.signature(original)
    assert inspect.getfullargspec(made) == inspect.getfullargspec(original)
    assert (made.__name__, made.__doc__, made.__wrapped__) == ("original", "Do something.", original)
    assert made(first=1, second=5) == (1, (), {"second": 5})
    assert made(1, 5, third=4) == (1, (5,), {"third": 4})


def test_class_methods_and_classes_keep_theirs() -> None:
    class Original:
        def __init__(self, size: int) -> None: ...

        @classmethod
        def load(cls, name: str) -> None: ...

    class Replacement:
        def __init__(self, *_: Any, **__: Any) -> None: ...

    original = inspect.getattr_static(Original, "load")
    holder = type("Holder", (), {"load": alike(original, classmethod(lambda cls, x: x))})
    assert holder.load(name="there") == "there"  # type: ignore[attr-defined]
    assert inspect.signature(holder.load) == inspect.signature(Original.load)  # type: ignore[attr-defined]
    assert inspect.signature(alike(Original, Replacement)) == inspect.signature(Original)


def test_every_stand_in_keeps_the_signature_and_takes_arguments_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    preload()
    for name in LIBRARIES:
        try:
            __import__(name)
        except ImportError:
            continue
    placed, put = list[tuple[Any, str, Any, Any]](), StandIns.put

    def remember(self: StandIns, owner: Any, name: str, value: Any) -> None:
        placed.append((owner, name, getattr(owner, name), value))
        put(self, owner, name, value)

    monkeypatch.setattr(StandIns, "put", remember)
    wrong = []
    with Session(find_gpu("h100-sxm"), Settings()).open():
        for owner, name, original, value in placed:
            if not callable(original) or not (inspect.isclass(owner) or inspect.ismodule(owner)):
                continue
            try:
                wanted = inspect.signature(original)
            except (TypeError, ValueError):
                continue
            found = inspect.signature(getattr(owner, name))
            if str(found) != str(wanted):
                wrong.append(f"{owner}.{name}{found}, not {wanted}")
            if problem := _refuses_names(value, wanted):
                wrong.append(f"{owner}.{name}: {problem}")
    assert len(placed) > 60
    assert "\n".join(wrong) == ""


def _refuses_names(value: Any, wanted: inspect.Signature) -> str:
    """Return why a replacement cannot be called with every argument by its name; "" if it can."""
    function = getattr(value, "__func__", value)
    ours = inspect.signature(function)
    named = [one for one in wanted.parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    taken = [one for one in ours.parameters.values() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if isinstance(value, classmethod):
        taken = taken[1:]
    if inspect.isclass(value):
        return ""
    by_position = [one.name for one in taken if one.kind is one.POSITIONAL_ONLY]
    if len(by_position) > sum(one.kind is one.POSITIONAL_ONLY for one in wanted.parameters.values()):
        return f"takes {by_position} by position only"
    has_rest = any(one.kind is one.VAR_KEYWORD for one in ours.parameters.values())
    return "" if has_rest or len(taken) >= len(named) else f"takes {len(taken)} arguments of {len(named)}"
