"""The ring of host buffers that every byte goes through, and how a piece gets from a device into it.

All that is particular to accelerators (pinning, streams, events) is in ``AcceleratorLane``; ``HostLane`` stands in
where the weights are in host memory. The rest of the package knows only the ``Lane`` protocol.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from streamexport.errors import InvalidArgumentError
from streamexport.memory import view_memory
from streamexport.sizes import format_size, parse_size

DEFAULT_HOST_MEMORY = 64 * 1024 * 1024
"""The ring's default size: large enough that a disk is never idle, small beside any model."""

BUFFERS = 4
"""Buffers of a ring, each filled and written by a thread of its own: some are written while others are filled.

Measured at 64 MiB in all, as a share of what the disk can do: 2 buffers 0.96, 4 buffers 0.99, 8 buffers 0.83.
"""

MIN_BUFFER_BYTES = 64 * 1024
"""Below this, the cost of a call outweighs the copy; also a multiple of every file system's block size."""


def buffer_bytes(max_host_memory: int | str | None) -> int:
    """Return the size of one of the ring's buffers, so that all of them stay within the budget.

    It is a power of two: torch's caching allocator for pinned memory rounds every request up to one (pytorch
    issue 95823), so any other size would take more than was asked for.

    Args:
        max_host_memory: the budget in bytes or as a string such as ``"64MiB"``; None is 64 MiB.

    Raises:
        InvalidArgumentError: the budget is smaller than the smallest ring.
    """
    budget = DEFAULT_HOST_MEMORY if max_host_memory is None else parse_size(max_host_memory, "max_host_memory")
    smallest = BUFFERS * MIN_BUFFER_BYTES
    if budget < smallest:
        msg = (
            f"max_host_memory={max_host_memory!r} is too small: the smallest that works is {smallest} bytes "
            f"({BUFFERS} buffers of {format_size(MIN_BUFFER_BYTES)})"
        )
        raise InvalidArgumentError(msg)
    return int(1 << (budget // BUFFERS).bit_length() - 1)


class Lane(Protocol):
    """How pieces of tensors get into host buffers."""

    @property
    def pinned(self) -> bool:
        """Whether the buffers it made are pinned."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a new page-aligned 1-D uint8 buffer."""

    def copy(self, destination: torch.Tensor, tensor: torch.Tensor) -> None:
        """Start a copy, as ``catalog.Copy``."""

    def finish(self) -> None:
        """Wait until all copies have arrived in host memory."""


class HostLane:
    """Copies between host tensors: done when they return."""

    pinned = False

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Map anonymous pages, which go back to the system at once when the buffer is dropped (malloc's may not).

        Private ones, not Python's default of shared: they are counted where people look, in ``RssAnon``.
        """
        try:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            msg = f"max_host_memory: the system gives no buffer of {format_size(nbytes)}: {error}"
            raise InvalidArgumentError(msg) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # A fifth of the page faults' time, and physically long runs for the disk; kernels without it refuse.
            with contextlib.suppress(OSError):
                pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.uint8)

    def copy(self, destination: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy, casting if dtypes differ."""
        plain = tensor.is_contiguous() and tensor.dtype == destination.dtype and not tensor.is_conj()
        if plain and not tensor.is_neg():
            # One thread's memcpy outruns a disk. copy_ wakes an OpenMP team, whose members then spin for a while on
            # the cores that the writers and the training need: a third less throughput on two cores.
            ctypes.memmove(destination.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        else:
            destination.copy_(tensor)

    def finish(self) -> None:
        """Nothing is outstanding."""


class AcceleratorLane:
    """Copies from accelerators: on a stream of its own for each device, into pinned buffers, without blocking.

    Args:
        device_module: gives torch's module of a device type (``torch.cuda``), with ``Stream``, ``Event``, ``stream``
            and ``synchronize``.
    """

    def __init__(self, device_module: Callable[[torch.device], Any] = torch.get_device_module) -> None:
        self.pinned = True
        self._device_module = device_module
        self._streams: dict[torch.device, Any] = {}
        self._unfinished: set[torch.device] = set()
        self._host = HostLane()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate pinned memory; pageable memory where the system will pin no more (copies then block)."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            self.pinned = False
            return self._host.allocate(nbytes)

    def copy(self, destination: torch.Tensor, tensor: torch.Tensor) -> None:
        """Enqueue a copy on the device's stream; a host tensor is copied at once."""
        device = tensor.device
        if device.type == "cpu":
            self._host.copy(destination, tensor)
            return
        module = self._device_module(device)
        if device not in self._streams:
            # The optimizer may still be writing weights, on any stream: let it end before the first read.
            module.synchronize(device)
            self._streams[device] = module.Stream(device=device)
        with module.stream(self._streams[device]):
            destination.copy_(tensor, non_blocking=True)
        self._unfinished.add(device)

    def finish(self) -> None:
        """Record an event on each stream that was used, and wait for them."""
        events = []
        for device in self._unfinished:
            event = self._device_module(device).Event()
            event.record(self._streams[device])
            events.append(event)
        self._unfinished.clear()
        for event in events:
            event.synchronize()


def open_lane(devices: Iterable[torch.device]) -> Lane:
    """Return the lane for tensors on these devices.

    An accelerator whose torch module has no streams (mps) is copied from synchronously.
    """
    accelerators = [device for device in devices if device.type != "cpu"]
    if accelerators and all(hasattr(torch.get_device_module(device), "Stream") for device in accelerators):
        return AcceleratorLane()
    return HostLane()


class Slot:
    """One of the ring's buffers.

    Attributes:
        tensor: its memory, 1-D uint8.
        view: the same memory, for writing to a file.
        lane: how pieces get into it; of its own, because each slot is used by another thread.
    """

    def __init__(self, lane: Lane, nbytes: int) -> None:
        self.lane = lane
        self.tensor = lane.allocate(nbytes)
        self.view = view_memory(self.tensor.data_ptr(), nbytes)


class Ring:
    """A fixed number of buffers of one size, used again and again.

    Args:
        lanes: makes a lane for each buffer.
        nbytes: the size of one buffer.
    """

    def __init__(self, lanes: Callable[[], Lane], nbytes: int) -> None:
        self.buffer_bytes = nbytes
        self.slots = [Slot(lanes(), nbytes) for _ in range(BUFFERS)]

    @property
    def nbytes(self) -> int:
        """Host memory that the ring holds."""
        return self.buffer_bytes * len(self.slots)

    @property
    def pinned_bytes(self) -> int:
        """How much of it is pinned."""
        return sum(self.buffer_bytes for slot in self.slots if slot.lane.pinned)
