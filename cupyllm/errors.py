"""The exceptions a user can meet.

Each message is one line and names what failed, what was found, what was expected and what to do about it. Commands
print it and exit with status 2; every other exception is a bug of ours and keeps its traceback. SimError
(sim/report.py), what the simulator found in a kernel, has a line a finding and exit status 1.
"""

from __future__ import annotations


class CupyllmError(Exception):
    """Base of every error whose cause is the input, the machine or the options, not our code."""


class CheckpointError(CupyllmError):
    """A checkpoint directory, index, shard, tensor or config cannot be used."""


class ConfigError(CheckpointError):
    """config.json is missing, malformed, or asks for something that is not supported."""


class BackendError(CupyllmError):
    """The requested backend, device, driver or kernel compiler cannot be had."""


class OutOfMemory(CupyllmError):
    """GPU or host memory does not suffice; says how much was needed and how much there is."""


class InputError(CupyllmError, ValueError):
    """Prompts, ids, labels, shapes or options that the operation refuses."""


class StorageError(CupyllmError):
    """A file or cache cannot be written: read-only, full disk, no permission."""
