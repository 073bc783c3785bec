"""Sums of GPU tensors with NCCL, on `torch.distributed`'s process group, without the global default group.

The process group is built when the first such tensor comes: only then is it certain that all members have one, and on
which device. Each member publishes its GPU. If two have the same one, or one has no NCCL, all use Gloo for the sums.

* **Complete means complete.** NCCL's own way of waiting orders streams, and the host continues. A collective counts as
  completed when the host has seen its end. An aborted kernel also ends, and leaves arbitrary values in its tensor, so
  `abort` is recorded before it begins and checked after the end.
* **Abort.** `ncclCommAbort` ends the kernels within milliseconds, and then takes half a second to clean up, so it has
  its own thread. `abort` waits for the kernels.
* **Nobody ends the process.** With `TORCH_NCCL_BLOCKING_WAIT` torch starts neither its watchdog nor its monitor, which
  end a process whose collective fails. torch's `wait`, which the variable is named for, is not used.
* **The end of a peer** is no error in the kernel, which would wait forever. Gloo's connections to the peer reveal it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ef_common import threads
from ef_common.collectives.bootstrap_store import BootstrapStore, abandonable
from ef_common.core.view import View
from ef_common.errors import GroupBroken
from ef_common.session.ports import Bootstrap

logger = logging.getLogger(__name__)

UNKNOWN_TYPES = (torch.complex64, torch.complex128)
_TIMEOUT = timedelta(hours=6)  # a slow peer is no failure
_FIRST_LOOK_S, _LAST_LOOK_S = 0.00005, 0.001
_CHECK_S = 0.02
_PATIENCE = 5  # checks: what a peer that leaves has sent may be on its way
_SETTLE_S = 10.0
_MAX_FAILURES = 2
_FIRST_SIZES = (1, 1 << 20)
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class NcclRecord:
    """What a worker remembers about NCCL from one view to the next.

    Attributes:
        num_failures: How often in a row it could not be started, though all members were there.
    """

    def __init__(self) -> None:
        self.num_failures = 0


class NcclPending:
    """A sum in flight."""

    def __init__(self, tensor: Tensor, work: Any, stream: Any) -> None:
        self.tensor = tensor
        self._work = work
        self._done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            work.get_future().wait()  # orders this stream after the sum; the host goes on
            self._done.record(stream)

    def is_over(self) -> bool:
        """Whether the kernel has ended, successfully or not."""
        return bool(self._done.query())

    def has_failed(self) -> bool:
        """Whether NCCL reports an error while the kernel still waits."""
        return bool(self._work.is_completed()) and not self.is_over()


class NcclSums:
    """One member's part in the sums of a view.

    ::

        unsettled → nccl          `start`: each member has a GPU of its own, and all have one release of NCCL
        unsettled → gloo          likewise, and that is not so
        unsettled → GroupBroken   likewise, and a member is lost, or NCCL cannot connect
        unsettled → aborted       `abort`
        nccl → aborted            likewise
        gloo → aborted            likewise

    Args:
        view: The members.
        rank: Rank of this one.
        bootstrap: Bootstrap of the view.
        record: Record of this worker.
        is_cut: Whether a connection to a member has ended.
    """

    def __init__(
        self, view: View, rank: int, bootstrap: Bootstrap, *, record: NcclRecord, is_cut: Callable[[], bool]
    ) -> None:
        self._view, self._rank, self._bootstrap = view, rank, bootstrap
        self._record = record
        self._is_cut = is_cut
        self.is_settled = False
        """Whether it is known if NCCL makes the sums of this view."""
        self._process_group: Any = None
        self._stream: Any = None
        self._lock = threading.Lock()
        self._aborted = False
        self._flying: set[NcclPending] = set()

    def start(self, tensor: Tensor) -> NcclPending | None:
        """Start to sum a tensor on a GPU over the members, in place.

        The first call waits for all members.

        Returns:
            None if the members don't use NCCL.

        Raises:
            GroupBroken: A member is gone, the view has been replaced, or the group was aborted.
        """
        if not self.is_settled:
            self._connect(tensor.device)
            self.is_settled = True
        group, stream = self._process_group, self._stream
        if self._aborted:
            raise GroupBroken("aborted")
        if group is None:
            return None
        pending = NcclPending(tensor, group.allreduce([tensor]), stream)
        self._flying.add(pending)
        return pending

    def finish(self, pending: NcclPending) -> None:
        """Wait until a sum is complete.

        Raises:
            GroupBroken: The sum is not complete and never will be.
        """
        pause, check_at, patience = _FIRST_LOOK_S, time.monotonic() + _CHECK_S, _PATIENCE
        while not pending.is_over():
            if self._aborted:
                raise GroupBroken("aborted")
            if time.monotonic() > check_at:
                check_at += _CHECK_S
                patience -= self._is_cut() or pending.has_failed()
                if patience < 0:
                    raise GroupBroken("a connection has ended")
            time.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK_S)
        if self._aborted:  # so the end may have been that of an aborted kernel
            raise GroupBroken("aborted")
        self._flying.discard(pending)

    def abort(self) -> None:
        """End all sums. When this returns, none of them writes to its tensor any more.

        A sum that another thread begins meanwhile breaks as well; it has ended when this is called once more.
        """
        with self._lock:
            self._aborted = True
            group, self._process_group = self._process_group, None
        if group is not None and threading.main_thread().is_alive():
            threads.start(group.abort, name="ef-abort-nccl", job="ends NCCL's sums", daemon=False)
        elif group is not None:  # at the interpreter's end, which waits for no thread any more
            group.abort()
        flying = tuple(self._flying)
        deadline = time.monotonic() + _SETTLE_S
        while not all(pending.is_over() for pending in flying):
            if time.monotonic() > deadline:
                logger.warning("a sum on the GPU does not end, %g s after it was aborted", _SETTLE_S)
                return
            time.sleep(_LAST_LOOK_S)
        self._flying.difference_update(flying)

    # ------------------------------------------------------------ building

    def _connect(self, device: torch.device) -> None:
        """Start NCCL, if all members can."""
        name = f"ef-nccl-{self._view.generation}"
        try:
            group = abandonable(lambda: self._agree_and_build(device), self._is_void, name=name)
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            self._record.num_failures += 1
            if self._record.num_failures == _MAX_FAILURES:
                logger.warning("NCCL cannot be used, so Gloo sums what is on GPUs from now on: %s", reason)
            raise GroupBroken(f"NCCL could not connect: {reason}") from None
        if group is None:
            return
        self._record.num_failures = 0
        with self._lock:
            if not self._aborted:
                self._process_group, self._stream = group, _stream_on(device)
                return
        group.abort()
        raise GroupBroken("aborted")

    def _is_void(self) -> bool:
        return self._aborted or self._bootstrap.replaced() or self._is_cut()

    def _agree_and_build(self, device: torch.device) -> Any:
        own = None if self._record.num_failures >= _MAX_FAILURES else _identity_of(device)
        self._bootstrap.put(f"gpu/{self._rank}", json.dumps(own).encode())
        gpus = [json.loads(self._bootstrap.get(f"gpu/{rank}")) for rank in range(self._view.world_size)]
        reason = why_not(gpus)
        if not reason:
            return self._build(device)
        logger.info("Gloo sums what is on GPUs: %s", reason)
        return None

    def _build(self, device: torch.device) -> Any:
        """Connect to the others with first sums of two sizes, which NCCL sends over different connections."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        store = BootstrapStore(self._bootstrap, prefix="nccl/")
        with torch.cuda.device(device), torch.cuda.stream(_stream_on(device)):
            with _environ(_BLOCKING_WAIT, "1"):
                group: Any = dist.ProcessGroupNCCL(store, self._rank, self._view.world_size, options)
            try:
                for size in _FIRST_SIZES:
                    self._sum_first(group, torch.ones(size, device=device))
            except (RuntimeError, GroupBroken):
                group.abort()
                raise
        return group

    def _sum_first(self, group: Any, tensor: Tensor) -> None:
        pending = NcclPending(tensor, group.allreduce([tensor]), _stream_on(tensor.device))
        while not pending.is_over():
            if self._is_void() or pending.has_failed():
                raise GroupBroken("a member was lost while NCCL connected")
            time.sleep(_LAST_LOOK_S)


def _stream_on(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _identity_of(device: torch.device) -> dict[str, Any] | None:
    """The value that NCCL needs to differ between members (the GPU of a host), and the one that must be equal."""
    if not dist.is_nccl_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    gpu = f"{os.environ.get('NCCL_HOSTID', '')} {properties.uuid}"
    return {"gpu": gpu, "version": list(torch.cuda.nccl.version())}  # type: ignore[no-untyped-call]


def why_not(gpus: list[dict[str, Any] | None]) -> str:
    """Why members with these GPUs cannot use NCCL; empty if they can. All members get the same answer."""
    known = [gpu for gpu in gpus if gpu is not None]
    if len(known) < len(gpus):
        return f"rank {gpus.index(None)} does not use NCCL"
    if len({gpu["gpu"] for gpu in known}) < len(known):
        return "workers share a GPU"
    versions = sorted({".".join(map(str, gpu["version"])) for gpu in known})
    return f"workers have different releases of NCCL: {', '.join(versions)}" if len(versions) > 1 else ""


@contextmanager
def _environ(name: str, value: str) -> Iterator[None]:
    """Set a variable in the environment while torch creates a process group."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
