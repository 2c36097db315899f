"""Bytes and operations against sums made by hand, and figures beside known ceilings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.kernels_ceiling import ideal_shape
from bench.kernels_table import (
    KERNELS_COLUMNS,
    Ceilings,
    Peak,
    Sampled,
    Stepped,
    Timed,
    in_table,
    kernels_cells,
    kind_of,
    peaks_needed,
    sampled_line,
    step_lines,
    told,
)
from bench.kernels_work import Load, Work, sampling_work, work_of
from worker.model.decoder.config import LayerShape
from worker.model.decoder.native import SECTIONS

FULL = LayerShape(window=0, rope=0)
SHAPE = replace(
    ideal_shape(128),
    vocab=1000,
    hidden=100,
    heads=4,
    kv_heads=2,
    head_dim=10,
    intermediate=30,
    rotary_dim=8,
    layers=(FULL, FULL, FULL),
)
"""Queries are 40 numbers of a row, keys and values 20 each."""
DECODE = Load(sequences=5, new=1, context=6)
PROMPT = Load(sequences=1, new=4, context=2)


def test_steps_have_names() -> None:
    assert [DECODE.name, PROMPT.name, Load(1, 9, 0).name] == ["decode 5 at 6", "prompt of 4 after 2", "prompt of 9"]


def test_keys_that_a_step_sees() -> None:
    assert (DECODE.keys_seen(0), DECODE.keys_read(0)) == (7, 7)
    assert (DECODE.keys_seen(3), DECODE.keys_read(3)) == (3, 3)
    assert (PROMPT.keys_seen(0), PROMPT.keys_read(0)) == (3 + 4 + 5 + 6, 6)
    assert (PROMPT.keys_seen(4), PROMPT.keys_read(4)) == (3 + 4 + 4 + 4, 6)
    assert (PROMPT.keys_seen(2), PROMPT.keys_read(2)) == (2 + 2 + 2 + 2, 5)


@pytest.mark.parametrize(
    ("section", "dtype", "work"),
    [
        ("prepare", "bfloat16", Work(0, 0)),
        ("embed", "bfloat16", Work(5 * 100 * (2 + 4), 5 * 100)),
        ("norm", "bfloat16", Work((6 * 5 + 5) * 100 * (4 + 2), (6 * 5 + 5) * 100 * 4)),
        ("norm", "float32", Work((6 * 5 + 5) * 100 * (4 + 4), (6 * 5 + 5) * 100 * 4)),
        ("halve", "bfloat16", Work(0, 0)),
        ("halve", "int8", Work(3 * 5 * ((100 + 40 + 100 + 30) * (2 + 2) + 4 * 4), 0)),
        ("qkv", "bfloat16", Work(3 * (80 * 100 * 2 + 5 * (100 * 2 + 80 * 4)), 3 * 2 * 5 * 80 * 100)),
        ("qkv", "int8", Work(3 * (80 * 100 + 80 * 4 + 5 * (100 * 2 + 80 * 4)), 3 * 2 * 5 * 80 * 100)),
        ("write", "bfloat16", Work(3 * 5 * (40 + 40) * (4 + 2), 3 * 5 * 3 * 6 * 8)),
        ("attend", "bfloat16", Work(3 * 5 * (7 * 40 + 80) * 2, 3 * 5 * 7 * 4 * 40)),
        ("attend", "float32", Work(3 * 5 * (7 * 40 + 80) * 4, 3 * 5 * 7 * 4 * 40)),
        ("output", "float32", Work(3 * (40 * 100 * 4 + 5 * (40 * 4 + 100 * 8)), 3 * 2 * 5 * 40 * 100)),
        ("gate_up", "bfloat16", Work(3 * (60 * 100 * 2 + 5 * (100 * 2 + 30 * 2)), 3 * 2 * 5 * 60 * 100)),
        ("down", "bfloat16", Work(3 * (30 * 100 * 2 + 5 * (30 * 2 + 100 * 8)), 3 * 2 * 5 * 30 * 100)),
        ("head", "int8", Work(1000 * 100 * 2 + 5 * (100 * 2 + 1000 * 4), 2 * 5 * 1000 * 100)),
    ],
)
def test_what_a_part_does(section: str, dtype: str, work: Work) -> None:
    assert work_of(section, SHAPE, DECODE, dtype) == work


def test_the_head_comes_only_after_the_last_token_of_a_prompt() -> None:
    assert work_of("head", SHAPE, PROMPT, "float32").operations == 2 * 1 * 1000 * 100
    assert work_of("qkv", SHAPE, PROMPT, "float32").operations == 3 * 2 * 4 * 80 * 100
    assert work_of("attend", SHAPE, PROMPT, "float32") == Work(3 * (6 * 40 + 4 * 80) * 4, 3 * (3 + 4 + 5 + 6) * 4 * 40)


def test_windows_norms_behind_and_of_heads_and_layers_without_rotation() -> None:
    layers = (FULL, LayerShape(window=2, rope=-1))
    shape = replace(SHAPE, layers=layers, sandwich=True, qk_norm=True)
    assert work_of("attend", shape, DECODE, "float32").operations == 5 * (7 + 2) * 4 * 40
    assert work_of("attend", shape, DECODE, "float32").bytes == 5 * ((7 + 2) * 40 + 2 * 80) * 4
    assert work_of("write", shape, DECODE, "float32").operations == 5 * (3 * 6 * 8 + 4 * 2 * (40 + 20))
    assert work_of("norm", shape, DECODE, "float32") == Work(
        (4 * 5 + 5) * 100 * (4 + 4) + 4 * 5 * 100 * 12, 4 * (8 * 5 + 5) * 100
    )


def test_every_section_of_the_kernels_is_known() -> None:
    for section in SECTIONS:
        assert work_of(section, SHAPE, DECODE, "bfloat16").bytes >= 0
    with pytest.raises(KeyError):
        work_of("sauce", SHAPE, DECODE, "bfloat16")


CEILINGS = Ceilings(1e9, {"bfloat16": Peak(4e9, "a"), "float32": Peak(1e9, "b"), "int8": Peak(8e9, "c")})


def test_the_longer_of_two_times_is_the_bound() -> None:
    assert CEILINGS.seconds(Work(1000, 3999), "bfloat16") == (1e-6, "memory")
    assert CEILINGS.seconds(Work(1000, 8000), "bfloat16") == (2e-6, "products")
    assert CEILINGS.seconds(Work(1000, 8000), "int8") == (1e-6, "memory")


def test_a_part_is_bound_by_products_of_its_own_kind() -> None:
    assert [kind_of(section, "int8") for section in ("qkv", "down", "head", "attend", "norm", "write")] == [
        *("int8", "int8", "bfloat16", "bfloat16", "float32", "float32")
    ]
    assert [kind_of(section, "bfloat16") for section in ("qkv", "head", "attend", "halve")] == [
        *("bfloat16", "bfloat16", "bfloat16", "float32")
    ]
    assert peaks_needed(["int8"]) == ["bfloat16", "float32", "int8"]
    assert peaks_needed(["float32"]) == ["float32"]


def stepped() -> Stepped:
    """Each part takes 1 ms, what is around them 5, and the whole 15."""
    parts = {section: Timed.of([0.003, 0.001, 0.0005]) for section in SECTIONS if section != "halve"}
    return Stepped(
        "bfloat16", SHAPE, DECODE, {**parts, "halve": Timed(0, 0), "call": Timed(0.005, 0.004)}, Timed.of([0.015])
    )


def test_lines_of_a_step() -> None:
    lines = step_lines(stepped(), (), CEILINGS)
    assert {line["part"] for line in lines} == {*SECTIONS, "call", "whole step"} - {"halve"}
    by_part = {line["part"]: line for line in lines}
    assert by_part["down"] == {
        "dtype": "bfloat16",
        "step": "decode 5 at 6",
        "part": "down",
        "seconds": {"median": 0.001, "least": 0.0005},
        "share_of_step": pytest.approx(1 / 15),
        "bytes": 30900,
        "operations": 90000,
        "bound_s": pytest.approx(30.9e-6),
        "bound_by": "memory",
        "ceiling": pytest.approx(0.0309),
    }
    assert by_part["call"]["seconds"] == {"median": 0.005, "least": 0.004}
    assert by_part["call"]["ceiling"] is None
    whole = by_part["whole step"]
    assert whole["bytes"] == sum(line["bytes"] for line in lines if line is not whole)
    assert whole["bound_s"] == pytest.approx(sum(line["bound_s"] for line in lines if line is not whole))
    assert whole["ceiling"] == pytest.approx(whole["bound_s"] / 0.015)
    assert [line["part"] for line in step_lines(stepped(), ("attend",), CEILINGS)] == ["attend"]


def test_cells() -> None:
    cells = [kernels_cells(line) for line in step_lines(stepped(), (), CEILINGS)]
    by_part = {row[2]: row for row in cells}
    assert by_part["down"] == (
        *("bfloat16", "decode 5 at 6", "down", "1.000", "6.7%", "0.03", "0.1", "0.0", "0.1", "memory", "3%"),
    )
    assert by_part["prepare"] == (
        *("bfloat16", "decode 5 at 6", "prepare", "1.000", "6.7%", "-", "-", "-", "-", "-", "-"),
    )
    assert all(len(row) == len(KERNELS_COLUMNS) for row in cells)
    assert in_table({"share_of_step": 0.005})
    assert not in_table({"share_of_step": 0.0049})


def test_the_sampler_reads_logits_once() -> None:
    assert sampling_work(32, 1000) == Work(128_000, 0)
    line = sampled_line(Sampled("greedy", 32, 1000, Timed(0.000256, 0.0002)), CEILINGS)
    assert (line["step"], line["part"], line["bound_by"]) == ("choose 32", "sampler, greedy", "memory")
    assert (line["ceiling"], line["share_of_step"]) == (pytest.approx(0.5), 1.0)


def test_what_is_told_beneath_the_table() -> None:
    results = {
        "machine": {"cpu": "a CPU"},
        "kernels": "avx2",
        "threads": 2,
        "config": {"read_mib": 512},
        "ceilings": {"bytes_per_s": 2.05e10, "peaks": {"int8": {"operations_per_s": 1.5e12, "by": "our down"}}},
    }
    assert told(results) == [
        "parts that take less than 0.5% of their step are in the JSON only",
        "a CPU, kernels for avx2 on 2 threads",
        "ceiling of reading: 20.5 GB/s, over 512 MiB",
        "ceiling of products in int8: 1,500 Gop/s, by our down",
    ]
