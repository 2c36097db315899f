"""Why a worker ends other than by being told to.

::

    WorkerError
    ├── LeaseLostError      another process took this worker's id
    ├── StoppedError        told to stop in the middle of what nothing ends
    └── StuckError          a step that hangs, or a drain that does not end
"""

from __future__ import annotations


class WorkerError(RuntimeError):
    """The worker can't go on."""


class LeaseLostError(WorkerError):
    """Another process took this worker's id: nothing that this one writes would be accepted."""


class StoppedError(WorkerError):
    """The worker was told to stop while it loaded its model, or did so in the middle of a long step: nothing ends these
    but leaving. No fault of its own."""


class StuckError(WorkerError):
    """A part of the worker does not end: a step that hangs, or a drain with Redis away. Only leaving helps."""
