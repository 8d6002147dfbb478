"""What a death says of the limit that a training passed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from machines import HEALTHY, with_host

from trainatomy.doctor.deaths import check_death, last_words
from trainatomy.reporters.doctor_sentences import found_sentence
from trainatomy.results.machine import MachineState

CGROUP = (
    "memory: usage 67108864kB, limit 67108864kB, failcnt 88\n"
    "Memory cgroup out of memory: Killed process 4242 (python) total-vm:99kB, anon-rss:33554432kB, file-rss:4kB"
)


def _said(machine: MachineState) -> str:
    (found,) = check_death(machine)
    return found_sentence(found)


def test_the_kernels_line_names_the_process_and_the_limit() -> None:
    assert _said(replace(HEALTHY, died=CGROUP)) == (
        "process 4242 (python) with 32.0 GiB of its own was killed because its control group reached its limit of "
        "64.0 GiB"
    )


def test_an_exit_code_is_the_groups_where_the_group_counted_a_kill() -> None:
    (found,) = check_death(replace(with_host(oom_kills=1), died="-9"))
    assert found.name == "died_of_group"


def test_the_worker_that_died_is_named() -> None:
    said = _said(replace(HEALTHY, died="DataLoader worker (pid 77) is killed by signal: Bus error."))
    assert said.startswith("DataLoader worker 77 ended with a bus error: /dev/shm of ")


def test_a_log_is_read_from_a_file(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("a step\n" * 5000 + CGROUP)
    assert last_words(str(log)).endswith(CGROUP)
    assert last_words("-9") == "-9"
    assert last_words("x" * 5000) == "x" * 5000


def test_nothing_is_said_where_nothing_died() -> None:
    assert not list(check_death(HEALTHY))
