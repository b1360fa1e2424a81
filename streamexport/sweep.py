"""Carries out a plan: each of the ring's buffers is filled and written by a thread of its own, over and over.

A file is cut into parts of one buffer each, at offsets that are multiples of the buffer's size, whatever tensors lie
there: small neighbours share a part, a large tensor has many. So every write but a file's last is large and aligned,
and memory does not depend on the sizes of tensors or files. While one part is written the next is filled.
"""

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from streamexport.catalog import Source, Zeros, runs_of
from streamexport.files import OutputFile
from streamexport.overflow import count_overflows
from streamexport.plan import Shard
from streamexport.safetensors_format import TORCH_DTYPES, Extent, itemsize
from streamexport.staging import Ring, Slot

_AHEAD = 16
"""Parts handed out before they are written: enough that no thread waits for work, few enough to be no memory."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run of one file's bytes that fits a buffer, and the tensors that lie in it."""

    shard: Shard
    start: int
    stop: int
    places: Sequence[tuple[str, Extent]]


@dataclass(frozen=True, slots=True)
class Swept:
    """What is known after a sweep.

    Attributes:
        synced: whether every file was made durable.
        overflows: how many finite values of a tensor a cast has made infinite, by the tensor's name.
    """

    synced: bool
    overflows: Mapping[str, int]


def sweep(
    shards: Sequence[Shard],
    source: Source,
    ring: Ring,
    paths: Callable[[Shard], Path],
    *,
    direct: bool,
    fsync: bool,
    on_written: Callable[[Shard, int], None],
) -> Swept:
    """Write all files of a plan.

    Args:
        shards: the files.
        source: where the values come from.
        ring: the buffers they go through.
        paths: where each file is written; none may exist.
        direct: write past the page cache, parts in any order; else each file strictly from start to end.
        fsync: make each file durable.
        on_written: told, on this thread, of each part written: its file and bytes.

    Returns:
        What is known after.

    Raises:
        OSError: a file cannot be written. No thread is left, and no file open.
    """
    files = _Files(paths, direct=direct, fsync=fsync)
    free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
    for slot in ring.slots:
        free.put(slot)

    def carry(part: Part, before: Future[dict[str, int]] | None) -> dict[str, int]:
        slot = free.get()
        try:
            with torch.no_grad():
                overflows = _fill(slot, part, source)
            if before is not None:
                wait([before])  # It was handed out earlier, so a thread is at it or done.
            files.write(part, slot.view[: part.stop - part.start])
            return overflows
        finally:
            free.put(slot)

    pending: deque[tuple[Part, Future[dict[str, int]]]] = deque()
    overflows: Counter[str] = Counter()

    def settle_oldest() -> None:
        part, future = pending.popleft()
        overflows.update(future.result())
        on_written(part.shard, part.stop - part.start)

    pool = ThreadPoolExecutor(len(ring.slots), thread_name_prefix="streamexport")
    try:
        for part in _parts(shards, ring.buffer_bytes):
            if len(pending) == _AHEAD:
                settle_oldest()
            before = pending[-1][1] if pending and not direct else None
            pending.append((part, pool.submit(carry, part, before)))
        while pending:
            settle_oldest()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        files.close()
    return Swept(files.synced, overflows)


class _Files:
    """The files that are being written: opened with their first part, finished with their last."""

    def __init__(self, paths: Callable[[Shard], Path], *, direct: bool, fsync: bool) -> None:
        self.synced = True
        self._paths = paths
        self._direct = direct
        self._fsync = fsync
        self._lock = threading.Lock()
        self._open: dict[str, OutputFile] = {}
        self._missing: dict[str, int] = {}

    def write(self, part: Part, view: memoryview) -> None:
        name = part.shard.filename
        with self._lock:
            if name not in self._open:
                self._open[name] = OutputFile(self._paths(part.shard), direct=self._direct)
                self._missing[name] = part.shard.nbytes
            file = self._open[name]
        file.write(view, part.start)
        with self._lock:
            self._missing[name] -= len(view)
            if self._missing[name]:
                return
            del self._open[name]
        file.finish(fsync=self._fsync)
        with self._lock:
            self.synced = self.synced and file.synced

    def close(self) -> None:
        """Close what an error has left open."""
        for file in self._open.values():
            file.close()


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


def _fill(slot: Slot, part: Part, source: Source) -> dict[str, int]:
    """Bring a part's bytes into a buffer: the header's, then each tensor's that lies in it; count what overflowed."""
    if prefix := part.shard.header.prefix[part.start : part.stop]:
        slot.view[: len(prefix)] = prefix
    pieces = []
    arrived: Counter[str] = Counter()
    for name, extent in part.places:
        start, stop = max(extent.start, part.start), min(extent.stop, part.stop)
        # Tensors lie at multiples of their item's size, and parts at multiples of a page: no element is cut.
        piece = slot.tensor[start - part.start : stop - part.start].view(TORCH_DTYPES[extent.dtype])
        output, first = part.shard.outputs[name], (start - extent.start) // itemsize(extent.dtype)
        done = 0
        for segment, begin, count in runs_of(output.content, first, piece.numel()):
            place = piece[done : done + count]
            if isinstance(segment, Zeros):
                place.zero_()
            else:
                source.read(segment, begin, place, slot.lane.copy)
                arrived[segment.tensor] += count
            done += count
        if output.cast:
            pieces.append((name, piece, output, first))
    slot.lane.finish()
    counts = {name: count_overflows(piece, output, first, source, slot.lane) for name, piece, output, first in pieces}
    for tensor, numel in arrived.items():
        source.release(tensor, numel)
    return {name: count for name, count in counts.items() if count}
