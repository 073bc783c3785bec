"""The error tree of ElasticFlow.

::

    ElasticFlowError
    ├── UsageError                  you can fix it: a setting, an unsupported feature, bad input
    │   ├── EventLogError           an event log that cannot be read (in `events`)
    │   ├── CallMismatch            workers have made different collective calls
    │   ├── UnsupportedError        a feature of the host framework that elastic training cannot keep
    │   ├── MixedImportsError       objects of `lightning.pytorch` and `pytorch_lightning` in one run
    │   └── NewerFormat             checkpoints that a newer version of ElasticFlow has written
    ├── MembershipError             a peer, the coordinator or the network failed for good
    │   ├── CoordinatorLost         the coordinator is gone and a new view is needed
    │   ├── Evicted                 the others have continued without this worker
    │   ├── JobFailed               the user's code has raised an exception in another worker, which ends the job
    │   ├── CannotJoin              this newcomer cannot continue from the others' state; they continue without it
    │   └── AuthenticationError     the token is missing or wrong, or the coordinator is that of another job
    ├── StorageError                a problem with the checkpoint store or its contents
    │   ├── StorageFailed           the store refused, hung, is full or unreachable; trying again may help
    │   │   ├── NotFound            what was requested is not there
    │   │   └── StorageRefused      it lacks a right, or is read-only, or no folder: trying again does not help soon
    │   ├── AlreadyExists           somebody else has created it
    │   ├── InvalidCheckpoint       torn, truncated, changed or half deleted
    │   ├── ShareMissing            a worker has not written its part of a checkpoint
    │   └── Fenced                  others have continued, so this worker must not publish
    ├── ClusterFailed               the API server of Kubernetes cannot be reached, or fails; trying again may help
    │   ├── ClusterAway             it does not answer, or has too much to do: all calls would fail now
    │   ├── ClusterNotFound         it has no such object
    │   ├── ClusterConflict         somebody has changed what is written, or counted, meanwhile
    │   │   └── ClusterExists       the name is taken
    │   ├── ClusterExpired          it does not remember what it was asked for: what is read in parts is read anew
    │   └── ClusterRefused          it does not allow that, or the object is wrong
    ├── DataWorkersLost             the processes that read a worker's samples were killed repeatedly
    ├── ThreadFailed                a thread of ElasticFlow has ended by an error, so nobody can wait for it any more
    └── ProtocolError               a message or a call that the protocol does not allow (a bug or a stranger)

    GroupBroken                     internal: the group of this view is dead; recovery handles it
    JobFinished                     internal: the job has ended; a late joiner exits with status 0
    Left                            internal: this worker asked to leave and is out of the view
    TrainingOver                    internal: the others are in a later training, so a newcomer skips its own
    MembersChanged                  internal: a worker was lost in a step that had its values; the step is made again
    SharesUneven                    internal: a step has gathered from batches of several sizes; it is made again
"""

from __future__ import annotations


class ElasticFlowError(Exception):
    """Base class of every error that a user may see."""


class UsageError(ElasticFlowError, ValueError):
    """A setting or an input is wrong; the message says what was expected."""


class UnsupportedError(UsageError):
    """A feature of the host framework that cannot be kept elastic; the message names what to use instead."""


class CallMismatch(UsageError):
    """Workers are in different calls that exchange values between them; all of them raise this there."""


class MixedImportsError(UsageError):
    """`lightning.pytorch` and `pytorch_lightning` are two class trees; one run may use only one of them."""


class MembershipError(ElasticFlowError):
    """A peer, the coordinator or the network failed, and recovery is not possible."""


class CoordinatorLost(MembershipError):
    """The connection to the coordinator ended while a new view was needed."""


class Evicted(MembershipError):
    """The coordinator removed this worker (it was silent for too long); the others continued without it."""


class JobFailed(MembershipError):
    """The user's code has raised an exception in some worker; the message names worker, node and exception."""


class CannotJoin(MembershipError):
    """A newcomer cannot load the others' state; they continue without it. Its cause says why."""


class AuthenticationError(MembershipError):
    """The job token is missing, or differs from the coordinator's; or the coordinator is that of another job."""


class ClusterFailed(ElasticFlowError):
    """The API server of Kubernetes cannot be reached, or has failed. Trying again may help."""


class ClusterAway(ClusterFailed):
    """The API server does not answer, or has too much to do to answer. That concerns all calls."""


class ClusterNotFound(ClusterFailed):
    """The cluster has no such object."""


class ClusterConflict(ClusterFailed):
    """Somebody has changed the object since it was read, or the quota that it counts for. Nothing was written."""


class ClusterExists(ClusterConflict):
    """The name is taken."""


class ClusterExpired(ClusterFailed):
    """The API server does not remember the version that it was asked for, so what is read in parts is read anew."""


class ClusterRefused(ClusterFailed):
    """The cluster does not allow that, or the object is wrong; the message is the cluster's own."""


class DataWorkersLost(ElasticFlowError, RuntimeError):
    """The processes of a DataLoader have died repeatedly. This is not an exception of the user's code."""


class ThreadFailed(ElasticFlowError):
    """A thread of ElasticFlow has ended by an error, its cause: a defect, or a lack of memory, say.

    Those who wait for the thread raise this. The message says what the thread does.
    """


class NewerFormat(UsageError):
    """A newer version of ElasticFlow has written this; this version must neither guess nor overwrite."""


class StorageError(ElasticFlowError):
    """An error of the checkpoint store or of its contents."""


class StorageFailed(StorageError):
    """The store did not do what it was asked to do; the message says why. A retry may help."""


class NotFound(StorageFailed):
    """The store has nothing under this name."""


class StorageRefused(StorageFailed):
    """The store lacks a right, or is read-only, or its path leads through a file. Somebody must change that."""


class AlreadyExists(StorageError):
    """The store has something under this name, and it is not ours."""


class InvalidCheckpoint(StorageError):
    """A checkpoint that must not be used; the message says what is wrong with it."""


class ShareMissing(StorageError):
    """A worker has not written its part of a checkpoint; the message says who, and why."""


class Fenced(StorageError):
    """Other workers have continued without this writer, so it must not publish.

    Attributes:
        final: A newer start of the job has taken over: nothing more of this one will be published. Otherwise only
            what older generations wrote is refused.
    """

    def __init__(self, message: str, *, final: bool) -> None:
        super().__init__(message)
        self.final = final


class ProtocolError(ElasticFlowError):
    """A message or an event that the protocol does not allow in this state."""


class GroupBroken(Exception):
    """The process group of the current view is dead. Only `Session` catches this."""


class JobFinished(Exception):
    """The job has ended, so there is nothing to join."""


class TrainingOver(Exception):
    """The members are in a later training of the program than the one that this newcomer waits to join."""


class Left(Exception):
    """This worker asked to leave, and the new view is without it.

    Args:
        reason: Why.
        last: The new view is without anybody.

    Attributes:
        status: Exit status with which the process is to end.
    """

    status = 0

    def __init__(self, reason: str, *, last: bool = False) -> None:
        super().__init__(reason)
        self.last = last


class SharesUneven(BaseException):
    """A step has gathered from batches of different sizes, so all workers repeat it with filled-up ones.

    All members raise it at the same collective, as each sees the shapes of all.
    """


class MembersChanged(BaseException):
    """A worker was lost in a step that has exchanged values with it, so all others repeat the step.

    All members raise it at the same collective. It is none of the exceptions that the code of a step might catch.
    """
