"""Which setting `octavo tune` proposes, by one rule, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.tune_pool import WORN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NOISE: Final = 0.02
"""What is faster by less isn't faster."""


def propose(measured: Sequence[dict[str, Any]], most_unused: float) -> dict[str, Any]:
    """The setting for a worker, with the reason.

    Only a worn pool counts, for that is where a worker spends its life. A setting is faster if it takes less time than
    the smallest blocks without runs by more than `NOISE`, and some less in three of four rounds. Of the fastest that
    leave at most ``most_unused`` of the slots unused, the smallest blocks in the shortest runs.
    """
    worn = [each for each in measured if each["state"] == WORN]
    usual = min(worn, key=_size)
    faster = [each for each in worn if each["ratio"] < 1 - NOISE and each["ratio_p75"] < 1]
    frugal = [each for each in faster if each["unused"] <= most_unused or each["block_size"] == usual["block_size"]]
    fastest = min((each["ratio"] for each in frugal), default=1.0)
    chosen = min((each for each in frugal if each["ratio"] <= fastest * (1 + NOISE)), key=_size, default=usual)
    return {
        "block_size": chosen["block_size"],
        "block_run": chosen["block_run"],
        "reason": " ".join(_reasons(worn, faster, chosen, most_unused)),
    }


def _size(setting: dict[str, Any]) -> tuple[int, int]:
    return setting["block_size"], setting["block_run"]


def _reasons(
    worn: Sequence[dict[str, Any]], faster: Sequence[dict[str, Any]], chosen: dict[str, Any], most_unused: float
) -> Iterator[str]:
    yield (
        f"Steps take {chosen['ratio']:.3f} of the time of the smallest blocks without runs, and "
        f"{chosen['unused']:.1%} of the slots are unused."
    )
    quickest = min(worn, key=lambda each: each["ratio"])
    if quickest is chosen or quickest["ratio"] > chosen["ratio"] / (1 + NOISE):
        yield "Nothing is faster by more than noise."
    elif quickest not in faster:
        yield f"{_named(quickest)} take {quickest['ratio']:.3f}, but not in most rounds: measure again with more."
    else:
        yield (
            f"{_named(quickest)} are faster ({quickest['ratio']:.3f}), but leave {quickest['unused']:.1%} unused: "
            f"{most_unused:.0%} may be."
        )


def _named(setting: dict[str, Any]) -> str:
    return f"Blocks of {setting['block_size']} in runs of {setting['block_run']}"
