import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from oracles import assert_same, files, load

from streamexport import OutputError, export_sharded, publish

REFUSALS = [errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.EINVAL]


@pytest.fixture
def old():
    """What an earlier export holds."""
    return {f"layer.{i}": torch.full((5000,), float(i)) for i in range(5)}


@pytest.fixture
def new():
    """What comes after it, under the same names."""
    return {f"layer.{i}": torch.full((5000,), -1.0 - i) for i in range(5)}


@pytest.mark.parametrize("sizes", [("20KB", "40KB", "1MB"), ("1MB", "20KB", "60KB"), ("20KB", "1MB", "20KB")])
def test_only_the_new_set_is_visible_after_each_export(sizes, old, new, tmp_path):
    """D54: five shards, then two or three, then one, in any order; for readers of the index and of *.safetensors."""
    for limit, values in zip(sizes, (old, new, old), strict=True):
        report = export_sharded(values, tmp_path, limit)
        assert files(tmp_path) == {file.filename for file in report.files}
        assert_same(load(tmp_path), values)


def test_everything_else_in_the_directory_survives(old, new, tmp_path):
    """D54: other variants, adapters, a .bin checkpoint, notes, folders and look-alikes are not this set's files."""
    others = [
        "model.ema.safetensors",
        "model.ema-00001-of-00002.safetensors",
        "model.safetensors.index.ema.json",
        "modelx-00001-of-00009.safetensors",
        "model-00001-of-00009.bin",
        "model-1-of-2.safetensors",
        "adapter_model.safetensors",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "optimizer.pt",
        "notes.md",
        "checkpoint-5/model.safetensors",
    ]
    (tmp_path / "checkpoint-5").mkdir()
    for name in others:
        (tmp_path / name).write_text(name)
    export_sharded(old, tmp_path, "20KB")
    export_sharded(new, tmp_path)
    assert files(tmp_path) == {*others, "checkpoint-5", "model.safetensors"}
    assert all((tmp_path / name).read_text() == name for name in others)


def test_staged_files_match_no_loaders_pattern(old, tmp_path):
    """D58: while an export runs, the directory shows a hidden folder and no weights at any depth."""
    seen = set()
    export_sharded(old, tmp_path, "20KB", progress=lambda event: seen.update(files(tmp_path)))
    assert seen
    assert all(name.startswith(".streamexport-") for name in seen)
    assert not any(
        name.endswith((".safetensors", ".json", ".bin")) or ".safetensors.index" in name
        for name in seen
        if not name.endswith(".part")
    )
    assert not list(tmp_path.glob(".streamexport*"))


def test_symlinks_are_replaced_and_never_written_through(old, new, tmp_path):
    """A hub cache's blob that model.safetensors points to keeps its bytes; so does a dangling link's target."""
    blob = tmp_path / "blob"
    export_sharded(old, tmp_path / "cache")
    (tmp_path / "cache/model.safetensors").rename(blob)
    before = blob.read_bytes()
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").symlink_to(blob)
    (out / "model-00001-of-00003.safetensors").symlink_to(tmp_path / "nowhere")
    export_sharded(new, out)
    assert not (out / "model.safetensors").is_symlink()
    assert files(out) == {"model.safetensors"}
    assert blob.read_bytes() == before
    assert not (tmp_path / "nowhere").exists()


def test_live_weights_that_are_mapped_from_the_output_keep_their_values(old, tmp_path):
    """from_pretrained maps the files it loads: overwriting them in place would zero the live model."""
    export_sharded(old, tmp_path)
    live = load(tmp_path)
    export_sharded(live, tmp_path, "20KB")
    assert_same(load(tmp_path), old)
    assert_same(live, old)


def test_a_folder_in_the_way_is_an_error_that_changes_nothing(old, new, tmp_path):
    """A user's folder of a shard's name is not removed."""
    export_sharded(old, tmp_path, "20KB")
    (tmp_path / "model-00001-of-00003.safetensors").mkdir()
    (tmp_path / "model-00001-of-00003.safetensors/mine").write_text("x")
    before = files(tmp_path)
    with pytest.raises(OSError, match="model-00001-of-00003"):
        export_sharded(new, tmp_path, "40KB")
    assert files(tmp_path) == before
    assert_same(load(tmp_path), old)


def _fail_nth(monkeypatch, owner, name, number, error):
    """Let the n-th call of a function fail; return the list of calls."""
    calls = []
    real = getattr(owner, name)

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) == number:
            raise OSError(error, os.strerror(error))
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize(("owner", "name"), [(os, "pwrite"), (os, "fsync"), (Path, "rename"), (os, "open")])
def test_a_failure_at_any_call_leaves_the_earlier_export(owner, name, error, old, new, tmp_path):
    """Every write, fsync, rename and open in turn: the error is raised, the old export reads, nothing is left."""
    export_sharded(old, tmp_path / "out", "40KB")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    number, calls = 0, [()]
    while number <= len(calls):
        number += 1
        report = None
        with pytest.MonkeyPatch.context() as patch:
            calls = _fail_nth(patch, owner, name, number, error)
            try:
                report = export_sharded(new, tmp_path / "out", "20KB")
            except OSError as caught:
                assert caught.errno == error  # noqa: PT017 - it may also not fail: after the last call
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("streamexport")]
        if report is None:
            assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
            continue
        assert_same(load(tmp_path / "out"), new)
        if number <= len(calls):  # Only the removal of the emptied staging directory is not worth failing for.
            (left,) = (tmp_path / "out").glob(".streamexport-*")
            assert left.name in report.warnings[0]
            shutil.rmtree(tmp_path / "out")
            export_sharded(old, tmp_path / "out", "40KB")
    assert number > 5
    assert report is not None


@pytest.mark.parametrize("limit", [1 << 20, 300_000])
def test_a_full_file_system_is_an_error_that_names_the_file(limit, old, tmp_path):
    """A real limit, at a page's end or inside one: the kernel refuses the write beyond RLIMIT_FSIZE with EFBIG."""
    script = (
        "import resource, signal, sys, torch, streamexport;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2);"
        "streamexport.export_sharded({'w': torch.zeros(1 << 20)}, sys.argv[1])"
    )
    export_sharded(old, tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "out", str(limit)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert re.search(r"File too large: '.*model\.safetensors\.part'", done.stderr)
    assert files(tmp_path / "out") == {"model.safetensors"}
    assert_same(load(tmp_path / "out"), old)


@pytest.mark.parametrize("error", REFUSALS)
def test_file_systems_that_lack_calls_get_a_whole_export(error, old, new, tmp_path, monkeypatch):
    """D56: rename, chmod, ftruncate, fsync, preallocation and O_DIRECT refused: sequential writes, and it is said."""

    def refuse(*args, **kwargs):
        raise OSError(error, os.strerror(error))

    real_open = os.open

    def open_buffered(path, flags, *args, **kwargs):
        return refuse() if flags & os.O_DIRECT else real_open(path, flags, *args, **kwargs)

    export_sharded(old, tmp_path, "20KB")
    monkeypatch.setattr(os, "open", open_buffered)
    for owner, names in [
        (os, ("rename", "replace", "link", "chmod", "fchmod", "truncate", "ftruncate", "fsync", "fdatasync")),
        (os, ("posix_fallocate", "posix_fadvise", "copy_file_range", "sendfile")),
        (Path, ("rename", "replace", "chmod")),
    ]:
        for name in names:
            monkeypatch.setattr(owner, name, refuse)
    report = export_sharded(new, tmp_path, "40KB")
    monkeypatch.undo()
    assert_same(load(tmp_path), new)
    assert files(tmp_path) == {file.filename for file in report.files}
    assert any("cannot rename" in warning for warning in report.warnings)
    assert any("no fsync" in warning for warning in report.warnings)


def test_data_is_durable_before_names_and_the_index_comes_last(old, new, tmp_path, monkeypatch):
    """D59: the order of calls, by the files they are for."""
    export_sharded(old, tmp_path, "40KB")
    events = []
    fsync, rename = os.fsync, Path.rename

    def record_fsync(fd):
        events.append(("fsync", Path(f"/proc/self/fd/{fd}").readlink().name))
        fsync(fd)

    def record_rename(self, target):
        events.append(("rename", self.name, Path(target).name))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    export_sharded(new, tmp_path, "60KB")
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = "model.safetensors.index.json"
    renames = [event[1:] for event in events if event[0] == "rename"]
    assert renames[0] == (index, index + ".part")  # the old entry point goes first
    assert renames[-1] == (index + ".part", index)  # the new one comes last
    first_rename = events.index(("rename", *renames[0]))
    for name in (*shards, index):
        assert events.index(("fsync", name + ".part")) < first_rename
    last = events.index(("rename", *renames[-1]))
    placed = max(events.index(("rename", shard + ".part", shard)) for shard in shards)
    directory = ("fsync", tmp_path.name)
    assert directory in events[placed:last]
    assert events[-1] == directory


def test_without_fsync_nothing_is_waited_for(old, tmp_path, monkeypatch):
    """fsync=False makes no fsync at all."""
    monkeypatch.setattr(os, "fsync", None)
    assert export_sharded(old, tmp_path, "40KB", fsync=False).warnings == ()
    assert_same(load(tmp_path), old)


KILLED = """
import os, signal, sys, torch, streamexport
new = {f"layer.{i}": torch.full((5000,), -1.0 - i) for i in range(5)}
left = int(sys.argv[2])

def audit(event, args):
    # Count the calls that change what a reader can see, and die at the given one.
    global left
    if event in {"os.rename", "os.remove", "os.rmdir", "os.mkdir"} or (event == "open" and args[2] & os.O_CREAT):
        if ".streamexport" in str(args[0]) or sys.argv[1] in str(args[0]):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(audit)
streamexport.export_sharded(new, sys.argv[1], "40KB")
"""


def test_a_process_killed_at_any_step_leaves_old_new_or_nothing(old, new, tmp_path):
    """D51, D55: SIGKILL at every call that creates, renames or removes; a reader finds a whole export or none."""
    seen = set()
    for step in range(200):
        out = tmp_path / str(step)
        export_sharded(old, out, "20KB")
        done = subprocess.run([sys.executable, "-c", KILLED, out, str(step)], check=False, capture_output=True)
        entries = [name for name in ("model.safetensors", "model.safetensors.index.json") if (out / name).exists()]
        if entries:
            values = load(out)
            found = "new" if torch.equal(values["layer.0"], new["layer.0"]) else "old"
            assert_same(values, new if found == "new" else old)
        else:
            found = "nothing"
        seen.add(found)
        assert not [name for name in files(out) if name.startswith(".") and name.endswith(".safetensors")]
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.returncode == 0
    assert step > 20
    assert seen == {"old", "nothing", "new"}


def test_directories_made_for_an_export_that_fails_go_again(old, tmp_path):
    """All that were missing, and none that was there; also when not even the staging directory can be made."""
    (tmp_path / "there").mkdir()
    for owner, name in [(os, "pwrite"), (publish.tempfile, "mkdtemp")]:
        with pytest.MonkeyPatch.context() as patch:
            _fail_nth(patch, owner, name, 1, errno.ENOSPC)
            with pytest.raises(OSError, match="No space"):
                export_sharded(old, tmp_path / "there/a/b")
        assert files(tmp_path) == {"there"}


def test_an_interrupt_is_a_clean_end(old, new, tmp_path):
    """KeyboardInterrupt while weights are written: the earlier export is there, and nothing else."""

    def interrupt(event):
        raise KeyboardInterrupt

    export_sharded(old, tmp_path, "20KB")
    before = files(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        export_sharded(new, tmp_path, "20KB", progress=interrupt)
    assert files(tmp_path) == before
    assert_same(load(tmp_path), old)


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_at_any_rename_is_a_clean_end(after, old, new, tmp_path):
    """Before a file is moved or just after it was: the earlier set is put back by what is there."""
    export_sharded(old, tmp_path, "20KB")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real = Path.rename
    for number in range(1, 100):
        left = [number]

        def rename(self, target, left=left):
            left[0] -= 1
            if left[0] == 0 and not after:
                raise KeyboardInterrupt
            moved = real(self, target)
            if left[0] == 0:
                raise KeyboardInterrupt
            return moved

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "rename", rename)
            try:
                export_sharded(new, tmp_path, "40KB")
                break
            except KeyboardInterrupt:
                pass
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert number > 9
    assert_same(load(tmp_path), new)


def test_an_earlier_export_that_cannot_be_put_back_is_kept(old, new, tmp_path, monkeypatch):
    """A disk that goes bad while names are changed: the error says where the earlier files are."""
    export_sharded(old, tmp_path, "20KB")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls = []
    real = Path.rename

    def rename(self, target):
        calls.append(self)
        if len(calls) > 9:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OutputError, match=r"could not be put back: its files are in .*/old"):
        export_sharded(new, tmp_path, "40KB")
    monkeypatch.undo()
    (kept,) = tmp_path.glob(".streamexport-*/old")
    aside = {path.name.removesuffix(".part"): path.read_bytes() for path in kept.iterdir()}
    there = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert aside | there == before


def test_a_copy_into_place_that_fails_leaves_no_part_of_it(old, new, tmp_path, monkeypatch):
    """Where rename is refused and a copy breaks off, the half file goes and the earlier export comes back."""
    export_sharded(old, tmp_path, "20KB")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    copies = []
    real = publish._copy

    def copy(origin, target):
        copies.append(target)
        if len(copies) == 8:
            target.write_bytes(origin.read_bytes()[:50])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(origin, target)

    def refuse(self, target):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(publish, "_copy", copy)
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="No space"):
        export_sharded(new, tmp_path, "40KB")
    monkeypatch.undo()
    assert copies[7].parent == tmp_path
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_new_directory_below_one_that_cannot_be_read_is_exported_to(old, tmp_path, monkeypatch):
    """Its name cannot be made durable, which is said; the export is there."""

    def refuse(path):
        if path == tmp_path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return True

    monkeypatch.setattr(publish, "sync_directory", refuse)
    report = export_sharded(old, tmp_path / "out")
    assert "may not survive a loss of power" in report.warnings[0]
    assert_same(load(tmp_path / "out"), old)


def test_directories_are_made_beside_others_that_make_them(old, tmp_path, monkeypatch):
    """D60: mkdir may fail although another process has just made the directory, or not show it at once."""
    real = Path.mkdir
    failures = [FileExistsError, FileNotFoundError]

    def racing(self, *args, **kwargs):
        if self == tmp_path / "a/b" and failures:
            real(self, *args, **kwargs)
            raise failures.pop()
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", racing)
    for _ in range(2):
        export_sharded(old, tmp_path / "a/b")
    assert not failures
    assert_same(load(tmp_path / "a/b"), old)
    monkeypatch.undo()

    barrier = threading.Barrier(4)
    made = []

    def make():
        barrier.wait()
        publish.make_directory(tmp_path / "x/y/z")
        made.append((tmp_path / "x/y/z").is_dir())

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [True] * 4
