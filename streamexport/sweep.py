"""Carries out a plan: fills the ring's buffers one after the other and has them written while the next is filled.

A file is cut into parts of one buffer each, at offsets that are multiples of the buffer's size, whatever tensors lie
there: small neighbours share a part, a large tensor has many. So every write but a file's last is large and aligned,
and memory does not depend on the sizes of tensors or files.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from streamexport.catalog import Output, Source
from streamexport.files import OutputFile
from streamexport.plan import Shard
from streamexport.safetensors_format import TORCH_DTYPES, Extent, itemsize
from streamexport.staging import Lane, Ring, Ticket

_DIRECT_WRITERS = 4
"""Threads that write directly, so that the disk always has its next requests before it has ended the last."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run of one file's bytes that fits a buffer, and the tensors that lie in it."""

    shard: Shard
    start: int
    stop: int
    places: Sequence[tuple[str, Extent]]


class _OpenShard:
    """A file while its parts are written; the last of them finishes it."""

    def __init__(self, path: Path, nbytes: int, *, direct: bool, fsync: bool) -> None:
        self.file = OutputFile(path, direct=direct)
        self._fsync = fsync
        self._missing = nbytes
        self._lock = threading.Lock()

    def write(self, view: memoryview, offset: int, ticket: Ticket) -> int:
        ticket()
        self.file.write(view, offset)
        with self._lock:
            self._missing -= len(view)
            complete = not self._missing
        if complete:
            self.file.finish(fsync=self._fsync)
        return len(view)


def sweep(
    shards: Sequence[Shard],
    source: Source,
    ring: Ring,
    paths: Callable[[Shard], Path],
    *,
    direct: bool,
    fsync: bool,
    on_written: Callable[[Shard, int], None],
) -> bool:
    """Write all files of a plan.

    Args:
        shards: the files.
        source: where the values come from.
        ring: the buffers they go through.
        paths: where each file is written; none may exist.
        direct: write past the page cache.
        fsync: make each file durable.
        on_written: told, on this thread, of each part written: its file and bytes.

    Returns:
        Whether every file was made durable.

    Raises:
        OSError: a file cannot be written. No thread is left, and no file open.
    """
    opened: dict[str, _OpenShard] = {}
    pending: deque[tuple[Shard, Future[int]]] = deque()

    def settle_oldest() -> None:
        shard, future = pending.popleft()
        on_written(shard, future.result())

    pool = ThreadPoolExecutor(_DIRECT_WRITERS if direct else 1, thread_name_prefix="streamexport")
    try:
        with torch.no_grad():
            for number, part in enumerate(_parts(shards, ring.buffer_bytes)):
                slot = number % len(ring.tensors)
                if len(pending) == len(ring.tensors):
                    settle_oldest()  # It is the one that wrote from this slot.
                name = part.shard.filename
                if name not in opened:
                    opened[name] = _OpenShard(paths(part.shard), part.shard.nbytes, direct=direct, fsync=fsync)
                _fill(ring.tensors[slot], part, source, ring.lane)
                view = ring.views[slot][: part.stop - part.start]
                future = pool.submit(opened[name].write, view, part.start, ring.lane.mark())
                pending.append((part.shard, future))
        while pending:
            settle_oldest()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for shard in opened.values():
            shard.file.close()
    return all(shard.file.synced for shard in opened.values())


def _parts(shards: Sequence[Shard], size: int) -> Iterator[Part]:
    for shard in shards:
        places = list(shard.header.extents.items())
        first = 0
        for start in range(0, shard.nbytes, size):
            stop = min(start + size, shard.nbytes)
            while first < len(places) and places[first][1].stop <= start:
                first += 1
            last = first
            while last < len(places) and places[last][1].start < stop:
                last += 1
            yield Part(shard, start, stop, places[first:last])


def _fill(buffer: torch.Tensor, part: Part, source: Source, lane: Lane) -> None:
    """Bring a part's bytes into a buffer: the header's, then each tensor's that lies in it."""
    if prefix := part.shard.header.prefix[part.start : part.stop]:
        buffer[: len(prefix)] = torch.frombuffer(bytearray(prefix), dtype=torch.uint8)
    for name, extent in part.places:
        start, stop = max(extent.start, part.start), min(extent.stop, part.stop)
        # Tensors lie at multiples of their item's size, and parts at multiples of a page: no element is cut.
        piece = buffer[start - part.start : stop - part.start].view(TORCH_DTYPES[extent.dtype])
        first = (start - extent.start) // itemsize(extent.dtype)
        _fill_piece(piece, part.shard.outputs[name], first, source, lane)


def _fill_piece(piece: torch.Tensor, output: Output, first: int, source: Source, lane: Lane) -> None:
    """Bring elements of an output tensor, from ``first`` on, out of the segments that it is made of."""
    done = 0
    for segment in output.segments:
        skipped = min(first, segment.numel)
        count = min(segment.numel - skipped, piece.numel() - done)
        if count:
            source.read(segment.tensor, segment.start + skipped, piece[done : done + count], lane.copy)
        first -= skipped
        done += count
