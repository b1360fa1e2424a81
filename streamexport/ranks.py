"""The little that ranks must agree on: that all came, that all planned the same, and how it ended.

Ranks talk through the key-value store that ``torch.distributed`` keeps for its default group, never through
collectives: a rank that waits for a long write sits in no collective, whose watchdog would end the job, and works the
same under gloo, NCCL and any other backend.
"""

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch.distributed

from streamexport.errors import InvalidArgumentError, RankError

DEFAULT_PEER_TIMEOUT = 600.0
"""Seconds to wait for the slowest rank to call: DeepSpeed's own default for its process groups is 10 minutes."""

_FIRST_DELAY, _LAST_DELAY = 0.001, 0.1
"""Seconds between two looks at the store: a short wait ends at once, a long one costs nothing."""

_GRACE = 5.0
"""Seconds that an answer may take on its way."""

_LATE_GRACE = 30.0
"""Seconds that a rank that was given up waits for the next round, before it takes itself for late in this one."""

_HEARTBEAT, _DEAD_AFTER = 5.0, 300.0
"""Seconds between two signs of life of a rank that works, and without one until the others give it up."""


Announce = Callable[[], None]
Wait = Callable[[], bool]


class Ranks(Protocol):
    """The processes that export together."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    def agree(self, digest: Callable[[], str]) -> None:
        """Compute something on every rank and compare.

        Raises:
            RankError: another rank failed in it, has another value, or never came. A rank's own error is raised
                as it is.
        """

    def lead(self, work: Callable[[Announce], str], follow: Callable[[Wait], None]) -> str:
        """Do something on rank 0; all wait for it and return its result.

        Args:
            work: what rank 0 does. It gets a function by which it asks the others for their next step.
            follow: what the others do meanwhile. It gets a function that waits for that, and returns whether it came,
                and not the end of the work.

        Raises:
            RankError: on all other ranks, when it failed on rank 0, which raises the error itself.
        """


class SingleRank:
    """One process on its own."""

    rank = 0

    def agree(self, digest: Callable[[], str]) -> None:
        """Nobody to compare with."""
        digest()

    def lead(self, work: Callable[[Announce], str], follow: Callable[[Wait], None]) -> str:  # noqa: ARG002
        """Do it."""
        return work(lambda: None)


class StoreRanks:
    """All processes of ``torch.distributed``'s default group. Every one must make the same calls.

    Rank 0 opens a round for each export, the others join it. One that comes when rank 0 has given it up is told so,
    or joins the next round if that is opened meanwhile: after a call that not all ranks made, the next works again.

    Args:
        store: the group's key-value store.
        rank: this process's number.
        world_size: how many there are.
        peer_timeout: seconds to wait in ``agree`` for the slowest rank.
    """

    def __init__(self, store: Any, rank: int, world_size: int, peer_timeout: float) -> None:
        self.rank = rank
        self._world_size = world_size
        self._peer_timeout = peer_timeout
        self._store = torch.distributed.distributed_c10d.PrefixStore("streamexport", store)
        self._round = 0

    def agree(self, digest: Callable[[], str]) -> None:
        """See ``Ranks``."""
        if self.rank == 0:
            self._round = self._store.add("rounds", 1)
        error: BaseException | None = None
        try:
            mine = {"digest": digest()}
        except BaseException as caught:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            error = caught
            mine = {"error": _describe(caught)}
        # Rank 0 may come as late as any other, and then wait as long for the others.
        deadline = time.monotonic() + 2 * self._peer_timeout + _GRACE
        verdict = None
        if self.rank == 0 or self._join(mine, deadline):
            self._post(f"arrived/{self.rank}", mine)
            if self.rank == 0:
                self._post("verdict", self._compare(mine))
            verdict = self._fetch("verdict", deadline)
        if error is not None:
            raise error
        if verdict is None:
            raise RankError(self._absence(0), 0)
        if verdict:
            raise RankError(verdict["message"], verdict["rank"])

    def lead(self, work: Callable[[Announce], str], follow: Callable[[Wait], None]) -> str:
        """See ``Ranks``."""
        if self.rank != 0:
            steps = itertools.count(1)
            follow(lambda: self._fetch(f"step/{next(steps)}", None, unless="outcome") is not None)
            outcome = self._fetch("outcome", None)
            if "error" in outcome:
                msg = f"rank 0 failed: {outcome['error']}"
                raise RankError(msg, 0)
            return str(outcome["result"])
        with self._heartbeat():
            steps = itertools.count(1)
            try:
                result = work(lambda: self._post(f"step/{next(steps)}", {"go": True}))
            except BaseException as error:
                self._post("outcome", {"error": _describe(error)})
                raise
            self._post("outcome", {"result": result})
        return result

    def _join(self, mine: dict[str, str], deadline: float) -> bool:
        """Wait for this rank's next round, past those in which it was given up; return whether there was one.

        A call after rank 0 has given this rank up may be the one that rank 0 waited for, late, or the next: what rank
        0 planned in the two rounds tells, if anything does.
        """
        patience: float | None = None
        late: int | None = None
        with _answering():
            joined = self._store.add(f"joined/{self.rank}", 0)
            self._round = joined + 1
            for now in _moments():
                opened = self._store.add("rounds", 0)
                while self._round <= opened and self._given_up():
                    late = self._round if self._peek("arrived/0") == mine else late
                    self._round += 1
                if self._round <= opened:
                    leaders = self._peek("arrived/0")
                    if late is None or leaders == mine:
                        break
                    if leaders is not None:
                        self._round = late
                        break
                elif opened > joined:
                    patience = patience or now + min(self._peer_timeout, _LATE_GRACE)
                    if now > patience:
                        self._round = opened
                        break
                elif now > deadline:
                    return False
            self._store.add(f"joined/{self.rank}", self._round - joined)
        return True

    def _given_up(self) -> bool:
        verdict = self._peek("verdict")
        return bool(verdict) and self.rank in verdict.get("absent", ())

    @contextlib.contextmanager
    def _heartbeat(self) -> Iterator[None]:
        """Show the other ranks that this one is alive, on a thread of its own."""
        done = threading.Event()

        def beat() -> None:
            # The store goes when the job ends; whoever then waits is told by the store itself.
            with contextlib.suppress(RuntimeError):
                while not done.wait(_HEARTBEAT):
                    self._store.add(f"{self._round}/alive", 1)

        thread = threading.Thread(target=beat, name="streamexport-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _compare(self, mine: dict[str, str]) -> dict[str, Any]:
        """Collect what every rank posted; return what is wrong, or nothing."""
        deadline = time.monotonic() + self._peer_timeout
        for rank in range(self._world_size):
            theirs = self._fetch(f"arrived/{rank}", deadline)
            message = None
            if theirs is None:
                absent = [late for late in range(self._world_size) if self._peek(f"arrived/{late}") is None]
                return {"rank": rank, "message": self._absence(rank), "absent": absent}
            if "error" in theirs:
                message = f"rank {rank} failed: {theirs['error']}"
            elif theirs != mine and "digest" in mine:
                message = (
                    f"rank {rank} planned another export than rank 0: give every rank the same model and arguments"
                )
            if message:
                return {"rank": rank, "message": message}
        return {}

    def _absence(self, rank: int) -> str:
        return (
            f"rank {rank} did not call within {self._peer_timeout:g} s: "
            "every rank of the job must call the export, not one alone"
        )

    def _post(self, key: str, value: dict[str, Any]) -> None:
        self._store.set(f"{self._round}/{key}", json.dumps(value))

    def _peek(self, key: str) -> Any:
        """Return a posted value, or None."""
        key = f"{self._round}/{key}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _fetch(self, key: str, deadline: float | None, unless: str | None = None) -> Any:
        """Return a posted value; None when it has not come by the deadline, or before another one.

        It polls: a blocking wait on the store would hold a lock that other threads of this process need, NCCL's
        watchdog among them.

        Raises:
            RankError: the store is gone; or there is no deadline, and rank 0 shows no sign of life.
        """
        beats, last_beat = -1, time.monotonic()
        with _answering():
            for now in _moments():
                value = self._peek(key)
                if value is not None or (deadline is not None and now > deadline):
                    return value
                if unless is not None and self._peek(unless) is not None:
                    return None
                if deadline is None:
                    beat = self._store.add(f"{self._round}/alive", 0)
                    if beat != beats:
                        beats, last_beat = beat, now
                    elif now > last_beat + _DEAD_AFTER:
                        msg = f"rank 0 has shown no sign of life for {_DEAD_AFTER:g} s"
                        raise RankError(msg, 0)
        return None


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Say it where the store is gone."""
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:  # torch's own, when the process that keeps the store is gone
        msg = f"torch.distributed's store, most often kept by rank 0's process, does not answer: {error}"
        raise RankError(msg, 0) from error


def _moments() -> Iterator[float]:
    """Yield the time now and then: often at first, so that a short wait ends at once."""
    delay = _FIRST_DELAY
    while True:
        yield time.monotonic()
        time.sleep(delay)
        delay = min(2 * delay, _LAST_DELAY)


def check_peer_timeout(peer_timeout: object) -> None:
    """Refuse a timeout that is none.

    Raises:
        InvalidArgumentError: it is not positive.
    """
    if not isinstance(peer_timeout, int | float) or not peer_timeout > 0:
        msg = f"peer_timeout={peer_timeout!r}: expected a positive number of seconds"
        raise InvalidArgumentError(msg)


def open_ranks(peer_timeout: float) -> Ranks:
    """Return the ranks of this job: all of ``torch.distributed``'s default group, or this process alone.

    Never fails for a ``peer_timeout`` that cannot be used, so that the other ranks can be told.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return SingleRank()
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way to it
    usable = isinstance(peer_timeout, int | float) and peer_timeout > 0
    return StoreRanks(
        store, distributed.get_rank(), distributed.get_world_size(), peer_timeout if usable else DEFAULT_PEER_TIMEOUT
    )


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - an error whose text fails is told of all the same
        return type(error).__name__
