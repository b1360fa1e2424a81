"""Making a finished export visible.

Files are written to a staging directory inside the output directory, under names that no loader's pattern matches.
Publication is then a series of renames, and a reader that starts at the index or the single file sees:

1. while files are staged: the earlier export, whole;
2. once its entry point (single file, then index) has been moved aside: nothing;
3. while the rest of the earlier set is moved aside and companions and shards are moved in: nothing;
4. once the new entry point (index or single file) is in place: the new export, whole.

The earlier set stays in the staging directory until step 4 has ended, so that a failure on the way puts it back. It
is exactly the files that an export of this variant could have written: other variants, adapters, optimizer states and
the user's own files are not touched. A process that is killed leaves its hidden staging directory behind: in step 1
that is all; later, ``old/`` in it has the earlier set and ``new/`` what was not yet moved in.
"""

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from streamexport.errors import InvalidArgumentError, OutputError
from streamexport.files import UNSUPPORTED, OutputFile, sync, sync_directory
from streamexport.plan import index_filename, weights_filename
from streamexport.sizes import format_size

STAGING_PREFIX = ".streamexport-"
_SUFFIX = ".part"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
_COPY_BYTES = 1024 * 1024


class Staging:
    """The files of an export that is not visible yet.

    Args:
        out_dir: the output directory; it must exist.
    """

    def __init__(self, out_dir: Path) -> None:
        self.out_dir = out_dir
        self.directory = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=out_dir))
        self._new = self.directory / "new"
        self._old = self.directory / "old"
        self._new.mkdir()
        self._old.mkdir()
        self.holds_earlier_set = False
        self.warnings: list[str] = []

    def path(self, filename: str) -> Path:
        """Where to write a file of that final name."""
        return self._new / _flat(filename)

    def write(self, filename: str, content: bytes, *, fsync: bool) -> None:
        """Stage a small file."""
        file = OutputFile(self.path(filename), direct=False)
        try:
            file.write(memoryview(content), 0)
            file.finish(fsync=fsync)
        finally:
            file.close()

    def scratch(self) -> Path:
        """Return a new empty directory that goes with the staging directory."""
        return Path(tempfile.mkdtemp(dir=self.directory))

    def adopt(self, path: Path, filename: str, *, fsync: bool) -> int:
        """Stage a file that is in ``scratch()``; return its size in bytes."""
        with path.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            if fsync:
                sync(file.fileno())
        self._move(path, self.path(filename))
        return nbytes

    def discard(self) -> bool:
        """Remove the staging directory and what is in it; return whether that worked."""
        shutil.rmtree(self.directory, ignore_errors=True)
        return not self.directory.exists()

    def publish(self, filenames: Sequence[str], variant: str | None, weights_name: str, *, fsync: bool) -> bool:
        """Move staged files into place and the earlier set of this variant out of the way.

        Args:
            filenames: the staged files in the order to appear, the entry point last.
            variant: which earlier set they supersede.
            weights_name: the same.
            fsync: make each step durable.

        Returns:
            Whether the names were made durable.

        Raises:
            OSError: a file cannot be moved. The earlier set is back in place.
        """
        durable = not fsync or sync_directory(self._new)
        superseded = self._superseded(filenames, variant, weights_name)
        folders = self._new_folders(filenames)
        placing = False
        self.holds_earlier_set = True
        try:
            for filename in superseded:
                self._move(self.out_dir / filename, self._old / _flat(filename))
            placing = True
            for filename in filenames:
                if filename == filenames[-1] and fsync:
                    # What the entry point names must be there before it, also after a loss of power.
                    durable = sync_directory(self.out_dir) and durable
                (self.out_dir / filename).parent.mkdir(parents=True, exist_ok=True)
                self._move(self.path(filename), self.out_dir / filename)
            if fsync:
                durable = sync_directory(self.out_dir) and durable
        except BaseException:
            self._restore(superseded, filenames if placing else ())
            with contextlib.suppress(OSError):
                for folder in reversed(folders):
                    folder.rmdir()
            raise
        self.holds_earlier_set = False
        return durable

    def _restore(self, superseded: Sequence[str], placed: Sequence[str]) -> None:
        """Put the earlier set back, by what is there: an interrupt may have come before or after any move.

        Args:
            superseded: the earlier set, in the order in which it was moved aside.
            placed: names at which new files, or parts of copies, may be; none before all was moved aside.
        """
        for filename in placed:
            path = self.out_dir / filename
            if path.is_symlink() or not path.is_dir():
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    path.unlink()
        failure = None
        for filename in reversed(superseded):
            aside = self._old / _flat(filename)
            # Where both are there, a copy aside was cut off: what is in place is whole.
            if os.path.lexists(aside) and not os.path.lexists(self.out_dir / filename):
                try:
                    self._move(aside, self.out_dir / filename)
                except OSError as error:
                    failure = error
        if failure is not None:
            raise failure
        self.holds_earlier_set = False

    def _new_folders(self, filenames: Sequence[str]) -> list[Path]:
        """Return the folders that some files need and that are not there, outer ones first.

        Raises:
            OutputError: a file is where a folder must be.
        """
        parents = {parent for filename in filenames for parent in (self.out_dir / filename).parents}
        needed = sorted(parent for parent in parents if self.out_dir in parent.parents)
        for folder in needed:
            if os.path.lexists(folder) and not folder.is_dir():
                raise OutputError(errno.ENOTDIR, "a file is where a folder must be", str(folder))
        return [folder for folder in needed if not folder.exists()]

    def _superseded(self, filenames: Sequence[str], variant: str | None, weights_name: str) -> list[str]:
        """The earlier set in the order to disappear: entry points, then what has a new file's name, then shards."""
        entries = [weights_filename(variant, weights_name), index_filename(variant, weights_name)]
        stem = re.escape(weights_filename(variant, weights_name).removesuffix(".safetensors"))
        shard = re.compile(stem + r"-\d{5}-of-\d{5}\.safetensors")
        # A folder of such a name is the user's: it stays, and moving a file there fails.
        there = sorted(entry.name for entry in os.scandir(self.out_dir) if not entry.is_dir(follow_symlinks=False))
        first = [name for name in entries if name in there]
        rest = [name for name in there if name not in entries and (name in filenames or shard.fullmatch(name))]
        # Some companions lie in folders.
        deeper = [name for name in filenames if "/" in name and os.path.lexists(self.out_dir / name)]
        return first + rest + deeper

    def _move(self, origin: Path, target: Path) -> None:
        """Rename, or copy where the file system cannot rename."""
        try:
            origin.rename(target)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            _copy(origin, target)
            origin.unlink()
            if not self.warnings:
                self.warnings.append("the file system cannot rename: files were copied into place")


@contextlib.contextmanager
def staged(out_dir: Path, *, fsync: bool) -> Iterator[Staging]:
    """Make ``out_dir`` if it is missing, and a staging directory in it that is removed at the end, come what may."""
    made = make_directory(out_dir)
    staging = None
    try:
        staging = Staging(out_dir)
        yield staging
        if fsync and not all(_sync_parent(directory) for directory in made):
            staging.warnings.append("the output directory is new, and its name may not survive a loss of power")
    except BaseException as error:
        if staging is not None and staging.holds_earlier_set:
            # Putting it back failed, too: nothing of it may be lost.
            msg = f"the earlier export could not be put back: its files are in {staging.directory / 'old'}"
            if isinstance(error, Exception):
                raise OutputError(msg) from error
            raise
        if staging is not None:
            staging.discard()
        # The export that failed made them; where something else has come into them, they stay.
        with contextlib.suppress(OSError):
            for directory in made:
                directory.rmdir()
        raise
    if not staging.discard():
        staging.warnings.append(f"the earlier files in {staging.directory} could not be removed")


def check_out_dir(out_dir: Path, needed_disk: int) -> None:
    """Refuse an output path that cannot take an export, before anything is created.

    Args:
        out_dir: the directory, there already or not.
        needed_disk: bytes that must be free.

    Raises:
        InvalidArgumentError: it is a file, or is named like one.
        OutputError: it cannot be written to, or its file system has too little space.
    """
    if "\0" in str(out_dir):
        msg = f"out_dir={str(out_dir)!r}: expected the path of a directory"
        raise InvalidArgumentError(msg)
    if out_dir.name.endswith(_WEIGHT_SUFFIXES) and not out_dir.is_dir():
        msg = f"out_dir={str(out_dir)!r} is named like a weights file: expected a directory"
        raise InvalidArgumentError(msg)
    if out_dir.is_symlink() and not out_dir.exists():
        msg = f"out_dir={str(out_dir)!r} is a link to {out_dir.readlink()}, which is not there"
        raise InvalidArgumentError(msg)
    existing = out_dir
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        msg = f"out_dir={str(out_dir)!r}: {existing} is a file, not a directory"
        raise InvalidArgumentError(msg)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(errno.EACCES, "no permission to write to this directory", str(existing))
    free = shutil.disk_usage(existing).free
    if free < needed_disk:
        msg = f"needs {format_size(needed_disk)} free on the file system of {existing}, which has {format_size(free)}"
        raise OutputError(errno.ENOSPC, msg, str(out_dir))


def make_directory(path: Path) -> list[Path]:
    """Make a directory, beside others that may be doing the same; return which were missing, it and its parents."""
    missing = [directory for directory in (path, *path.parents) if not directory.is_dir()]
    for last in (False, True):
        try:
            path.mkdir(parents=True, exist_ok=True)
            break
        except (FileExistsError, FileNotFoundError):
            # Network file systems may show another process's new directory late (NeMo Automodel issue 3686).
            if last and not path.is_dir():
                raise
    return missing


def _flat(filename: str) -> str:
    """The name under which a file is staged, or moved aside: no loader matches it."""
    return filename.replace("/", "%") + _SUFFIX


def _sync_parent(directory: Path) -> bool:
    try:
        return sync_directory(directory.parent)
    except PermissionError:  # It can be written to, but not read.
        return False


def _copy(origin: Path, target: Path) -> None:
    with origin.open("rb") as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy, _COPY_BYTES)
        copy.flush()
        with contextlib.suppress(OSError):
            os.fsync(copy.fileno())
