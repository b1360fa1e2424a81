import threading

import pytest
import torch
import torch.distributed as dist
from oracles import assert_same, load

from streamexport import RankError, export_sharded, ranks
from streamexport.ranks import StoreRanks


def idle(wait):
    """A rank that is asked for nothing while rank 0 works."""


def on_ranks(world_size, work, store=None, peer_timeout=30.0):
    """Run ``work(ranks)`` on threads that stand for ranks; return each rank's result or error."""
    store = store or dist.HashStore()
    results = [None] * world_size

    def run(rank):
        try:
            results[rank] = work(StoreRanks(store, rank, world_size, peer_timeout))
        except Exception as error:  # noqa: BLE001 - it is the result
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def test_ranks_that_planned_the_same_go_on_and_get_the_leaders_result():
    """Several exports in a row do not mix."""
    store = dist.HashStore()
    for round_number in range(3):

        def work(these, number=round_number):
            these.agree(lambda: "same")
            return these.lead(lambda _: f"result {number}", idle)

        assert on_ranks(3, work, store) == [f"result {round_number}"] * 3


def test_a_rank_that_planned_another_export_is_an_error_on_all():
    """D14: nothing is written, and the rank is named."""
    results = on_ranks(3, lambda these: these.agree(lambda: "other" if these.rank == 2 else "same"))
    assert all(isinstance(result, RankError) and result.rank == 2 for result in results)
    assert "rank 2 planned another export" in str(results[0])


def test_a_failure_while_planning_is_raised_on_all():
    """The failing rank raises its own error, the others one that names it."""

    def plan(these):
        if these.rank == 1:
            msg = "no such layer"
            raise ValueError(msg)
        return "same"

    results = on_ranks(3, lambda these: these.agree(lambda: plan(these)))
    assert isinstance(results[1], ValueError)
    for rank in (0, 2):
        assert isinstance(results[rank], RankError)
        assert "rank 1 failed: ValueError: no such layer" in str(results[rank])


@pytest.mark.parametrize("error", [OSError(28, "No space left on device", "x"), KeyboardInterrupt()])
def test_a_failure_of_the_writing_rank_is_raised_on_all(error):
    """Also when it is interrupted: nobody waits for what never comes."""

    def fail(_):
        raise error

    def work(these):
        these.agree(lambda: "same")
        try:
            these.lead(fail, idle)
        except (RankError, OSError, KeyboardInterrupt) as caught:
            return caught

    results = on_ranks(2, work)
    assert results[0] is error
    assert isinstance(results[1], RankError)
    assert type(error).__name__ in str(results[1])
    assert results[1].rank == 0


def test_a_rank_that_never_calls_is_an_error_that_names_the_rule():
    """D12: only rank 0 calls. A late rank hears of it at once, and the next export is in step again."""
    store = dist.HashStore()
    with pytest.raises(RankError, match=r"rank 1 did not call within 0\.05 s: every rank") as caught:
        StoreRanks(store, 0, 2, 0.05).agree(lambda: "same")
    assert caught.value.rank == 1
    with pytest.raises(RankError, match="did not call"):
        StoreRanks(store, 1, 2, 0.05).agree(lambda: "same")
    assert on_ranks(2, lambda these: these.agree(lambda: "same"), store) == [None, None]


def test_a_rank_that_missed_a_call_joins_the_next_one(monkeypatch):
    """Also when it comes first: it was given up in a round that it never called in."""
    store = dist.HashStore()
    with pytest.raises(RankError, match="rank 1 did not call"):
        StoreRanks(store, 0, 2, 0.05).agree(lambda: "same")
    waiting = threading.Event()
    pause = ranks.time.sleep
    monkeypatch.setattr(ranks.time, "sleep", lambda seconds: (waiting.set(), pause(seconds)))

    def work(these):
        if these.rank == 0:
            assert waiting.wait(30)
        these.agree(lambda: "same")
        return these.lead(lambda _: "done", idle)

    assert on_ranks(2, work, store) == ["done", "done"]


def test_a_late_call_is_told_from_the_next_by_what_is_exported():
    """The rank that was given up comes with the plan of then, while rank 0 is at the next."""
    store = dist.HashStore()
    with pytest.raises(RankError, match="rank 1 did not call"):
        StoreRanks(store, 0, 2, 0.05).agree(lambda: "first")

    def work(these):
        if these.rank == 1:
            with pytest.raises(RankError, match="rank 1 did not call"):
                these.agree(lambda: "first")
        other = StoreRanks(store, these.rank, 2, 30.0)
        other.agree(lambda: "second")
        return other.lead(lambda _: "done", idle)

    assert on_ranks(2, work, store) == ["done", "done"]


def test_a_leader_that_fails_early_and_goes_on_leaves_no_rank_behind():
    """Each rank takes rounds in their order, also one that comes when the next has been opened."""
    store = dist.HashStore()
    leader_failed = threading.Event()

    def work(these):
        other = StoreRanks(store, these.rank, 2, 30.0)
        if these.rank == 0:
            with pytest.raises(ValueError, match="no"):
                these.agree(lambda: int("no"))
            leader_failed.set()
        else:
            assert leader_failed.wait(30)
            with pytest.raises(RankError, match="rank 0 failed: ValueError"):
                these.agree(lambda: "same")
        other.agree(lambda: "same")
        return other.lead(lambda _: "done", idle)

    assert on_ranks(2, work, store) == ["done", "done"]


def test_a_leader_without_a_sign_of_life_is_given_up(monkeypatch):
    """It has died in a way that the store does not notice (a store in a file)."""
    monkeypatch.setattr(ranks, "_DEAD_AFTER", 0.0)
    these = StoreRanks(dist.HashStore(), 1, 2, 30.0)
    with pytest.raises(RankError, match="rank 0 has shown no sign of life") as caught:
        these.lead(lambda _: "", idle)
    assert caught.value.rank == 0


def test_a_leader_that_works_for_long_shows_signs_of_life(monkeypatch):
    """The others wait on as long as they come."""
    monkeypatch.setattr(ranks, "_HEARTBEAT", 0.001)
    store = dist.HashStore()
    beaten = threading.Event()

    def work(these):
        these.agree(lambda: "same")
        return these.lead(lambda _: str(beaten.wait(30)), idle)

    def watch():
        while store.add("streamexport/1/alive", 0) < 3:
            ranks.time.sleep(0.001)
        beaten.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert on_ranks(2, work, store) == ["True", "True"]
    watcher.join()


def test_an_error_without_a_text_is_told_all_the_same():
    """Its __str__ fails: the other ranks hear of its type."""

    class MuteError(Exception):
        def __str__(self):
            raise ValueError

    def plan(these):
        if these.rank == 1:
            raise MuteError
        return "same"

    results = on_ranks(2, lambda these: these.agree(lambda: plan(these)))
    assert isinstance(results[1], MuteError)
    assert str(results[0]) == "rank 1 failed: MuteError"


def test_a_rank_0_that_never_calls_is_an_error_too(monkeypatch):
    """The others wait for its verdict, and not for ever."""
    monkeypatch.setattr(ranks, "_GRACE", 0.0)
    with pytest.raises(RankError, match=r"rank 0 did not call within 0\.05 s"):
        StoreRanks(dist.HashStore(), 1, 2, 0.05).agree(lambda: "same")


def test_an_interrupt_while_planning_is_heard_by_all():
    """Ctrl-C on one rank does not leave the others waiting."""

    def plan(these):
        if these.rank == 0:
            raise KeyboardInterrupt
        return "same"

    def work(these):
        try:
            these.agree(lambda: plan(these))
        except (KeyboardInterrupt, RankError) as caught:
            return caught

    results = on_ranks(2, work)
    assert isinstance(results[0], KeyboardInterrupt)
    assert "rank 0 failed: KeyboardInterrupt" in str(results[1])


def test_a_store_that_is_gone_is_an_error():
    """Most often the process of rank 0, which keeps it, has died."""
    these = StoreRanks(dist.HashStore(), 1, 2, 30.0)

    def broken(keys):
        msg = "connection reset"
        raise dist.DistNetworkError(msg)

    these._store = type("Broken", (), {"check": staticmethod(broken), "set": lambda *args: None})()
    with pytest.raises(RankError, match=r"does not answer.*connection reset"):
        these.lead(lambda _: "", idle)


def test_waiting_holds_no_collective_and_outlasts_any_group_timeout(monkeypatch):
    """D13: a write may take longer than the watchdog of collectives allows; the wait only polls the store."""
    pauses = []
    monkeypatch.setattr(ranks.time, "sleep", lambda seconds: pauses.append(seconds) or started.wait(0.001))
    started = threading.Event()

    def work(these):
        these.agree(lambda: "same")
        return these.lead(lambda _: "done" if slow() else "", idle)

    def slow():
        while not (pauses and pauses[-1] == 0.1):
            started.wait(0.001)
        return True

    assert on_ranks(2, work) == ["done", "done"]
    assert max(pauses) == 0.1


def test_one_process_needs_no_store(tmp_path):
    """A default group of one is a process on its own."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert isinstance(ranks.open_ranks(1.0), ranks.SingleRank)
        export_sharded({"w": torch.ones(3)}, tmp_path / "out")
    finally:
        dist.destroy_process_group()
    assert_same(load(tmp_path / "out"), {"w": torch.ones(3)})


def test_the_others_take_a_step_each_time_rank_0_asks_for_it():
    """And stop when it has ended, with a result or an error."""
    taken = []

    def work(these, fail):
        def lead(announce):
            for _ in range(3):
                announce()
            return str(1 // (not fail))

        def follow(wait):
            while wait():
                taken.append(these.rank)

        these.agree(lambda: "same")
        return these.lead(lead, follow)

    assert on_ranks(3, lambda these: work(these, fail=False)) == ["1"] * 3
    assert sorted(taken) == [1, 1, 1, 2, 2, 2]
    results = on_ranks(2, lambda these: work(these, fail=True))
    assert [type(result) for result in results] == [ZeroDivisionError, RankError]
