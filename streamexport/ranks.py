"""The little that ranks must agree on: that all came, that all planned the same, and how it ended.

Ranks talk through the key-value store that ``torch.distributed`` keeps for its default group, never through
collectives: a rank that waits for a long write sits in no collective, whose watchdog would end the job, and works the
same under gloo, NCCL and any other backend.
"""

import json
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed

from streamexport.errors import InvalidArgumentError, RankError

DEFAULT_PEER_TIMEOUT = 600.0
"""Seconds to wait for the slowest rank to call: DeepSpeed's own default for its process groups is 10 minutes."""

_FIRST_DELAY, _LAST_DELAY = 0.001, 0.1
"""Seconds between two looks at the store: a short wait ends at once, a long one costs nothing."""

_GRACE = 5.0
"""Seconds that an answer may take on its way."""


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

    def lead(self, work: Callable[[], str]) -> str:
        """Do something on rank 0 alone; all wait for it and return its result.

        Raises:
            RankError: on all other ranks, when it failed on rank 0, which raises the error itself.
        """


class SingleRank:
    """One process on its own."""

    rank = 0

    def agree(self, digest: Callable[[], str]) -> None:
        """Nobody to compare with."""
        digest()

    def lead(self, work: Callable[[], str]) -> str:
        """Do it."""
        return work()


class StoreRanks:
    """All processes of ``torch.distributed``'s default group. Every one must make the same calls.

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
        # The store itself counts each rank's exports, so that a rank that missed one does not take the next for it.
        number = store.add(f"streamexport/calls/{rank}", 1)
        self._store = torch.distributed.distributed_c10d.PrefixStore(f"streamexport/{number}", store)

    def agree(self, digest: Callable[[], str]) -> None:
        """See ``Ranks``."""
        error: BaseException | None = None
        try:
            mine = {"digest": digest()}
        except BaseException as caught:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            error = caught
            mine = {"error": _describe(caught)}
        self._post(f"arrived/{self.rank}", mine)
        if self.rank == 0:
            self._post("verdict", self._compare(mine))
        # Rank 0 may come as late as any other, and then wait as long for the others.
        verdict = self._fetch("verdict", time.monotonic() + 2 * self._peer_timeout + _GRACE)
        if error is not None:
            raise error
        if verdict is None:
            raise RankError(self._absence(0), 0)
        if verdict:
            raise RankError(verdict["message"], verdict["rank"])

    def lead(self, work: Callable[[], str]) -> str:
        """See ``Ranks``."""
        if self.rank != 0:
            outcome = self._fetch("outcome", None)
            if "error" in outcome:
                msg = f"rank 0 failed: {outcome['error']}"
                raise RankError(msg, 0)
            return str(outcome["result"])
        try:
            result = work()
        except BaseException as error:
            self._post("outcome", {"error": _describe(error)})
            raise
        self._post("outcome", {"result": result})
        return result

    def _compare(self, mine: dict[str, str]) -> dict[str, Any]:
        """Collect what every rank posted; return what is wrong, or nothing."""
        deadline = time.monotonic() + self._peer_timeout
        for rank in range(self._world_size):
            theirs = self._fetch(f"arrived/{rank}", deadline)
            message = None
            if theirs is None:
                message = self._absence(rank)
            elif "error" in theirs:
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
        self._store.set(key, json.dumps(value))

    def _fetch(self, key: str, deadline: float | None) -> Any:
        """Return a posted value; None when it has not come by the deadline.

        It polls: a blocking wait on the store would hold a lock that other threads of this process need, NCCL's
        watchdog among them.
        """
        delay = _FIRST_DELAY
        try:
            while not self._store.check([key]):
                if deadline is not None and time.monotonic() > deadline:
                    return None
                time.sleep(delay)
                delay = min(2 * delay, _LAST_DELAY)
            return json.loads(self._store.get(key))
        except RuntimeError as error:  # torch's own, when the process that keeps the store is gone
            msg = f"torch.distributed's store, most often kept by rank 0's process, does not answer: {error}"
            raise RankError(msg, 0) from error


def open_ranks(peer_timeout: float) -> Ranks:
    """Return the ranks of this job: all of ``torch.distributed``'s default group, or this process alone.

    Raises:
        InvalidArgumentError: ``peer_timeout`` is not positive.
    """
    if not peer_timeout > 0:
        msg = f"peer_timeout={peer_timeout!r}: expected a positive number of seconds"
        raise InvalidArgumentError(msg)
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return SingleRank()
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way to it
    return StoreRanks(store, distributed.get_rank(), distributed.get_world_size(), peer_timeout)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
