"""Every error hpdcp raises on purpose.

    HpdcpError
    ├── InvalidArgumentError        (ValueError)         an argument, option or configuration value
    ├── StateDictError              (ValueError)         a state dict that cannot be stored exactly
    │   ├── UnsupportedTypeError    (TypeError)          a value or tensor kind that is refused
    │   └── ReplicaMismatchError                         ranks hold different values under one key
    ├── CheckpointError
    │   ├── CheckpointNotFoundError (FileNotFoundError)  nothing there at all
    │   ├── IncompleteCheckpointError (FileNotFoundError) data, but no commit
    │   ├── CheckpointExistsError   (FileExistsError)    refused, nothing changed
    │   ├── CorruptCheckpointError                       a file that is damaged, truncated or not ours
    │   ├── UnsupportedFormatError                       written by a newer major version
    │   ├── CheckpointReplacedError                      replaced by another save while being read
    │   ├── SupersededError                              a newer attempt took this save's folder
    │   └── CommitUncertainError                         the store failed while publishing; nothing was removed
    ├── LoadMismatchError                                what is wanted and what is stored do not fit
    │   ├── MissingKeysError        (KeyError)
    │   ├── ShapeMismatchError      (ValueError)
    │   ├── CoverageError           (ValueError)
    │   ├── DtypeMismatchError      (TypeError)
    │   └── WorldSizeError          (ValueError)         PerRank state at another world size
    ├── UnsafePickleError                                pickled bytes, and allow_pickle is off
    ├── NotSupportedError           (NotImplementedError) a capability that is not there
    ├── StorageError                (OSError)            a store that cannot do what was asked
    │   ├── KeyNotFoundError        (FileNotFoundError)
    │   ├── KeyExistsError          (FileExistsError)
    │   └── KeyTruncatedError       (CorruptCheckpointError)
    ├── WaitTimeoutError            (TimeoutError)       a wait for a save that goes on
    ├── WorkerDiedError             (RuntimeError)       the background worker ended before its save did
    └── RankFailedError             (RuntimeError)       a rank failed in a step all share; carries the causes
        └── PeerLostError                                a rank died or fell silent in such a step

Every one is made from a single message, so that an error can travel to other ranks as its class name and its
text (`rebuild`), and none needs pickle.
"""

from __future__ import annotations

from hpdcp._base._secrets import scrubbed


class HpdcpError(Exception):
    """Base of every error that hpdcp raises on purpose; made from one message."""

    def __str__(self) -> str:
        # KeyError and OSError print their arguments in ways of their own; a message is a message.
        return scrubbed(str(self.args[0])) if self.args else ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class InvalidArgumentError(HpdcpError, ValueError):
    """An argument, an option or a configuration value that cannot be used."""


class StateDictError(HpdcpError, ValueError):
    """A state dict that cannot be stored so that it comes back exactly."""


class UnsupportedTypeError(StateDictError, TypeError):
    """A value, tensor kind or placement that hpdcp refuses to store or to fill."""


class ReplicaMismatchError(StateDictError):
    """Several ranks hold different values under one key."""


class CheckpointError(HpdcpError):
    """Something about a checkpoint on storage."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The location holds no checkpoint and no trace of one."""


class IncompleteCheckpointError(CheckpointError, FileNotFoundError):
    """Data files without a commit, or a set of rank metadata that is not one whole save."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """The folder already holds a checkpoint that this save must not touch; nothing was changed."""


class CorruptCheckpointError(CheckpointError):
    """A file of the checkpoint is damaged, truncated, missing or belongs to something else."""


class UnsupportedFormatError(CheckpointError):
    """The checkpoint was written in a format version this hpdcp cannot read."""


class CheckpointReplacedError(CheckpointError):
    """Another save replaced the checkpoint while it was being read."""


class SupersededError(CheckpointError):
    """A newer attempt leased the folder; this one published nothing."""


class CommitUncertainError(CheckpointError):
    """The store failed in the very step of publishing: the old or the new checkpoint loads, and no file was removed."""


class LoadMismatchError(HpdcpError):
    """What the state dict wants and what the checkpoint holds do not fit."""


class MissingKeysError(LoadMismatchError, KeyError):
    """Keys are wanted that the checkpoint does not hold."""


class ShapeMismatchError(LoadMismatchError, ValueError):
    """A global shape (or a kind: tensor against object) differs."""


class CoverageError(LoadMismatchError, ValueError):
    """The stored chunks leave part of a wanted box uncovered."""


class DtypeMismatchError(LoadMismatchError, TypeError):
    """A dtype differs and casting is not allowed."""


class WorldSizeError(LoadMismatchError, ValueError):
    """Per-rank state was stored by another number of ranks."""


class UnsafePickleError(HpdcpError):
    """An object can only be loaded by running code from the checkpoint, and that is not allowed."""


class NotSupportedError(HpdcpError, NotImplementedError):
    """A capability that this version, backend or layout does not have."""


class StorageError(HpdcpError, OSError):
    """A store could not do what was asked; the message names the key."""

    may_be_done: bool = False
    """Whether the store may do it all the same, now or later: an answer was lost, or a gateway did not wait for it."""


class KeyNotFoundError(StorageError, FileNotFoundError):
    """The store holds nothing under the key."""


class KeyExistsError(StorageError, FileExistsError):
    """The key is taken, and was to be created; what is there was not touched."""


class KeyChangedError(StorageError):
    """The key does not hold what it was expected to hold, and was to be replaced only then; it was not touched."""


class KeyTruncatedError(CorruptCheckpointError, StorageError):
    """The key holds fewer bytes than the range that was asked of it."""


class WaitTimeoutError(HpdcpError, TimeoutError):
    """A wait took longer than it was to; what was waited for goes on."""


class WorkerDiedError(HpdcpError, RuntimeError):
    """The background worker ended, or failed in a way that hpdcp has no class for, before its save was published."""


class RankFailedError(HpdcpError, RuntimeError):
    """One or more ranks failed in a step all ranks share; the message names each rank and its cause."""

    causes: tuple[tuple[int, str], ...] = ()
    """(rank, message) of each rank that failed, where they are known."""


class PeerLostError(RankFailedError):
    """Another rank died, or fell silent for longer than the process group's timeout."""


def rebuild(class_name: str, message: str) -> HpdcpError:
    """An error of this module's class `class_name` with `message`; RankFailedError for any other class."""
    found = globals().get(class_name)
    if isinstance(found, type) and issubclass(found, HpdcpError):
        return found(message)
    return RankFailedError(message)
