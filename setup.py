"""Builds the native kernels, one library for each level of instructions; see ``worker.kernels.native``.

All are optional: where there is no compiler, or it is too old for a level, the installation goes on without.
"""

import hashlib
import platform
from pathlib import Path

from setuptools import Extension, setup

SOURCE = Path("worker/kernels/native/src")
DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCE.iterdir()))).hexdigest()
COMMON = [
    f'-DOCTAVO_SOURCES="{DIGEST}"',
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-pthread",
]
COMMON += ["-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # the last two are in its own headers
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
BF16 = [*AVX512, "-mavx512vnni", "-mavx512bf16"]
AMX = [*BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"]

LEVELS = {"portable": []}
if platform.machine() in {"x86_64", "AMD64"}:
    LEVELS |= {"avx2": AVX2, "avx512": AVX512, "avx512_bf16": BF16, "amx": AMX}

setup(
    ext_modules=[
        Extension(
            f"worker.kernels.native.{level}",
            sources=[str(SOURCE / "kernels.cpp")],
            depends=[str(path) for path in sorted(SOURCE.glob("*.h"))],
            extra_compile_args=[*COMMON, *flags],
            extra_link_args=["-pthread"],
            optional=True,
        )
        for level, flags in LEVELS.items()
    ]
)
