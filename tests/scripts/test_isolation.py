"""No process of a script runs outside the simulation, and no file is written: by no way, seen from outside.

One script tries all of them in one dry run; each way names its mark, which must not be there afterwards.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainatomy.scripts import wall
from trainatomy.scripts.command import read_command
from trainatomy.scripts.job import Job, Outcome
from trainatomy.scripts.launch import run_script

PROCESSES = {
    "subprocess": "subprocess.run(['touch', MARK])",
    "shell": "subprocess.run('echo x > ' + MARK, shell=True)",
    "popen": "os.popen('echo x > ' + MARK).read()",
    "system": "os.system('echo x > ' + MARK)",
    "python": "subprocess.run([sys.executable, '-c', CODE])",
    "exec": "os.execv(sys.executable, [sys.executable, '-c', CODE])",
    "execvp": "os.execvp('touch', ['touch', MARK])",
    "posix_spawn": "os.waitpid(os.posix_spawn(TOUCH, ['touch', MARK], os.environ), 0)",
    "posix_spawnp": "os.waitpid(os.posix_spawnp('python3', ['python3', '-c', CODE], os.environ), 0)",
    "spawn": "os.spawnvp(os.P_WAIT, 'touch', ['touch', MARK])",
    "spawnl": "os.spawnl(os.P_WAIT, sys.executable, sys.executable, '-c', CODE)",
    "fork": "os.fork() or (made(MARK), os._exit(0))",
    "forkpty": "os.forkpty()[0] or (made(MARK), os._exit(0))",
    "pty": "pty.spawn(['touch', MARK])",
    "fork_exec": "fork_exec(MARK)",
    "asyncio": "asyncio.run(in_asyncio(MARK))",
    "thread": "ThreadPoolExecutor(1).submit(subprocess.run, ['touch', MARK]).result()",
    "process": "multiprocessing.get_context('fork').Process(target=made, args=(MARK,)).start()",
    "process by spawn": "multiprocessing.get_context('spawn').Process(target=made, args=(MARK,)).start()",
    "process by fork server": "multiprocessing.get_context('forkserver').Process(target=made, args=(MARK,)).start()",
    "multiprocess": "multiprocess.Process(target=made, args=(MARK,)).start()",
    "torch": "torch.multiprocessing.spawn(made_by_rank, (MARK,), nprocs=2)",
    "kept from before": "kept['fork']() or (made(MARK), os._exit(0))",
    "system of C": "C.system(('echo x > ' + MARK).encode())",
    "system of C, kept": "kept['system'](('touch ' + MARK).encode())",
    "fork of C, kept": 'kept["C\'s fork"]() or (made(MARK), os._exit(0))',
    "posix_spawn of C, kept": "spawned_in_c([sys.executable, '-c', CODE])",
}
"""Ways to start a process that makes a file ``MARK``."""
FILES = {
    "open": "open(MARK, 'w').close()",
    "append": "open(MARK, 'a').close()",
    "os.open": "os.close(os.open(MARK, os.O_CREAT | os.O_WRONLY))",
    "os.open in a folder": "os.close(os.open(os.path.basename(MARK), os.O_CREAT | os.O_RDWR, dir_fd=os.open('.', 0)))",
    "kept from before": "kept['open'](MARK, 'w').close()",
    "kept os.open": "os.close(kept['os.open'](MARK, os.O_CREAT | os.O_WRONLY))",
    "FileIO": "io.FileIO(MARK, 'w').close()",
    "pathlib": "pathlib.Path(MARK).write_text('x')",
    "touch": "pathlib.Path(MARK).touch()",
    "mkdir": "os.makedirs(MARK + '/deep'); made(MARK + '/deep/file')",
    "mkfifo": "os.mkfifo(MARK)",
    "mknod": "os.mknod(MARK)",
    "symlink": "os.symlink('keep', MARK)",
    "link": "os.link('keep', MARK)",
    "through a link": "os.symlink('.', 'here'); open('here/' + MARK, 'w').close()",
    "copy": "shutil.copy('keep', MARK)",
    "move": "shutil.move('keep', MARK)",
    "copytree": "shutil.copytree('folder', MARK)",
    "rename": "os.rename('folder', MARK)",
    "temporary": "os.rename(tempfile.mkstemp(dir='.')[1], MARK)",
    "lasting": "tempfile.NamedTemporaryFile(dir='.', prefix=MARK, delete=False).close()",
    "tarfile": "tarfile.open(MARK, 'w').close()",
    "zipfile": "zipfile.ZipFile(MARK, 'w').close()",
    "dbm": "dbm.open(MARK, 'c').close()",
    "sqlite3": "sqlite3.connect(MARK).execute('create table t (a)')",
    "logging": "logging.FileHandler(MARK)",
    "memmap": "numpy.memmap(MARK, mode='w+', shape=8).flush()",
    "tofile": "numpy.ones(3).tofile(MARK)",
    "savez": "numpy.savez(MARK, a=numpy.ones(3))",
    "torch.save": "torch.save(torch.ones(3), MARK)",
    "torch in C": "torch._C.PyTorchFileWriter(MARK).write_end_of_file()",
    "from_file": "torch.from_file(MARK, shared=True, size=8)",
    "pyarrow": "pyarrow.OSFile(MARK, 'wb').close()",
    "pyarrow in C": "pyarrow.fs.LocalFileSystem().open_output_stream(MARK).close()",
    "parquet": "pyarrow.parquet.write_table(pyarrow.table({'a': [1]}), MARK)",
    "fopen of C": "C.fopen(MARK.encode(), b'w')",
    "open of C": "C.open(MARK.encode(), os.O_CREAT | os.O_WRONLY, 0o600)",
    "mkdir of C": "C.mkdir(MARK.encode(), 0o700)",
    "shared memory": "open('/dev/shm/' + MARK, 'w').close()",
    "socket": "socket.socket(socket.AF_UNIX).bind(MARK)",
}
"""Ways to make a file ``MARK``."""
CHANGES = {
    "open": "open('victim/open', 'w').write('changed')",
    "append": "open('victim/append', 'a').write('changed')",
    "update": "open('victim/update', 'r+').write('changed')",
    "truncate": "os.truncate('victim/truncate', 0)",
    "memmap": "numpy.memmap('victim/memmap', mode='r+')[:] = 0",
    "remove": "os.remove('victim/remove')",
    "unlink": "pathlib.Path('victim/unlink').unlink()",
    "remove in a folder": "os.unlink('remove in a folder', dir_fd=os.open('victim', 0))",
    "kept remove": "kept['remove']('victim/kept remove')",
    "rename": "os.rename('victim/rename', 'victim/renamed')",
    "replace": "os.replace('keep', 'victim/replace')",
    "rm": "subprocess.run(['rm', '-rf', 'victim/rm'])",
    "unlink of C": "C.unlink(b'victim/unlink of C')",
    "truncate of C": "C.truncate(b'victim/truncate of C', 0)",
}
"""Ways to change a file of that name in the folder ``victim``."""
SCRIPT = """
import asyncio, ctypes, dbm, io, json, logging, multiprocessing, os, pathlib, pty, shutil, socket, sqlite3, subprocess
import sys, tarfile, tempfile, zipfile
from concurrent.futures import ThreadPoolExecutor
import multiprocess, numpy, pyarrow, pyarrow.fs, pyarrow.parquet, torch
from sitecustomize import kept

C = ctypes.CDLL(None)
TOUCH = shutil.which("touch")

def made(path): open(path, "w").close()
def made_by_rank(rank, path): made(path)

async def in_asyncio(path):
    await (await asyncio.create_subprocess_exec("touch", path)).wait()

def fork_exec(path):
    read, write = os.pipe()
    multiprocessing.util.spawnv_passfds(TOUCH.encode(), [b"touch", path.encode()], [])

def spawned_in_c(words):
    array = (ctypes.c_char_p * (len(words) + 1))(*map(os.fsencode, words))
    process = ctypes.c_int()
    if kept["posix_spawn"](ctypes.byref(process), array[0], None, None, array, None) == 0:
        os.waitpid(process.value, 0)

ends = {}
for kind, ways in json.load(open("ways.json")).items():
    for number, (name, way) in enumerate(ways.items()):
        MARK = f"{kind}-{number}-"
        CODE = f"open({MARK!r}, 'w')"
        try:
            exec(compile(way, __file__, 'exec'))
            ends[f"{kind}: {name}"] = ""
        except BaseException as error:
            ends[f"{kind}: {name}"] = f"{type(error).__name__}: {error}"
print("\\nENDS " + json.dumps(ends), flush=True)
model = torch.nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.ones(8, 16, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
KEPT = """
import ctypes, os
C = ctypes.CDLL(None)
kept = {"open": open, "os.open": os.open, "fork": os.fork, "remove": os.remove}
kept |= {"system": C.system, "C's fork": C.fork, "posix_spawn": C.posix_spawn}
"""
"""A library that has kept functions of Python and C from before the dry run, where no module shows them."""
WAYS = {"process": PROCESSES, "file": FILES, "change": CHANGES}
needs_wall = pytest.mark.skipif(not wall.is_there(), reason="the kernel has no Landlock")


FOLDER = {"folder", "keep", "library", "output", "train.py", "victim", "ways.json"}
OF_THE_WALL = frozenset(
    {"system of C, kept", "fork of C, kept", "posix_spawn of C, kept", "torch in C", "from_file", "socket", "FileIO"}
    | {"pyarrow in C", "fopen of C", "open of C", "mkdir of C", "unlink of C", "truncate of C"}
)
"""Ways that only the kernel refuses, some without telling the script."""


def test_no_process_runs_and_no_file_is_written_by_any_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, ends = _try_all(tmp_path, monkeypatch)
    assert outcome.message == ""
    assert outcome.prediction is not None and outcome.prediction.script is not None
    script = outcome.prediction.script
    assert script.steps == 3
    ways = {
        kind: {name: number for number, name in enumerate(ways) if name not in OF_THE_WALL or wall.is_there()}
        for kind, ways in WAYS.items()
    }
    for kind in ("process", "file"):
        made = [name for name, number in ways[kind].items() if list(tmp_path.glob(f"{kind}-{number}-*"))]
        assert made == []
    assert [name for name in ways["change"] if (tmp_path / "victim" / name).read_text() != "mine"] == []
    if wall.is_there():
        assert sorted(each.name for each in (tmp_path / "victim").iterdir()) == sorted(CHANGES)
        assert not {each.name for each in tmp_path.iterdir()} - FOLDER
    assert not list(Path("/dev/shm").glob("file-*"))

    said = [*script.writes, *(each.name for each in script.stand_ins if each.kind == "command")]
    silent = [
        name
        for kind, numbers in ways.items()
        for name, number in numbers.items()
        if not ends[f"{kind}: {name}"] and not any(f"{kind}-{number}-" in each or name in each for each in said)
    ]
    assert set(silent) <= OF_THE_WALL  # everything else was refused, or is listed


def _try_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Outcome, dict[str, str]]:
    """Run the script that tries all ways in a folder; return the outcome, and what each way raised."""
    for name in ("folder", "victim", "library"):
        (folder / name).mkdir()
    for name in ("keep", "folder/file", *(f"victim/{name}" for name in CHANGES)):
        (folder / name).write_text("mine")
    (folder / "library/sitecustomize.py").write_text(KEPT)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "ways.json").write_text(json.dumps(WAYS))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder / "library"), prepend=":")
    job = Job(read_command(["train.py"]), ("h100-sxm",))
    (outcome,) = run_script(job, folder / "output")
    printed = (folder / "output").read_text()
    return outcome, json.loads(printed.partition("\nENDS ")[2].partition("\n")[0] or "{}")
