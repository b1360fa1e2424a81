"""Writing one file by position: past the page cache where the file system can, through it in windows elsewhere.

Direct writes (``O_DIRECT``) take aligned memory at aligned offsets, so the last bytes of a file, less than a page,
go through a second, ordinary descriptor. Buffered writes are strictly sequential, with no seek, append, truncate
or preallocation, as some network file systems demand; they are flushed and dropped from the page cache every window,
so that a container is not charged for the whole model.
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from streamexport.errors import InvalidArgumentError, OutputError

DirectIO = bool | Literal["auto"]

UNSUPPORTED = frozenset({errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})
"""What file systems answer to a call that they do not have."""

PAGE = 4096
"""Alignment of direct writes, in memory and in the file: the page size, and at least any disk's logical block."""

_MAX_WRITE = 0x7FFFF000
"""The most that Linux writes in one call, whatever is asked (write(2))."""

_WINDOW_BYTES = 32 * 1024 * 1024
"""Buffered bytes between two flushes: few enough to be small change to a container, enough to keep a disk busy."""


class OutputFile:
    """A new file, written once from start to end or in aligned parts of any order.

    Args:
        path: where; it must not be there.
        direct: write past the page cache.
    """

    def __init__(self, path: Path, *, direct: bool) -> None:
        self.path = path
        self.direct = direct
        self.synced = False
        self._unflushed = 0
        # 0o666 less the umask, as any program's files: safetensors 0.8 leaves 0600.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (_o_direct() if direct else 0)
        self._descriptor = os.open(path, flags, 0o666)

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of ``view`` at ``offset``; safe from several threads when ``direct``."""
        if self.direct:
            aligned = len(view) // PAGE * PAGE
            _write_all(self._descriptor, view[:aligned], offset, self.path, direct=True)
            if aligned < len(view):
                with _opened(self.path, os.O_WRONLY) as descriptor:
                    _write_all(descriptor, view[aligned:], offset + aligned, self.path)
            return
        _write_all(self._descriptor, view, offset, self.path)
        self._unflushed += len(view)
        if self._unflushed >= _WINDOW_BYTES:
            self._drop_written()

    def finish(self, *, fsync: bool) -> None:
        """Make the file durable, if asked, and close it."""
        try:
            if fsync:
                self.synced = sync(self._descriptor)
            if not self.direct:
                self._drop_written()
        finally:
            self.close()

    def close(self) -> None:
        """Close the file, whatever has been written."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def _drop_written(self) -> None:
        self._unflushed = 0
        with _unsupported_ignored():
            os.fdatasync(self._descriptor)
        if hasattr(os, "posix_fadvise"):
            with _unsupported_ignored():
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def choose_direct(directory: Path, direct_io: DirectIO) -> bool:
    """Return whether files in ``directory`` are to be written directly, found by trying.

    Raises:
        InvalidArgumentError: ``direct_io`` is none of True, False and "auto".
        OutputError: ``direct_io`` is True and the file system refuses.
    """
    check_direct_io(direct_io)
    if direct_io is False:
        return False
    refusal = _try_direct(directory)
    if refusal and direct_io is True:
        msg = f"direct_io=True, but the file system of {directory} refuses direct writes: {refusal}"
        raise OutputError(msg)
    return not refusal


def check_direct_io(direct_io: object) -> None:
    """Refuse an unknown choice.

    Raises:
        InvalidArgumentError: it is none of True, False and "auto".
    """
    if direct_io is not True and direct_io is not False and direct_io != "auto":
        msg = f"direct_io={direct_io!r}: expected True, False or 'auto'"
        raise InvalidArgumentError(msg)


def sync(descriptor: int) -> bool:
    """Make a file or directory durable; return False where the file system has no such call."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


def sync_directory(directory: Path) -> bool:
    """Make the names in a directory durable; return False where the file system has no such call."""
    try:
        with _opened(directory, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            return sync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False


def _try_direct(directory: Path) -> str | None:
    """Write one page directly, behind another one; return why that is not possible, or None."""
    if not _o_direct():
        return "this system has no O_DIRECT"
    probe = directory / "probe.part"
    page = mmap.mmap(-1, PAGE)
    try:
        with _opened(probe, os.O_WRONLY | os.O_CREAT | _o_direct()) as descriptor:
            _write_all(descriptor, memoryview(page), PAGE, probe)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return os.strerror(error.errno or 0)
    finally:
        probe.unlink(missing_ok=True)
    return None


def _o_direct() -> int:
    return getattr(os, "O_DIRECT", 0)


def _write_all(descriptor: int, view: memoryview, offset: int, path: Path, *, direct: bool = False) -> None:
    while view:
        try:
            count = os.pwrite(descriptor, view[:_MAX_WRITE], offset)
        except OSError as error:
            error.filename = str(path)
            if not (direct and error.errno == errno.EINVAL):
                raise
            count = 0
        if count == 0 and not direct:
            raise OSError(errno.EIO, "the file system takes no more bytes", str(path))
        view = view[count:]
        offset += count
        if direct and view and (count == 0 or offset % PAGE):
            # A limit or a full disk ends inside a page, and a direct write would only call that an invalid argument.
            with _opened(path, os.O_WRONLY) as plain:
                _write_all(plain, view, offset, path)
            return


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _unsupported_ignored() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
