import errno
import mmap
import os

import pytest
from oracles import assert_same, load

from streamexport import OutputError, export_sharded
from streamexport import files as files_module
from streamexport.files import OutputFile, choose_direct

MIB = 1024 * 1024


def aligned(nbytes):
    """Page-aligned memory of random bytes."""
    memory = mmap.mmap(-1, nbytes)
    memory.write(os.urandom(nbytes))
    return memoryview(memory)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, MIB, MIB + 4095, 3 * MIB + 1])
def test_a_file_has_exactly_the_bytes_that_were_written(direct, nbytes, tmp_path):
    """Aligned body directly, the last bytes through an ordinary descriptor: no padding is left."""
    content = aligned(nbytes)
    file = OutputFile(tmp_path / "f", direct=direct)
    for start in range(0, nbytes, MIB):
        file.write(content[start : start + MIB], start)
    file.finish(fsync=True)
    assert (tmp_path / "f").read_bytes() == content
    assert file.synced


@pytest.mark.parametrize("direct", [True, False])
def test_short_writes_are_continued(direct, tensors, tmp_path, monkeypatch):
    """The system may take fewer bytes than it is given: a signal, a quota, 2 GiB."""
    write = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, view, at: write(fd, view[: max(4096, len(view) // 3 // 4096 * 4096)], at)
    )
    export_sharded(tensors, tmp_path / "out", direct_io=direct)
    assert_same(load(tmp_path / "out"), {name: tensor.contiguous() for name, tensor in tensors.items()})


def test_a_write_never_asks_for_more_than_the_system_takes(tmp_path, monkeypatch):
    """Linux writes at most 0x7ffff000 bytes in one call."""
    monkeypatch.setattr(files_module, "_MAX_WRITE", 8192)
    sizes = []
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: sizes.append(len(view)) or write(fd, view, at))
    content = aligned(5 * 8192 + 100)
    file = OutputFile(tmp_path / "f", direct=True)
    file.write(content, 0)
    file.finish(fsync=False)
    assert (tmp_path / "f").read_bytes() == content
    assert max(sizes) == 8192


def test_a_file_system_that_takes_nothing_is_an_error_not_a_loop(tmp_path, monkeypatch):
    """A write of no bytes at all never ends otherwise."""
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: 0)
    file = OutputFile(tmp_path / "f", direct=False)
    with pytest.raises(OSError, match="takes no more bytes"):
        file.write(memoryview(b"x"), 0)
    file.close()


def _without_direct(monkeypatch):
    """A file system that refuses O_DIRECT when a file is opened."""
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)


def test_how_files_are_written_is_found_by_trying_and_reported(tensors, tmp_path, monkeypatch):
    """Direct here; buffered where the file system refuses; forced either way, or an error before anything is made."""
    report = export_sharded(tensors, tmp_path / "a")
    assert {file.written for file in report.files} == {"direct"}
    report = export_sharded(tensors, tmp_path / "a", direct_io=False)
    assert {file.written for file in report.files} == {"buffered"}
    _without_direct(monkeypatch)
    report = export_sharded(tensors, tmp_path / "a")
    assert {file.written for file in report.files} == {"buffered"}
    with pytest.raises(OutputError, match="refuses direct writes"):
        export_sharded(tensors, tmp_path / "b", direct_io=True)
    assert not (tmp_path / "b").exists()


def test_a_disk_that_fails_while_it_is_tried_is_not_taken_for_one_without_direct_io(tmp_path, monkeypatch):
    """EIO is a failure, not an answer."""

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="Input/output"):
        choose_direct(tmp_path, "auto")
    assert not list(tmp_path.iterdir())


def test_buffered_writes_are_sequential_and_leave_the_page_cache_in_windows(tmp_path, monkeypatch):
    """D07, D56: no seek back, no truncate, no preallocation; never more than a window of unflushed bytes."""
    import torch

    monkeypatch.setattr(files_module, "_WINDOW_BYTES", MIB)
    events = []
    write, drop, flush = os.pwrite, os.posix_fadvise, os.fdatasync
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: events.append((fd, at, len(view))) or write(fd, view, at))
    monkeypatch.setattr(os, "fdatasync", lambda fd: events.append("flush") or flush(fd))
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: events.append("drop") or drop(*args))
    for name in ("ftruncate", "posix_fallocate", "lseek"):
        monkeypatch.setattr(os, name, None)
    export_sharded({"w": torch.randn(4 * MIB)}, tmp_path / "out", direct_io=False, max_host_memory="2MiB")
    dirty, position = 0, {}
    for event in events:
        if event == "flush":
            dirty = 0
        elif event != "drop":
            fd, at, count = event
            assert at == position.get(fd, 0)
            position[fd] = at + count
            dirty += count
            assert dirty <= MIB
    assert events.count("drop") >= 16


def test_the_page_cache_is_not_filled(tmp_path):
    """D07: what was written is not in memory afterwards, direct or buffered, as mincore tells."""
    import ctypes

    import torch

    libc = ctypes.CDLL(None, use_errno=True)
    for direct in (True, False):
        export_sharded({"w": torch.randn(4 * MIB)}, tmp_path / "out", direct_io=direct)
        path = tmp_path / "out/model.safetensors"
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            pages = -(-len(mapped) // 4096)
            resident = (ctypes.c_ubyte * pages)()
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), resident) == 0
            assert sum(page & 1 for page in resident) <= 2
