"""Messages between the ranks of a process group, and the errors that say which one is lost.

Everything goes through :meth:`Communicator.exchange`: a batch of sends and receives between pairs
of ranks. With NCCL these are ``batch_isend_irecv``, which runs on the group's own CUDA stream after
what the current stream holds; :meth:`Communicator.wait` makes the current stream wait, not the
host. With gloo they run in threads, and the host waits.
"""

from __future__ import annotations

import contextlib
import struct
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# All ranks that wait for the same lost rank notice it within so many seconds of each other.
_GRACE = 1.0

_KEY = "flashcute/waited_for_by"
_COMPARED = "flashcute/compared"
_DESCRIPTION = "the description of its tensors"
_MOST_DESCRIPTIONS = 1024  # that a rank remembers; packed sequences differ in every step
_MOST_PAUSE = 0.05  # seconds between two looks into the store
_DEFAULT_TIMEOUT = 600.0  # NCCL's default in seconds, for a group that does not tell its own


class Message(NamedTuple):
    """One tensor to or from another rank.

    Attributes:
        send: Whether it leaves this rank.
        peer: The other rank's number in the group.
        tensor: The tensor that is sent or filled; contiguous.
        what: Name of the tensor in an error message.
    """

    send: bool
    peer: int
    tensor: Tensor
    what: str


class Communicator:
    """A process group as one function call uses it.

    Attributes:
        rank: Number of this process in the group.
        world: Number of processes in the group.
    """

    def __init__(self, fn: str, group):
        """Takes a process group, a DeviceMesh of one dimension, or None for all processes.

        Raises:
            RuntimeError: if ``torch.distributed`` is not initialised.
            TypeError: for anything else, and a mesh of several dimensions.
        """
        self.fn = fn
        if not dist.is_initialized():
            raise RuntimeError(
                f"{fn}: expected torch.distributed to be initialised, it is not; call "
                "torch.distributed.init_process_group, as programs under torchrun do"
            )
        self.group = _process_group(fn, group)
        self.rank = dist.get_rank(self.group)
        self.world = dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError(
                f"{fn}: expected a group that this process belongs to, got one without rank "
                f"{dist.get_rank()}; call it on the ranks of the group only"
            )

    def check_device(self, device: torch.device) -> None:
        """Raises an error unless the group can send tensors of a device.

        Raises:
            ValueError: names the backends that the group has.
        """
        if self.world == 1:
            return  # nothing is sent
        try:
            self.group._get_backend(device)
        except RuntimeError as error:
            kind, backend = device.type, "nccl" if device.type == "cuda" else "gloo"
            raise ValueError(
                f"{self.fn}: expected a group with a backend for q.device={device}, got one with "
                f"{dist.get_backend_config(self.group)!r}; move the tensors, or make the group "
                f'with backend="{kind}:{backend}" among others, as init_process_group and '
                "new_group take"
            ) from error

    def exchange(self, messages: Sequence[Message]) -> list[tuple[dist.Work, Message | None]]:
        """Starts all messages; returns what :meth:`wait` takes."""
        if not messages:
            return []
        if messages[0].tensor.is_cuda:
            found = [
                dist.P2POp(
                    dist.isend if x.send else dist.irecv,
                    x.tensor,
                    group=self.group,
                    group_peer=x.peer,
                )
                for x in messages
            ]
            return [(work, None) for work in dist.batch_isend_irecv(found)]
        started: list[tuple[dist.Work, Message | None]] = []
        for x in messages:
            try:
                if x.send:
                    work = dist.isend(x.tensor, group=self.group, group_dst=x.peer)
                else:
                    work = dist.irecv(x.tensor, group=self.group, group_src=x.peer)
            except RuntimeError as error:
                raise self._lost(x, error) from error
            started.append((work, x))
        return started

    def wait(self, started: Sequence[tuple[dist.Work, Message | None]]) -> None:
        """Waits for the messages of one :meth:`exchange`.

        Raises:
            RuntimeError: on the CPU, naming the rank that was lost.
        """
        for work, x in started:
            try:
                work.wait()
            except RuntimeError as error:
                if x is None:
                    raise
                raise self._lost(x, error) from error

    def _lost(self, message: Message, error: Exception) -> RuntimeError:
        lost = self._last_of_those_waiting(message.peer)
        verb = "send" if message.send else "receive"
        direction = "to" if message.send else "from"
        names = f"rank {lost} of the group"
        with contextlib.suppress(RuntimeError, ValueError):
            everywhere = dist.get_global_rank(self.group, lost)
            names += f" (rank {everywhere} of all)" if everywhere != lost else ""
        waiting = f", for which rank {message.peer} waits" if lost != message.peer else ""
        reason = str(error).splitlines()[0]
        return RuntimeError(
            f"{self.fn}: lost {names}{waiting}: expected to {verb} {message.what} {direction} rank "
            f"{message.peer} within the group's timeout, got: {reason}; that process has ended, "
            "hangs or never made this call. The group cannot be used any more: restart all its "
            "processes, from a checkpoint"
        )

    def _last_of_those_waiting(self, peer: int) -> int:
        """Returns the rank at the end of the chain of waiting ranks: that one is the cause.

        Each rank that loses another one writes its number to the store. A rank that has written
        nothing has ended or hangs.
        """
        try:
            store = group_store(self.group)
            store.set(f"{_KEY}/{self.rank}", str(peer))
            until = time.monotonic() + _GRACE
            while True:
                seen, last = [self.rank], peer
                while last not in seen and store.check([f"{_KEY}/{last}"]):
                    seen.append(last)
                    last = int(store.get(f"{_KEY}/{last}"))
                if time.monotonic() >= until:
                    return peer if last in seen else last
                time.sleep(_GRACE / 20)
        except (AttributeError, RuntimeError, ValueError):
            return peer  # the store is gone with the process that holds it

    def agree(self, description: Mapping[str, int | float | str], device: torch.device) -> None:
        """Compares what the ranks are about to do, before the first of their tensors is sent.

        On CUDA this happens through the group's store, and only for descriptions that are not among
        the latest: NCCL connects all ranks for the first transfer of a group, and would wait for a
        lost one without a timeout. On the CPU it happens in each call.

        Raises:
            ValueError: on every rank, naming what differs, and where.
            RuntimeError: naming the rank that was lost.
        """
        if self.world == 1:
            return
        mine = tuple(description.items())
        agreed = _agreed.setdefault(self.group, _Agreed())
        if device.type == "cuda" and mine in agreed.descriptions:
            return
        numbers = [_encode(x) for x in description.values()]
        if device.type == "cuda":
            agreed.comparisons += 1
            found = self._gather_by_store(agreed.comparisons, numbers)
        else:
            found = self._gather(numbers)
        for column, (name, value) in enumerate(mine):
            values = [row[column] for row in found]
            if len(set(values)) > 1:
                shown = ", ".join(f"{_decode(x, value)} on rank {i}" for i, x in enumerate(values))
                raise ValueError(
                    f"{self.fn}: expected the same {name} on all ranks of the group, got {shown}; "
                    "pad or split the sequences so that all ranks make the same call"
                )
        if device.type == "cuda":
            agreed.add(mine)

    def _gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the numbers of each rank, sent as messages between CPU tensors."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        theirs = mine.expand(self.world, -1).contiguous()
        others = [peer for peer in range(self.world) if peer != self.rank]
        self.wait(
            self.exchange(
                [Message(True, peer, mine, _DESCRIPTION) for peer in others]
                + [Message(False, peer, theirs[peer], _DESCRIPTION) for peer in others]
            )
        )
        return theirs.tolist()

    def _gather_by_store(self, comparison: int, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the numbers of each rank, by the group's store, which keeps two comparisons."""
        key = f"{_COMPARED}/{comparison}"
        found = {self.rank: list(numbers)}
        missing = [peer for peer in range(self.world) if peer != self.rank]
        until = time.monotonic() + group_timeout(self.group)
        pause = 1e-4
        try:
            store = group_store(self.group)
            store.set(f"{key}/{self.rank}", ",".join(map(str, numbers)))
            # All ranks have written the comparison before this one, so all have read the one before
            # that.
            with contextlib.suppress(RuntimeError):  # some stores cannot delete
                store.delete_key(f"{_COMPARED}/{comparison - 2}/{self.rank}")
            while missing:
                # Store.wait() is not used: it would keep other threads from using the store.
                if store.check([f"{key}/{missing[0]}"]):
                    text = store.get(f"{key}/{missing[0]}").decode()
                    found[missing.pop(0)] = [int(x) for x in text.split(",")]
                elif time.monotonic() >= until:
                    raise RuntimeError("nothing")
                else:
                    time.sleep(pause)
                    pause = min(2 * pause, _MOST_PAUSE)
            return [found[peer] for peer in range(self.world)]
        except RuntimeError as error:
            expected = Message(False, missing[0], torch.empty(0), _DESCRIPTION)
            raise self._lost(expected, error) from error


class _Agreed:
    """What the ranks of a group have compared so far, which is equal on all of them."""

    def __init__(self):
        self.descriptions: dict[tuple, None] = {}  # the latest ones, oldest first
        self.comparisons = 0

    def add(self, description: tuple) -> None:
        self.descriptions[description] = None
        if len(self.descriptions) > _MOST_DESCRIPTIONS:
            del self.descriptions[next(iter(self.descriptions))]


_agreed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _encode(value: float | str) -> int:
    if isinstance(value, float):
        return struct.unpack("<q", struct.pack("<d", value))[0]
    if isinstance(value, str):
        return int.from_bytes(value.encode()[:8], "little")  # ASCII: not negative
    return int(value)


def _decode(number: int, like: float | str) -> object:
    if isinstance(like, float):
        return struct.unpack("<d", struct.pack("<q", number))[0]
    if isinstance(like, str):
        return number.to_bytes(8, "little").rstrip(b"\0").decode(errors="replace")
    return type(like)(number)


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """Returns the store of a group; only newer versions of torch have a public method for it."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(group)


def group_timeout(group: dist.ProcessGroup) -> float:
    """Returns the timeout in seconds of the group's backend for CUDA tensors."""
    try:
        return group._get_backend(torch.device("cuda")).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT


def _process_group(fn: str, group) -> dist.ProcessGroup:
    if group is None:
        return dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{fn}: expected a group that this process belongs to, got that of new_group on a rank "
            "outside of it; call it on the ranks of the group only"
        )
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim == 1:
            return group.get_group()
        raise TypeError(
            f"{fn}: expected a DeviceMesh of one dimension, got one of {group.ndim}, "
            f"{group.mesh_dim_names}; pass one dimension of it, as mesh['cp']"
        )
    raise TypeError(
        f"{fn}: expected group to be a ProcessGroup, a DeviceMesh or None, got group of type "
        f"{type(group).__name__}; pass None for all processes"
    )
