"""Tensors of which each rank holds a shard (DTensors, as FSDP2 makes them): gathered one at a time, by all ranks.

Gathering is a collective operation. Rank 0, which writes, says when it is time for the next tensor, in an order that
all ranks know; the others join in, and drop what they get. No rank sits in a collective while rank 0 writes.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from streamexport.catalog import Catalog, Copy, Segment
from streamexport.sources.pieces import copy_segment
from streamexport.sources.tensors import TensorSource, is_dtensor


def tensor_source(
    tensors: Mapping[str, torch.Tensor], catalog: Catalog, companion_origin: object | None = None
) -> TensorSource:
    """Return the source for tensors that are whole here, or sharded over all ranks."""
    kind = GatheringSource if any(is_dtensor(tensors[name]) for name in catalog.specs) else TensorSource
    return kind(tensors, catalog, companion_origin)


class GatheringSource(TensorSource):
    """Tensors some of which are DTensors: gathered when they are first read, let go when all of them has been."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], catalog: Catalog, companion_origin: object | None = None
    ) -> None:
        super().__init__(tensors, catalog, companion_origin)
        self.sharded = frozenset(name for name, tensor in self._tensors.items() if is_dtensor(tensor))
        self._lock = threading.Lock()
        self._gathered: dict[str, torch.Tensor] = {}
        self._unread: dict[str, int] = {}
        self._order: Iterator[str] = iter(())
        self._announce: Callable[[], None] = lambda: None

    def lead(self, needed: Mapping[str, int], announce: Callable[[], None]) -> None:
        """See ``catalog.Source``."""
        self._unread, self._order, self._announce = dict(needed), iter(needed), announce

    def follow(self, needed: Mapping[str, int], wait: Callable[[], bool]) -> None:
        """See ``catalog.Source``."""
        for name in needed:
            if not wait():
                return
            self._gather(name)

    def read(self, segment: Segment, start: int, destination: torch.Tensor, copy: Copy) -> None:
        """See ``catalog.Source``."""
        if segment.tensor not in self.sharded:
            super().read(segment, start, destination, copy)
            return
        with self._lock:
            while segment.tensor not in self._gathered:
                name = next(self._order)
                self._announce()
                self._gathered[name] = self._gather(name)
            whole = self._gathered[segment.tensor]
        copy_segment(whole, segment, start, destination, copy)

    def release(self, tensor: str, numel: int) -> None:
        """See ``catalog.Source``."""
        if tensor not in self.sharded:
            return
        with self._lock:
            self._unread[tensor] -= numel
            if not self._unread[tensor]:
                del self._gathered[tensor]

    @torch.no_grad()
    def _gather(self, name: str) -> torch.Tensor:
        sharded: Any = self._tensors[name]
        whole: torch.Tensor = sharded.full_tensor()
        if whole.device.type != "cpu":
            # It was made on this thread's stream, and is read on another.
            torch.get_device_module(whole.device).synchronize(whole.device)
        return whole
