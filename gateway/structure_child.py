"""A process that tries structures for its gateway, one after another: ``python -m gateway.structure_child CPU_S``.

Compiling happens in native code, which nothing interrupts and which may run out of memory or of stack. So it is done
where dying of it harms nobody. Frames on both pipes are a length of four bytes and so much data: a Structure comes in,
the reason to refuse it goes out, empty for none. A first, empty one says that the process is ready. It ends with its
gateway, whose end of the pipe closes.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from typing import Final

from kvstore.structure import refusal
from octavo.v1 import inference_pb2

LENGTH: Final = struct.Struct("=I")
"""Before each frame."""
MEMORY_BYTES: Final = 2**30
STACK_BYTES: Final = 4 * 2**20
"""Half of what a worker's thread has, which must bear what was borne here: nesting is followed by recursion."""
NICER: Final = 5
"""Behind the gateway, and the workers of the same machine: a third of their share."""


def main(cpu_s: float) -> None:
    """Serves until the gateway closes the pipe. A structure that takes more processor time than ``cpu_s``, or too much
    memory, ends the process instead."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal reaches the whole group; the gateway drains
    refusal(inference_pb2.Structure(json_object=True))  # loads the library, which is not the first structure's time
    os.nice(NICER)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _write(b"")
    while head := sys.stdin.buffer.read(LENGTH.size):
        structure = inference_pb2.Structure.FromString(sys.stdin.buffer.read(*LENGTH.unpack(head)))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process, wherever it is
        reason = refusal(structure)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(reason.encode())


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(LENGTH.pack(len(data)) + data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
