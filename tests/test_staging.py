import threading

import pytest
import torch
from oracles import assert_same, load

from streamexport import api, export_sharded, staging
from streamexport.errors import InvalidArgumentError
from streamexport.staging import BUFFERS, AcceleratorLane, HostLane, Ring, buffer_bytes

MIB = 1024 * 1024


@pytest.mark.parametrize("budget", [None, 262_144, 700_000, "1MB", "64MiB", "100MB", "1GiB", 3 * MIB + 1])
def test_buffers_are_powers_of_two_within_the_budget(budget):
    """D06: torch's pinned allocator rounds up to a power of two, and must not be led over the budget by it."""
    size = buffer_bytes(budget)
    limit = 64 * MIB if budget is None else staging.parse_size(budget, "")
    assert size & (size - 1) == 0
    assert limit / 2 < size * BUFFERS <= limit


def test_the_default_ring_is_64_mib():
    """Four buffers of 16 MiB."""
    assert buffer_bytes(None) * BUFFERS == 64 * MIB


def test_a_budget_below_the_smallest_ring_is_refused():
    """With the smallest that works in the message."""
    with pytest.raises(InvalidArgumentError, match="262144"):
        buffer_bytes("262KB")


def test_a_rings_buffers_are_page_aligned_and_all_it_holds():
    """Direct writes need aligned memory."""
    ring = Ring(HostLane, 64 * 1024)
    assert ring.nbytes == BUFFERS * 64 * 1024
    assert ring.pinned_bytes == 0
    assert all(slot.tensor.data_ptr() % 4096 == 0 for slot in ring.slots)
    ring.slots[1].tensor[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    assert bytes(ring.slots[1].view[:4]) == b"\x01\x02\x03\x04"


class LateLane(HostLane):
    """An accelerator's lane as the sweep sees it: copies arrive only when they are waited for."""

    pinned = True

    def __init__(self):
        self.started = []
        self.threads = set()

    def copy(self, destination, tensor):
        destination.fill_(0)
        self.started.append((destination, tensor))

    def finish(self):
        self.threads.add(threading.current_thread().name)
        while self.started:
            destination, tensor = self.started.pop()
            destination.copy_(tensor)


@pytest.mark.parametrize("direct", [True, False])
def test_what_is_written_is_what_has_arrived(direct, tensors, tmp_path, monkeypatch):
    """Copies are in flight until they are waited for; each buffer has a lane and a thread of its own."""
    lanes = []
    monkeypatch.setattr(api, "open_lane", lambda devices: lanes.append(LateLane()) or lanes[-1])
    report = export_sharded(tensors, tmp_path / "out", "200KB", max_host_memory="256KiB", direct_io=direct)
    assert_same(load(tmp_path / "out"), {name: tensor.contiguous() for name, tensor in tensors.items()})
    assert len(lanes) == BUFFERS
    assert all(name.startswith("streamexport") for lane in lanes for name in lane.threads)
    assert report.pinned_bytes == 256 * 1024
    assert not any(lane.started for lane in lanes)


class FakeDevice:
    """Stands in for torch.cuda: records the order of calls; its tensors are host tensors that claim a device."""

    def __init__(self):
        self.calls = []
        outer = self

        class Stream:
            def __init__(self, device):
                outer.calls.append("new stream")

            def __enter__(self):
                outer.calls.append("enter stream")

            def __exit__(self, *args):
                outer.calls.append("leave stream")

        class Event:
            def record(self, stream):
                assert isinstance(stream, Stream)
                outer.calls.append("record event")

            def synchronize(self):
                outer.calls.append("wait for event")

        self.Stream, self.Event = Stream, Event

    def synchronize(self, device):
        self.calls.append("synchronize device")

    def stream(self, stream):
        return stream


class OnDevice:
    """A host tensor that says it is on an accelerator."""

    device = torch.device("cuda", 0)

    def __init__(self, tensor):
        self.tensor = tensor


class Destination:
    def __init__(self, calls):
        self.calls = calls

    def copy_(self, tensor, *, non_blocking):
        self.calls.append(f"copy non_blocking={non_blocking}")


def test_an_accelerators_copies_are_on_a_stream_of_their_own_behind_the_optimizers_last_write():
    """One synchronisation before the first read; then copies that do not block, and one event to wait for."""
    device = FakeDevice()
    lane = AcceleratorLane(lambda _: device)
    for _ in range(2):
        lane.copy(Destination(device.calls), OnDevice(torch.ones(3)))
    lane.finish()
    lane.finish()
    copy = ["enter stream", "copy non_blocking=True", "leave stream"]
    assert device.calls == ["synchronize device", "new stream", *copy, *copy, "record event", "wait for event"]


def test_host_tensors_beside_an_accelerators_are_copied_at_once():
    """A module may be partly offloaded."""
    lane = AcceleratorLane(lambda _: pytest.fail("no device is asked"))
    destination = torch.zeros(5, dtype=torch.bfloat16)
    lane.copy(destination, torch.arange(5))
    lane.finish()
    assert destination.tolist() == [0, 1, 2, 3, 4]


def test_memory_that_cannot_be_pinned_is_pageable():
    """Without an accelerator here, pinning fails: the export goes on, and does not claim pinned memory."""
    ring = Ring(AcceleratorLane, 64 * 1024)
    assert ring.pinned_bytes == (ring.nbytes if torch.accelerator.is_available() else 0)
    assert len(ring.slots) == BUFFERS


def test_devices_choose_the_lane():
    """Host tensors take the host's lane; a device without streams is copied from synchronously."""
    assert isinstance(staging.open_lane([torch.device("cpu")]), HostLane)
    assert isinstance(staging.open_lane([torch.device("cpu"), torch.device("cuda")]), AcceleratorLane)
    assert isinstance(staging.open_lane([torch.device("mps")]), HostLane)


def test_a_budget_that_the_system_does_not_have_is_refused_by_name(tmp_path):
    """Not as a failing disk."""
    with pytest.raises(InvalidArgumentError, match="max_host_memory: the system gives no buffer"):
        export_sharded({"w": torch.ones(1)}, tmp_path / "out", max_host_memory="4000TB")
    assert not (tmp_path / "out").exists()
