"""What the figures were measured on: a figure without its machine says nothing."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from ops.config import usable_cores

INSTRUCTION_SETS = ("avx2", "f16c", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16")
TILE_SETS = ("amx_tile", "amx_int8", "amx_bf16")
ARM_SETS = ("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2")
PACKAGES = ("octavo", "torch", "transformers", "numpy", "grpcio")


def describe_machine() -> dict[str, Any]:
    """Hardware, software and moment. The load average tells whether others were at work, too."""
    facts = cpu_facts(Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else "")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": facts["model"] or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "instruction_sets": facts["sets"],
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": [round(each, 2) for each in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
    }


def cpu_facts(cpuinfo: str) -> dict[str, Any]:
    """Model and those instruction sets that matter here, from the text of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "model": fields.get("model name", ""),
        "sets": [name for name in (*INSTRUCTION_SETS, *TILE_SETS, *ARM_SETS) if name in flags],
    }


def package_version(name: str) -> str:
    """Empty when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
