"""Writing, reading, listing and finding; bad files, bad folders, a full disk."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from trainatomy.errors import MissingLibrary, TrainatomyError
from trainatomy.records.create import key_of, make_record, to_document
from trainatomy.records.store import Store, default_folder
from trainatomy.results.record import Record


def test_written_workloads_can_be_read(store: Store, vanilla: Record, fp16: Record) -> None:
    assert store.list() == ()
    where = store.write(fp16)
    assert where == f"{store.path}/{fp16.id}.json"
    store.write(vanilla)
    assert store.read(vanilla.id) == vanilla
    assert store.read(where) == fp16
    assert [row.id for row in store.list()] == [vanilla.id, fp16.id]  # oldest first
    row = store.list()[1]
    assert (row.file, row.name, row.device_bytes, row.gap) == (where, "notebook-fp16", 7886143488, 0.0)


def test_writing_leaves_one_file(tmp_path: Path, vanilla: Record) -> None:
    Store(tmp_path).write(vanilla)
    Store(tmp_path).write(vanilla)
    assert [file.name for file in tmp_path.iterdir()] == [f"{vanilla.id}.json"]


def test_the_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINATOMY_RECORDS", raising=False)
    assert default_folder() == Store().path == "trainatomy-records"
    monkeypatch.setenv("TRAINATOMY_RECORDS", "memory://elsewhere")
    assert Store().path == "memory://elsewhere"
    assert Store("here").path == "here"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b'{"schema": "trainatomy/record/1", "id": "x"', "not JSON"),
        (b'{"colour": "red"}', "it names no schema"),
        (b'{"schema": "trainatomy/record/7"}', "Upgrade"),
        (b'{"schema": "trainatomy/record/1"}', "damaged record: id: Field required"),
    ],
)
def test_a_bad_file_is_reported_and_blocks_nothing(store: Store, vanilla: Record, content: bytes, reason: str) -> None:
    store.write(vanilla)
    store._folder.filesystem.pipe_file(f"{store._folder.root}/bad-{vanilla.key[:4]}.json", content)
    history = store.history()
    assert [row.id for row in history.records] == [vanilla.id]
    [skipped] = history.skipped
    assert skipped.file.endswith(f"/bad-{vanilla.key[:4]}.json")
    assert reason in skipped.reason
    assert store.find(vanilla.key) == vanilla
    with pytest.raises(TrainatomyError, match=f"bad-{vanilla.key[:4]}.json: .*{reason}"):
        store.read(f"bad-{vanilla.key[:4]}")


def test_other_files_are_not_looked_at(tmp_path: Path, vanilla: Record) -> None:
    store = Store(tmp_path)
    store.write(vanilla)
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / ".20261121.json.77.unfinished").write_bytes(b'{"half')
    (tmp_path / ".hidden.json").write_bytes(b"{")
    (tmp_path / "folder.json").mkdir()
    history = store.history()
    assert len(history.records) == 1
    assert history.skipped == ()


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path, vanilla: Record) -> None:
    Store(tmp_path).write(vanilla)
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    [skipped] = Store(tmp_path).history().skipped
    assert skipped.reason.startswith("could not be read: ")


def test_a_copied_record_has_the_id_of_its_file_name(tmp_path: Path, vanilla: Record) -> None:
    Store(tmp_path).write(vanilla)
    (tmp_path / "best.json").write_bytes(to_document(vanilla))
    assert {row.id for row in Store(tmp_path).list()} == {vanilla.id, "best"}
    assert Store(tmp_path).read("best") == replace(vanilla, id="best")
    assert Store().read(tmp_path / "best.json").measurement == vanilla.measurement


def test_find_returns_the_newest_match(store: Store, vanilla: Record, fp16: Record) -> None:
    def written(created: str, group: str, repeat: int) -> Record:
        identity = f"{created[:10].replace('-', '')}-000000000-{vanilla.key[:4]}{repeat}abc"
        record = replace(vanilla, id=identity, created=created, group=group, repeat=repeat)
        store.write(record)
        return record

    written("2026-11-20T00:00:00Z", "runs", 0)
    newest = written("2026-11-21T00:00:00Z", "runs", 0)
    again = written("2026-11-22T00:00:00Z", "runs", 1)
    store.write(fp16)
    assert store.find(vanilla.key, "runs", 0) == newest
    assert store.find(vanilla.key, "runs", 1) == again
    assert store.find(vanilla.key, "runs", 2) is None
    assert store.find(vanilla.key) is None
    assert store.find("f" * 64, "runs") is None


def test_make_record_is_found_by_its_key(store: Store, vanilla: Record) -> None:
    record = make_record(vanilla.measurement, vanilla.prediction, "trainatomy measure a.yaml", "runs", 2)
    store.write(record)
    assert store.find(key_of(vanilla.measurement.workload), "runs", 2) == record
    other = make_record(vanilla.measurement, None, "", steps=9, components=False)
    assert other.key == key_of({**vanilla.measurement.workload, "name": "x"}, steps=9, components=False) != record.key
    assert record.id < other.id or record.created == other.created
    assert record.id != make_record(vanilla.measurement, None, "").id


def test_the_key_does_not_depend_on_order_or_name() -> None:
    one = {"name": "a", "train": {"bf16": True, "seed": 1}, "model": {"id": "gpt2"}}
    two = {"model": {"id": "gpt2"}, "train": {"seed": 1, "bf16": True}, "name": "b"}
    assert key_of(one) == key_of(two)
    assert (
        len({key_of(one), key_of({**one, "mode": "inference"}), key_of(one, steps=4), key_of(one, components=False)})
        == 4
    )


def test_a_full_disk_loses_nothing(tmp_path: Path, vanilla: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    rescue = tmp_path / "rescue"
    rescue.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(rescue))
    full, fsync = tmp_path / "full", os.fsync

    def fails_there(handle: int) -> None:
        if str(full) in str(Path(f"/proc/self/fd/{handle}").readlink()):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fails_there)
    with pytest.raises(TrainatomyError) as caught:
        Store(full).write(vanilla)
    assert "No space left on device; make room, or name another folder" in str(caught.value)
    assert f"The record was kept as {rescue}/{vanilla.id}.json" in str(caught.value)
    assert list(full.iterdir()) == []
    assert Store(rescue).read("last") == vanilla


def test_an_unwritable_location_is_reported(tmp_path: Path, vanilla: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file"))
    with pytest.raises(
        TrainatomyError, match=r"file/runs/.* could not be written: Not a directory\nThe record could not be kept"
    ):
        Store(tmp_path / "file" / "runs").write(vanilla)


def test_a_folder_without_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuses)
    with pytest.raises(TrainatomyError, match="could not be written: Permission denied; name a writable folder"):
        Store(tmp_path / "runs").check()


def test_check_leaves_nothing_behind(store: Store) -> None:
    store.check()
    assert store.exists()
    assert store.history() == replace(store.history(), records=(), skipped=())


def test_a_file_cannot_be_a_store(tmp_path: Path, vanilla: Record) -> None:
    where = Store(tmp_path).write(vanilla)
    with pytest.raises(TrainatomyError, match="is a file: name the folder that it is in"):
        Store(where).list()


def test_an_unknown_filesystem() -> None:
    with pytest.raises(TrainatomyError, match=r"gopher://runs.* is not a folder of records"):
        Store("gopher://runs")


def test_a_filesystem_whose_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("trainatomy.records.store.url_to_fs", missing)
    with pytest.raises(MissingLibrary, match="s3://bucket/runs: Install s3fs"):
        Store("s3://bucket/runs")


def test_files_are_renamed_into_place_where_a_put_is_not_atomic(
    vanilla: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write as on SFTP: a reader that looks during the transfer sees no record."""
    monkeypatch.setattr("trainatomy.records.store.ATOMIC_FILESYSTEMS", frozenset())
    store, memory = Store("memory://sftp-like"), fsspec.filesystem("memory")
    seen: list[list[str]] = []
    move = memory.mv
    monkeypatch.setattr(
        type(memory),
        "mv",
        lambda _, *names: (seen.append([row.id for row in store.list()]), move(*names)),
        raising=True,
    )
    store.write(vanilla)
    assert seen == [[]]
    assert store.list()[0].id == vanilla.id

    def breaks(*_: object) -> None:
        raise ConnectionResetError("gone")

    monkeypatch.setattr(type(memory), "mv", breaks)
    with pytest.raises(TrainatomyError, match="ConnectionResetError: gone"):
        Store("memory://sftp-like/two").write(vanilla)
    assert memory.ls("/sftp-like/two", detail=False) == []
    memory.rm("/sftp-like", recursive=True)


def test_records_are_readable_by_others(tmp_path: Path, vanilla: Record) -> None:
    """Check that a record is plain UTF-8 JSON that can be read without trainatomy."""
    content = json.loads(Path(Store(tmp_path).write(vanilla)).read_text("utf-8"))
    assert content["measurement"]["workload"]["train"] == {"per_device_train_batch_size": 4}
    assert content["prediction"]["memory"]["device_bytes"] == 8972468224
