"""A script finds what it wrote, wherever and by whatever it looks, and nothing of the machine's changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_types import RunScript

from trainatomy.scripts import guard, overlay

LOOP = """
import torch
model = torch.nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.ones(8, 16, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
IMPORTS = "import errno, glob, io, mmap, os, pathlib, shutil, sys, tempfile\n"


def raises(kind: str, call: str) -> str:
    """Return code that asserts that a call raises this error."""
    return f"try: {call}\nexcept {kind}: pass\nelse: raise AssertionError({call!r})\n"


def test_a_program_is_not_asked_for_what_the_script_wrote(run_script: RunScript, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("of the machine")
    text = """
import os
os.makedirs("out")
open("out/made", "w").write("of the script")
assert os.popen("cat there").read() == "of the machine"
assert os.popen("ls out").read() == os.popen("cat out/made").read() == ""
"""
    found = run_script(text + LOOP)
    assert found.message == ""
    assert found.prediction is not None and found.prediction.script is not None
    noted = [one.name for one in found.prediction.script.stand_ins if one.kind == "command"]
    assert noted == ["ls out", "cat out/made"]


def test_what_was_saved_is_loaded_again(run_script: RunScript) -> None:
    pytest.importorskip("peft")
    text = """
    from peft import LoraConfig, PeftModel, get_peft_model
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    import torch

    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained("saved")
    assert AutoTokenizer.from_pretrained("saved")("a").input_ids == [0]
    config = GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=100, bos_token_id=1, eos_token_id=1)
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained("saved")
    model = AutoModelForCausalLM.from_pretrained("saved")
    assert type(model) is GPT2LMHeadModel and model.dtype == torch.bfloat16 and model.config.n_embd == 64
    get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM")).save_pretrained("adapter")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("saved"), "adapter", is_trainable=True)
    model.merge_and_unload().save_pretrained("merged")
    model = AutoModelForCausalLM.from_pretrained("merged").cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 8, dtype=torch.long, device="cuda")).logits.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    outcome = run_script(text)
    assert outcome.message == ""
    assert outcome.prediction is not None and outcome.prediction.script is not None
    assert outcome.prediction.script.models[0].name == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            "os.remove('keep'); assert not os.path.exists('keep') and 'keep' not in os.listdir()\n"
            + raises("FileNotFoundError", "open('keep')")
            + raises("FileNotFoundError", "os.stat('keep')")
            + "open('keep', 'w').write('new'); assert open('keep').read() == 'new' and os.stat('keep').st_size == 3",
            id="removed and written again",
        ),
        pytest.param(
            "shutil.rmtree('folder'); os.makedirs('folder'); assert os.listdir('folder') == []\n"
            "open('folder/own', 'w').close(); assert os.listdir('folder') == ['own']\n"
            "assert [each.name for each in os.scandir('folder')] == ['own']",
            id="a folder that is made anew is empty",
        ),
        pytest.param(
            "open('folder/own', 'w').close()\n"
            "assert sorted(os.listdir('folder')) == ['deep', 'file', 'own']\n"
            "assert sorted(each.name for each in os.scandir('folder')) == ['deep', 'file', 'own']\n"
            "assert sorted(glob.glob('folder/*')) == ['folder/deep', 'folder/file', 'folder/own']\n"
            "assert sorted(p.name for p in pathlib.Path('folder').rglob('*')) == ['deep', 'file', 'other', 'own']\n"
            "assert {e.path: e.is_file() for e in os.scandir('folder')}['folder/own']",
            id="a folder of the machine's with a file of the script's",
        ),
        pytest.param(
            "os.rename('folder', 'moved'); assert not os.path.exists('folder')\n"
            "assert open('moved/deep/other').read() == 'mine'\n"
            "os.rename('moved/file', 'folder'); assert open('folder').read() == 'mine'\n"
            "assert os.listdir('moved') == ['deep']\n"
            + raises("FileNotFoundError", "os.rename('moved/file', 'x')")
            + "shutil.move('keep', 'moved'); assert open('moved/keep').read() == 'mine'",
            id="renamed",
        ),
        pytest.param(
            "open('keep', 'a').write('+'); assert open('keep').read() == 'mine+'\n"
            "with open('folder/file', 'r+') as f: f.write('y')\n"
            "assert open('folder/file').read() == 'yine'\n"
            "f = os.open('keep', os.O_RDWR); os.write(f, b'x'); os.close(f); assert open('keep').read() == 'xine+'\n"
            "os.truncate('keep', 2); assert open('keep').read() == 'xi'",
            id="changed",
        ),
        pytest.param(
            raises("FileExistsError", "open('keep', 'x')")
            + raises("FileExistsError", "os.open('keep', os.O_CREAT | os.O_EXCL | os.O_WRONLY)")
            + raises("FileExistsError", "os.mkdir('folder')")
            + raises("FileNotFoundError", "os.mkdir('no/folder')")
            + raises("FileNotFoundError", "open('no', 'r+')")
            + raises("FileNotFoundError", "os.remove('no')")
            + raises("FileNotFoundError", "os.truncate('no', 0)")
            + raises("FileNotFoundError", "shutil.rmtree('no')")
            + raises("IsADirectoryError", "open('folder', 'w')")
            + raises("IsADirectoryError", "os.remove('folder')")
            + raises("OSError", "os.rmdir('folder')")
            + raises("OSError", "os.link('keep', 'folder')")
            + "os.mkdir('empty'); os.rmdir('empty'); assert not os.path.exists('empty')",
            id="errors are those of the system",
        ),
        pytest.param(
            "os.makedirs('out/deep'); os.chdir('out/deep'); open('log', 'w').write('1')\n"
            "assert os.getcwd().endswith('out/deep') and os.path.abspath('log') == os.path.join(os.getcwd(), 'log')\n"
            "assert open('log').read() == '1' and os.listdir() == ['log'] and open('../../keep').read() == 'mine'\n"
            "os.chdir('../..'); assert open('out/deep/log').read() == '1' and os.path.exists('train.py')",
            id="a working folder of its own",
        ),
        pytest.param(
            "os.makedirs('runs/1'); os.symlink('1', 'runs/last'); open('runs/last/log', 'w').write('a')\n"
            "assert open('runs/1/log').read() == 'a' and os.path.islink('runs/last')\n"
            "assert os.path.realpath('runs/last/log') == os.path.realpath('runs/1/log')\n"
            "assert os.path.realpath('runs/1/log').endswith('runs/1/log')\n"
            "assert 'written' not in os.path.realpath('runs/1')\n"
            "os.symlink(os.path.abspath('folder'), 'to'); assert open('to/file').read() == 'mine'\n"
            "open('to/file', 'w').write('b'); assert open('folder/file').read() == 'b' == open('to/file').read()\n"
            "assert sorted(os.listdir('to')) == ['deep', 'file'] == sorted(each.name for each in os.scandir('to'))\n"
            "os.symlink('keep', 'last'); assert open('last').read() == 'mine'\n"
            "open('last', 'w').write('c'); assert open('last').read() == 'c' == open('keep').read()\n"
            "os.unlink('last'); open('keep', 'w').write('mine')\n"
            "os.link('keep', 'same'); os.link('same', 'again'); assert open('again').read() == 'mine'",
            id="links",
        ),
        pytest.param(
            "open('link/own', 'w').write('c'); assert open('folder/own').read() == 'c'",
            id="a link of the machine's",
        ),
        pytest.param(
            "f = os.open('folder', os.O_RDONLY)\n"
            "g = os.open('own', os.O_CREAT | os.O_WRONLY, dir_fd=f); os.write(g, b'd'); os.close(g)\n"
            "assert os.stat('own', dir_fd=f).st_size == 1 and open('folder/own').read() == 'd'\n"
            "os.unlink('file', dir_fd=f); assert not os.path.exists('folder/file')",
            id="relative to an open folder",
        ),
        pytest.param(
            "with tempfile.TemporaryDirectory() as t:\n"
            "    p = os.path.join(t, 'x'); open(p, 'w').write('1'); os.replace(p, p + 'y')\n"
            "    assert os.listdir(t) == ['xy']\n"
            "with tempfile.NamedTemporaryFile('w', dir='folder', delete=False) as f: f.write('z')\n"
            "os.replace(f.name, 'result'); assert open('result').read() == 'z'\n"
            "with tempfile.TemporaryFile(dir='.') as f: f.write(b'1')",
            id="temporary",
        ),
        pytest.param(
            "open('of_a_test.py', 'w').write('value = 3')\nimport of_a_test\nassert of_a_test.value == 3",
            id="a module that it wrote",
        ),
        pytest.param(
            "from filelock import FileLock, SoftFileLock\nos.makedirs('locks')\n"
            "for Lock in (FileLock, SoftFileLock):\n"
            "    for folder in ('locks/', 'folder/', ''):\n"
            "        with Lock(folder + Lock.__name__, timeout=1): assert os.path.exists(folder + Lock.__name__)",
            id="file locks",
        ),
        pytest.param(
            "import numpy, sqlite3\n"
            "numpy.savetxt('a.txt', numpy.arange(3)); assert numpy.loadtxt('a.txt')[2] == 2\n"
            "numpy.savetxt('a.txt.gz', numpy.arange(3)); assert numpy.genfromtxt('a.txt.gz')[2] == 2\n"
            "with sqlite3.connect('file:a.db?mode=rwc', uri=True) as base: base.execute('create table t (a)')\n"
            "for name in ('file:a.db?mode=ro', f'file://{os.getcwd()}/a.db'):\n"
            "    assert sqlite3.connect(name, uri=True).execute('select * from t').fetchall() == []\n"
            "assert sqlite3.connect('a.db').execute('select * from t').fetchall() == []\n"
            "sqlite3.connect('file:x?mode=memory', uri=True); assert not os.path.exists('x')",
            id="tables and databases by their addresses",
        ),
        pytest.param(
            "p = pathlib.Path('keep'); p.touch(); p.chmod(0o600); os.utime(p)\n"
            "q = pathlib.Path('own'); q.write_bytes(b'1'); q.chmod(0o600); assert q.stat().st_mode & 0o777 == 0o600\n"
            "assert os.access('own', os.R_OK) and not os.access('no', os.F_OK)\n"
            "assert os.listdir(b'.') and isinstance(os.listdir(b'.')[0], bytes)\n"
            "with open('/dev/shm/of-a-test', 'w') as f: f.write('x')\n"
            "assert open('/dev/shm/of-a-test').read() == 'x'; open('/dev/null', 'w').write('x')",
            id="modes, bytes and devices",
        ),
    ],
)
def test_a_script_finds_what_it_did(run_script: RunScript, tmp_path: Path, text: str) -> None:
    (tmp_path / "folder/deep").mkdir(parents=True)
    for name in ("keep", "folder/file", "folder/deep/other"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "link").symlink_to("folder")
    mode = (tmp_path / "keep").stat().st_mode
    here = Path.cwd()
    assert run_script(IMPORTS + text + LOOP).message == ""
    there = sorted(str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*"))
    assert there == ["folder", "folder/deep", "folder/deep/other", "folder/file", "keep", "link", "train.py"]
    assert all((tmp_path / name).read_text() == "mine" for name in ("keep", "folder/file", "folder/deep/other"))
    assert (tmp_path / "keep").stat().st_mode == mode
    assert Path.cwd() == here and not Path("/dev/shm/of-a-test").exists()


def test_large_files_are_changed_in_memory_alone(
    run_script: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlay, "LARGEST_COPY", 100)
    monkeypatch.setattr("trainatomy.scripts.files.LARGEST_COPY", 100)
    text = """
import numpy
rows = numpy.memmap("large", dtype="u1", mode="r+")
rows[0] = 7
assert rows[0] == 7 and rows[1] == ord("a") and len(rows) == 1000
rows.flush()
with open("large", "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
    view[1:2] = b"z"
    assert view[:3] == b"aza"
with open("large", "ab") as file:
    assert file.tell() == 1000
    file.write(b"more")
assert os.path.getsize("large") == 1004
os.rename("other", "moved")
assert open("moved").read(1) == "b" and not os.path.exists("other")
open("moved", "w").write("new")
assert open("moved").read() == "new"
"""
    (tmp_path / "large").write_text("a" * 1000)
    (tmp_path / "other").write_text("b" * 1000)
    assert run_script(IMPORTS + text + LOOP).message == ""
    assert (tmp_path / "large").read_text() == "a" * 1000 and (tmp_path / "other").read_text() == "b" * 1000


def test_libraries_in_c_find_what_the_script_wrote(run_script: RunScript, tmp_path: Path) -> None:
    text = """
import pyarrow, pyarrow.csv, pyarrow.dataset, pyarrow.feather, pyarrow.parquet, sqlite3, dbm
table = pyarrow.table({"a": [1, 2]})
with pyarrow.OSFile("os.arrow", "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer: writer.write(table)
assert isinstance(pyarrow.OSFile("os.arrow"), pyarrow.OSFile)
for source in (pyarrow.memory_map("os.arrow"), pyarrow.OSFile("os.arrow", mode="rb"), pyarrow.input_stream("os.arrow")):
    assert source.read(6) == b"ARROW1"
assert pyarrow.ipc.open_file("os.arrow").read_all() == table
pyarrow.parquet.write_table(table, where="a.parquet")
with pyarrow.parquet.ParquetWriter("b.parquet", table.schema) as writer: writer.write_table(table)
assert pyarrow.parquet.read_table("a.parquet") == table == pyarrow.parquet.ParquetFile("b.parquet").read()
assert pyarrow.dataset.dataset(["a.parquet", "b.parquet"]).count_rows() == 4
pyarrow.csv.write_csv(table, "a.csv")
assert pyarrow.csv.read_csv("a.csv") == table
pyarrow.feather.write_feather(table, pathlib.Path("a.feather"))
assert pyarrow.feather.read_table("a.feather") == table
with sqlite3.connect("a.db") as database: database.execute("create table t as select 3 as a")
assert sqlite3.connect(database="a.db").execute("select a from t").fetchall() == [(3,)]
assert sqlite3.connect(":memory:").execute("select 1").fetchone() == (1,)
import tokenizers
own = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
own.save("tokenizer.json")
assert tokenizers.Tokenizer.from_file("tokenizer.json").get_vocab() == {"a": 0, "b": 1}
open("words", "w").write('{"a": 0}')
assert tokenizers.models.WordLevel.read_file("words") == {"a": 0}
with dbm.open("keys", "c") as keys: keys["a"] = "b"
with dbm.open("keys") as keys: assert keys["a"] == b"b"
"""
    assert run_script(IMPORTS + text + LOOP).message == ""
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.skipif(not guard.is_there(), reason="the kernel has no Landlock")
def test_the_files_that_are_executed_for_a_program(tmp_path: Path) -> None:
    program, *loaders = guard.executed("true")
    assert Path(program).name == "true" and all(Path(each).is_file() for each in loaders)
    assert list(guard.executed("no-program-of-that-name")) == []
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    wrapper.chmod(0o755)
    files = list(guard.executed(str(wrapper)))
    assert files[:2] == [str(wrapper), "/bin/sh"] and {program, *loaders} <= {*files}


def test_a_run_folder_of_a_killed_process_is_removed_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainatomy.scripts.launch import run_folder

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with run_folder() as alive:
        dead = Path(alive + "dead")
        dead.mkdir()
        (dead / "held").touch()
        unknown = Path(alive + "unknown")
        unknown.mkdir()
        with run_folder() as other:
            assert not dead.exists() and Path(alive).exists() and unknown.exists() and other != alive
        assert not Path(other).exists()
    assert [each.name for each in tmp_path.iterdir()] == [unknown.name]
    assert Path(alive).name.startswith("trainatomy-run-")
