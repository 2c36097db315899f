"""What a result says about where it comes from."""

from __future__ import annotations

from datetime import datetime
from importlib.metadata import version

from bench.machine import cpu_facts, describe_machine, package_version

CPUINFO = """processor\t: 0
model name\t: Example CPU @ 2.0GHz
flags\t\t: fpu avx2 fma avx512f amx_int8 avx512_bf16

processor\t: 1
model name\t: Another
flags\t\t: fpu
"""


def test_cpu_facts_come_from_the_first_processor() -> None:
    assert cpu_facts(CPUINFO) == {
        "model": "Example CPU @ 2.0GHz",
        "sets": ["avx2", "fma", "avx512f", "avx512_bf16", "amx_int8"],
    }
    assert cpu_facts("") == {"model": "", "sets": []}
    assert cpu_facts("Features\t: asimd i8mm")["sets"] == ["asimd", "i8mm"]


def test_describe_machine() -> None:
    facts = describe_machine()
    assert facts["cpu"]
    assert facts["usable_cores"] >= 1
    assert facts["packages"]["torch"] == version("torch")
    assert datetime.fromisoformat(facts["date"]).tzinfo is not None
    assert package_version("no-such-package") == ""
