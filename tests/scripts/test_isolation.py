"""No process of a script runs outside the simulation, and no file is written: by no way, seen from outside.

One script tries all of them in one dry run; each way names its mark, which must not be there afterwards.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainatomy.scripts import guard
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
    "pool": "multiprocessing.get_context('spawn').Pool(1).map(made, [MARK])",
    "executor": "ProcessPoolExecutor(1, multiprocessing.get_context('spawn')).submit(made, MARK).result()",
    "shell of asyncio": "asyncio.run(in_asyncio(MARK, shell=True))",
    "torch": "torch.multiprocessing.spawn(made_by_rank, (MARK,), nprocs=2)",
    "kept from before": "kept['fork']() or (made(MARK), os._exit(0))",
    "system of C": "C.system(('echo x > ' + MARK).encode())",
    "system of C, kept": "kept['system'](('touch ' + MARK).encode())",
    "execve of C": "C.execve(sys.executable.encode(), None, None)",
    "symbol by handle": "_ctypes.dlsym(C._handle, 'fork') and made(MARK)",
    "posix_spawn with a file": "os.posix_spawn(TOUCH, ['touch'], os.environ, file_actions=[opened(MARK)])",
    "kept fork_exec": "kept_fork_exec(MARK)",
    "exit": "os._exit(0)",
    "handler at exit": "atexit.register(kept['open'], MARK, 'w')",
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
    "sqlite3 by an address": "sqlite3.connect(f'file:{MARK}?mode=rwc', uri=True).execute('create table t (a)')",
    "logging": "logging.FileHandler(MARK)",
    "memmap": "numpy.memmap(MARK, mode='w+', shape=8).flush()",
    "tofile": "numpy.ones(3).tofile(MARK)",
    "savez": "numpy.savez(MARK, a=numpy.ones(3))",
    "savetxt": "numpy.savetxt(MARK, numpy.ones(3))",
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
    "shared": "shared_memory.SharedMemory(MARK, create=True, size=8).close()",
    "safetensors": "safetensors.numpy.save_file({'a': numpy.ones(3)}, MARK)",
    "tokenizers": "os.mkdir(MARK); made(MARK + '/file'); tokenizers.models.WordLevel({'a': 0}, 'a').save(MARK, 'a')",
    "attached": "sqlite3.connect(':memory:').executescript(f\"attach '{MARK}' as a; create table a.t (a)\")",
    "asynchronous checkpoint": "torch.distributed.checkpoint.save({'a': torch.ones(3)}, checkpoint_id=MARK)",
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
    "by its number": "open(numbered('victim/by its number'), 'w').write('changed')",
    "kept, by its number": "kept['open'](numbered('victim/kept, by its number'), 'w').write('changed')",
    "unlink of C": "C.unlink(b'victim/unlink of C')",
    "truncate of C": "C.truncate(b'victim/truncate of C', 0)",
}
"""Ways to change a file of that name in the folder ``victim``."""
REACHES = {
    "connection": "socket.create_connection(TCP)",
    "connection that is tried": "assert socket.socket().connect_ex(TCP) == 0",
    "connection of the C class": "_socket.socket().connect(TCP)",
    "connection of asyncio": "asyncio.run(asyncio.open_connection(*TCP))",
    "connection of C": "connected_in_c()",
    "datagram": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', UDP)",
    "message": "socket.socket(type=socket.SOCK_DGRAM).sendmsg([b'x'], [], 0, UDP)",
    "daemon": "socket.socket(socket.AF_UNIX).connect('daemon')",
    "name": "socket.gethostbyname('example.org')",
    "kill": "os.kill(os.getppid(), signal.SIGURG)",
    "killpg": "os.killpg(os.getpgid(os.getppid()), signal.SIGURG)",
    "kill of C": "assert C.kill(os.getppid(), signal.SIGURG) == 0",
}
"""Ways to reach other processes; each raises an error."""
SCRIPT = """
import _ctypes, _socket, asyncio, atexit, ctypes, dbm, io, json, logging, multiprocessing, os, pathlib, pty, shutil
import signal, socket, sqlite3, struct, subprocess, sys, tarfile, tempfile, zipfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import shared_memory
import multiprocess, numpy, pyarrow, pyarrow.fs, pyarrow.parquet, safetensors.numpy, tokenizers, torch
import torch.distributed.checkpoint
from sitecustomize import kept

C = ctypes.CDLL(None)
TOUCH = shutil.which("touch")
TCP, UDP = map(tuple, json.load(open("addresses.json")))

def made(path): open(path, "w").close()
def made_by_rank(rank, path): made(path)

async def in_asyncio(path, shell=False):
    start = asyncio.create_subprocess_shell if shell else asyncio.create_subprocess_exec
    await (await start(*(["touch " + path] if shell else ["touch", path]))).wait()

def numbered(path): return f"/proc/self/fd/{os.open(path, 0)}"
def opened(path): return os.POSIX_SPAWN_OPEN, 1, path, os.O_WRONLY | os.O_CREAT, 0o600

def kept_fork_exec(path):
    nothing = -1, -1, -1, -1, -1, -1, *os.pipe(), True, False, -1, None, None, None, -1, None, True
    process = kept["fork_exec"]([b"touch", path.encode()], [TOUCH.encode()], True, (), None, None, *nothing)
    os.waitpid(process, 0)

def connected_in_c():
    address = struct.pack("=HH4s8x", socket.AF_INET, socket.htons(TCP[1]), socket.inet_aton(TCP[0]))
    assert C.connect(socket.socket().fileno(), address, len(address)) == 0

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
import _posixsubprocess, ctypes, os
C = ctypes.CDLL(None)
kept = {"open": open, "os.open": os.open, "fork": os.fork, "remove": os.remove}
kept |= {"fork_exec": _posixsubprocess.fork_exec, "system": C.system, "C's fork": C.fork, "posix_spawn": C.posix_spawn}
"""
"""A library that has kept functions of Python and C from before the dry run, where no module shows them."""
WAYS = {"process": PROCESSES, "file": FILES, "change": CHANGES, "reach": REACHES}
FOLDER = {"addresses.json", "daemon", "folder", "keep", "library", "output", "train.py", "victim", "ways.json"}
OF_THE_WALL = {
    "system of C, kept", "fork of C, kept", "posix_spawn of C, kept", "kept fork_exec", "torch in C", "from_file",
    "socket", "FileIO", "attached", "pyarrow in C", "fopen of C", "open of C", "mkdir of C", "unlink of C",
    "truncate of C", "handler at exit",
}  # fmt: skip
"""Ways that only the kernel refuses, some without telling the script; at the exit, nothing is called."""


def test_no_process_runs_and_no_file_is_written_by_any_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _listening(tmp_path) as listeners:
        outcome, ends = _try_all(tmp_path, monkeypatch)
        assert not select.select(listeners, [], [], 0)[0]
    assert outcome.message == ""
    assert outcome.prediction is not None and outcome.prediction.script is not None
    script = outcome.prediction.script
    assert script.steps == 3
    ways = {
        kind: {name: number for number, name in enumerate(ways) if name not in OF_THE_WALL or guard.is_there()}
        for kind, ways in WAYS.items()
    }
    for kind in ("process", "file"):
        made = [name for name, number in ways[kind].items() if list(tmp_path.glob(f"{kind}-{number}-*"))]
        assert made == []
    assert [name for name in ways["change"] if (tmp_path / "victim" / name).read_text() != "mine"] == []
    if guard.is_there():
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


@contextlib.contextmanager
def _listening(folder: Path) -> Iterator[list[socket.socket]]:
    """Yield sockets that wait for connections and datagrams, whose addresses lie in the folder."""
    with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp, socket.socket(socket.AF_UNIX) as daemon:
        for listener in (tcp, udp):
            listener.bind(("127.0.0.1", 0))
        (folder / "addresses.json").write_text(json.dumps([tcp.getsockname(), udp.getsockname()]))
        with contextlib.chdir(folder):  # the path of a socket must be short
            daemon.bind("daemon")
        for listener in (tcp, daemon):
            listener.listen()
        yield [tcp, udp, daemon]


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
