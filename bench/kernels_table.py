"""From times of parts to figures beside the machine's ceilings, and lines of a table. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from bench.kernels_work import PRODUCTS, Work, sampling_work, work_of
from bench.stats import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.kernels_work import Load
    from worker.model.decoder.config import DecoderShape

KERNELS_COLUMNS: Final = (
    *("dtype", "step", "part", "ms", "of step", "MB", "Mop", "GB/s", "Gop/s", "bound by", "of ceiling"),
)
LEAST_SHARE: Final = 0.005
"""Parts that take less of their step are not in the table."""
WHOLE: Final = "whole step"
CALL: Final = "call"
"""What of a step is not in the kernels: arrays made and numbers checked in Python."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most operations of a product that were seen in a second, and what did them."""

    operations_per_s: float
    by: str


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of one machine, with so many threads."""

    bytes_per_s: float
    """Read from memory."""
    peaks: dict[str, Peak]
    """By dtype."""

    def seconds(self, work: Work, kind: str) -> tuple[float, str]:
        """What a part takes at least if it reads from memory, and what bounds it: ``memory`` or ``products``."""
        reading, computing = work.bytes / self.bytes_per_s, work.operations / self.peaks[kind].operations_per_s
        return (reading, "memory") if reading >= computing else (computing, "products")


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of a part: the median of all turns, and the least."""

    median: float
    least: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timed:
        return cls(percentile(seconds, 50), min(seconds))


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step that was measured."""

    dtype: str
    shape: DecoderShape
    load: Load
    parts: dict[str, Timed]
    """By section, and of `CALL`."""
    whole: Timed
    """With all that is around the kernels."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens that were chosen from so many rows of logits."""

    mode: str
    rows: int
    vocab: int
    whole: Timed


def kind_of(section: str, dtype: str) -> str:
    """The dtype whose products' peak bounds a section: the head and attention are never in eight bits, and what is
    neither product nor attention is float32."""
    if section in PRODUCTS or section == "attend":
        return "bfloat16" if dtype == "int8" and section in ("head", "attend") else dtype
    return "float32"


def peaks_needed(dtypes: Sequence[str]) -> list[str]:
    """The dtypes whose peaks bound anything."""
    wanted = {*dtypes, "float32"} | ({"bfloat16"} if "int8" in dtypes else set())
    return [dtype for dtype in ("bfloat16", "float32", "int8") if dtype in wanted]


def step_lines(step: Stepped, only: Sequence[str], ceilings: Ceilings) -> list[dict[str, Any]]:
    """Of each section in ``only`` that did something; of all, if empty, then the rest and the whole step as well."""
    made, bounds = [], 0.0
    total = Work()
    for section, timed in step.parts.items():
        if section == CALL:
            continue
        work = work_of(section, step.shape, step.load, step.dtype)
        bound, by = ceilings.seconds(work, kind_of(section, step.dtype))
        total += work
        bounds += bound
        if (section in only or not only) and (work.bytes or timed.median):
            made.append(_line(step.dtype, step.load.name, section, timed, step.whole, work, bound, by))
    if only:
        return made
    return [
        *made,
        _line(step.dtype, step.load.name, CALL, step.parts[CALL], step.whole, Work(), 0.0, ""),
        _line(step.dtype, step.load.name, WHOLE, step.whole, step.whole, total, bounds, "parts"),
    ]


def sampled_line(found: Sampled, ceilings: Ceilings) -> dict[str, Any]:
    work = sampling_work(found.rows, found.vocab)
    bound, by = ceilings.seconds(work, "float32")
    return _line("float32", f"choose {found.rows}", f"sampler, {found.mode}", found.whole, found.whole, work, bound, by)


def _line(
    dtype: str, step: str, part: str, timed: Timed, whole: Timed, work: Work, bound: float, by: str
) -> dict[str, Any]:
    """``ceiling`` is the share of what the machine can do; None without anything to compare."""
    return {
        "dtype": dtype,
        "step": step,
        "part": part,
        "seconds": asdict(timed),
        "share_of_step": timed.median / whole.median,
        "bytes": work.bytes,
        "operations": work.operations,
        "bound_s": bound,
        "bound_by": by if bound else "",
        "ceiling": bound / timed.median if bound and timed.median else None,
    }


def in_table(line: dict[str, Any]) -> bool:
    """Whether a part is told to people: not if it takes next to nothing of its step."""
    share: float = line["share_of_step"]
    return share >= LEAST_SHARE


def kernels_cells(line: dict[str, Any]) -> tuple[Any, ...]:
    """A line of the table."""
    seconds = line["seconds"]["median"]

    def rate(count: int) -> str:
        return f"{count / seconds / 1e9:,.1f}" if count and seconds else "-"

    return (
        line["dtype"],
        line["step"],
        line["part"],
        f"{1000 * seconds:.3f}",
        f"{line['share_of_step']:.1%}",
        f"{line['bytes'] / 1e6:,.2f}" if line["bytes"] else "-",
        f"{line['operations'] / 1e6:,.1f}" if line["operations"] else "-",
        rate(line["bytes"]),
        rate(line["operations"]),
        line["bound_by"] or "-",
        "-" if line["ceiling"] is None else f"{line['ceiling']:.0%}",
    )


def told(results: dict[str, Any]) -> list[str]:
    """For people, beneath the table: on what, and the ceilings."""
    machine, ceilings = results["machine"], results["ceilings"]
    return [
        f"parts that take less than {LEAST_SHARE:.1%} of their step are in the JSON only",
        f"{machine['cpu']}, kernels for {results['kernels']} on {results['threads']} threads",
        f"ceiling of reading: {ceilings['bytes_per_s'] / 1e9:,.1f} GB/s, over {results['config']['read_mib']} MiB",
        *(
            f"ceiling of products in {dtype}: {one['operations_per_s'] / 1e9:,.0f} Gop/s, by {one['by']}"
            for dtype, one in ceilings["peaks"].items()
        ),
    ]
