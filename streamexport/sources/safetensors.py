"""A safetensors file or directory, read by position in bounded pieces: for writing it again in other shards."""

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from streamexport.catalog import Catalog, Copy, Segment, TensorSpec
from streamexport.errors import FormatError, InvalidArgumentError
from streamexport.memory import view_memory
from streamexport.safetensors_format import (
    TORCH_DTYPES,
    Extent,
    decode_header,
    header_length,
    itemsize,
)
from streamexport.sources.pieces import runs_of_segment

_OPEN_FILES = 8
"""Files open at once: a directory may have hundreds, and a process few descriptors."""

_SCRATCH_BYTES = 1024 * 1024
"""What is read at once where a cast needs the stored elements first: small change beside the ring."""


class SafetensorsSource:
    """The tensors of one file, of a directory's index, or of all of a directory's files.

    Files are read with positioned reads, never mapped: a map can fault on network file systems and counts as
    resident memory. What has been read is dropped from the page cache.
    """

    def __init__(self, path: Path) -> None:
        files = _find_files(path)
        self.devices = frozenset({torch.device("cpu")})
        self.sharded: frozenset[str] = frozenset()
        # A file of its own may lie anywhere, beside anything: only a model's directory has companions.
        directory = path.parent if path.suffix == ".json" else path
        self.companion_origin = directory if (directory / "config.json").is_file() else None
        self._places: dict[str, tuple[Path, Extent]] = {}
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._lock = threading.Lock()
        self._scratch: torch.Tensor | None = None
        for file in files:
            for name, extent in _read_header(file).items():
                if name in self._places:
                    msg = f"tensor {name!r} is in two files: {self._places[name][0]} and {file}"
                    raise FormatError(msg)
                self._places[name] = (file, extent)
        self.catalog = Catalog(
            {name: TensorSpec(name, extent.dtype, extent.shape) for name, (_, extent) in self._places.items()},
            declared_ties={},
        )

    def read(self, segment: Segment, start: int, destination: torch.Tensor, copy: Copy) -> None:
        """See ``catalog.Source``. One thread reads at a time, while others write."""
        done = 0
        for first, numel in runs_of_segment(segment, start, destination.numel()):
            with self._lock:
                self._read(segment.tensor, first, destination[done : done + numel], copy)
            done += numel

    def release(self, tensor: str, numel: int) -> None:
        """Nothing is held."""

    def lead(self, needed: Mapping[str, int], announce: Callable[[], None]) -> None:
        """Nothing is gathered."""

    def follow(self, needed: Mapping[str, int], wait: Callable[[], bool]) -> None:
        """Nothing is gathered."""

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _read(self, name: str, start: int, destination: torch.Tensor, copy: Copy) -> None:
        file, extent = self._places[name]
        dtype = TORCH_DTYPES[extent.dtype]
        offset = extent.start + start * itemsize(extent.dtype)
        if destination.dtype == dtype:
            self._read_into(file, offset, destination.view(torch.uint8))
            return
        if self._scratch is None:
            self._scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8)
        stored = self._scratch.view(dtype)
        for first in range(0, destination.numel(), stored.numel()):
            piece = destination[first : first + stored.numel()]
            raw = stored[: piece.numel()]
            self._read_into(file, offset, raw.view(torch.uint8))
            copy(piece, raw)
            offset += raw.nbytes

    def _read_into(self, file: Path, offset: int, destination: torch.Tensor) -> None:
        view = view_memory(destination.data_ptr(), destination.nbytes)
        descriptor = self._descriptor(file)
        position = offset
        while view:
            count = os.preadv(descriptor, [view], position)
            if count == 0:
                msg = f"{file}: ends at byte {position}, inside a tensor: it was cut while it was read"
                raise FormatError(msg)
            view = view[count:]
            position += count
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, offset, position - offset, os.POSIX_FADV_DONTNEED)

    def _descriptor(self, file: Path) -> int:
        if file not in self._open:
            while len(self._open) >= _OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._open.move_to_end(file)
        return self._open[file]


def _find_files(path: Path) -> Sequence[Path]:
    """Return a checkpoint's files: the given one, those of an index, or all of a directory.

    As in transformers, a directory's ``model.safetensors`` comes before an index. Two candidates of the same kind
    (variants, say) are not guessed between.
    """
    if path.is_file():
        return _indexed_files(path) if path.name.endswith(".json") else [path]
    if not path.is_dir():
        msg = f"no such safetensors file or directory: {path}"
        raise InvalidArgumentError(msg)
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    indexes = sorted(path.glob("*.safetensors.index*.json"))
    plain = path / "model.safetensors.index.json"
    if plain in indexes or len(indexes) == 1:
        return _indexed_files(plain if plain in indexes else indexes[0])
    if indexes:
        msg = f"{path} has {len(indexes)} indexes: name one of {', '.join(index.name for index in indexes)}"
        raise InvalidArgumentError(msg)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        msg = f"no safetensors file in {path}"
        raise InvalidArgumentError(msg)
    return files


def _indexed_files(index: Path) -> Sequence[Path]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = error if isinstance(error, ValueError) else "it has no weight_map of names to files"
        msg = f"{index}: not a safetensors index: {reason}"
        raise FormatError(msg) from error
    files = []
    for name in names:
        file = index.parent / str(name)
        if (
            index.parent.resolve() not in file.parent.resolve().parents
            and file.parent.resolve() != index.parent.resolve()
        ):
            msg = f"{index}: names {name!r}, which is outside its directory"
            raise FormatError(msg)
        if not file.is_file():
            msg = f"{index}: names {name}, which is not there"
            raise FormatError(msg)
        files.append(file)
    held = {name for file in files for name in _read_header(file)}
    if missing := sorted(set(weight_map) - held):
        msg = (
            f"{index}: lists {missing[0]!r}"
            + (f" and {len(missing) - 1} more tensors" if missing[1:] else "")
            + ", which no file holds"
        )
        raise FormatError(msg)
    return files


def _read_header(file: Path) -> Mapping[str, Extent]:
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        first = opened.read(8)
        prefix = first + opened.read(header_length(first, size, str(file)))
    return decode_header(prefix, size, str(file))
