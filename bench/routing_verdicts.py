"""What the figures of runs say of policies, in ratios and in sentences. Pure: no clock, no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

OURS: Final = "prefix"
THEIRS: Final = "least-loaded"
AIM_RATIO: Final = 2.0
"""Working set over pool at which the aims for TTFT and throughput count."""
AIM_FIRST_TOKEN: Final = 1 / 3
AIM_THROUGHPUT: Final = 1.5
AIM_WORSE: Final = 0.05
"""By so much may a figure be worse than least-loaded's anywhere."""
NOTHING: Final = "nothing was answered: raise --drain or --seconds"
_ALL: Final = "; both answered all that came"


def versus(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Prefix against least-loaded, for every load that both have run and answered some of: TTFT p90 and throughput, as
    ratios. Where both have answered all that came (`all_answered`), throughput is what came, and tells nothing of them.

    `first_token_mark`: `>` or `<` where the ratio is more or less than what is there, since one of the two lies among
    those who were given up. Where both do there is no ratio."""
    found = {(run["scenario"], run["load"], run["policy"]): run for run in runs if run["answered"]}
    ratios = []
    for (name, load, policy), ours in found.items():
        theirs = found.get((name, load, THEIRS))
        if policy != OURS or theirs is None:
            continue
        p90, mark = _first_token(ours, theirs)
        ratios.append(
            {
                "scenario": name,
                "load": load,
                "first_token_p90": p90,
                "first_token_mark": mark,
                "tokens_per_s": _over(ours["tokens_per_s"], theirs["tokens_per_s"]),
                "all_answered": all(run["answered"] == run["requests"] for run in (ours, theirs)),
            }
        )
    return ratios


def told_aims(ratios: Sequence[Mapping[str, Any]]) -> list[str]:
    """What has an aim, in sentences; none without both policies."""
    told = [
        f"Where the working set is {AIM_RATIO:g} pools, at load {each['load']:g}: TTFT p90 is "
        f"{_ratio(each)} of least-loaded's (the aim is at most {AIM_FIRST_TOKEN:.2f}), throughput "
        f"{_times(each['tokens_per_s'])} (at least {AIM_THROUGHPUT:g}{_ALL if each['all_answered'] else ''})."
        for each in ratios
        if each["scenario"] == f"ratio {AIM_RATIO:g}"
    ]
    slower = [each for each in ratios if each["first_token_p90"] is not None]
    if slower:
        worst = max(slower, key=lambda each: float(each["first_token_p90"]))
        told.append(
            f"Against least-loaded, TTFT p90 is at worst {_ratio(worst)} ({_where(worst)}; the aim "
            f"is at most {1 + AIM_WORSE:.2f})."
        )
    if unknown := len(ratios) - len(slower):
        told.append(f"At {unknown} of {len(ratios)} loads both p90 lie among the unanswered, and no ratio is known.")
    fewer = [each for each in ratios if each["tokens_per_s"] is not None and not each["all_answered"]]
    if fewer:
        worst = min(fewer, key=lambda each: float(each["tokens_per_s"]))
        told.append(
            f"Where not all was answered, throughput is at worst {_times(worst['tokens_per_s'])} of least-loaded's "
            f"({_where(worst)}; the aim is at least {1 - AIM_WORSE:.2f})."
        )
    return told


def nothing_answered(runs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are runs, and none has an answer."""
    return bool(runs) and not any(run["answered"] for run in runs)


def told_unanswered(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Runs that waited for nothing, in a sentence; none where each has an answer, or had nothing to wait for."""
    silent = [run for run in runs if run["unanswered"] and not run["answered"]]
    if not silent:
        return []
    if nothing_answered(runs):
        return [f"{NOTHING.capitalize()}."]
    places = "; ".join(f"{run['policy']}, {_where(run)}" for run in silent)
    return [f"Of {len(silent)} of {len(runs)} runs {NOTHING} ({places})."]


def told_lag(runs: Iterable[Mapping[str, Any]]) -> str:
    """How late the load generator was, at worst."""
    late = [run for run in runs if run["lag_s"] is not None]
    if not late:
        return "Nothing was sent while it counted: raise --seconds."
    worst = max(late, key=lambda run: float(run["lag_s"]["p99"]))
    busiest = max(late, key=lambda run: float(run["client_cpu"]))
    return (
        f"The load generator sent at most {1000 * worst['lag_s']['p99']:.1f} ms late (p99 of the worst run: "
        f"{worst['policy']}, {_where(worst)}; its latest {1000 * worst['lag_s']['max']:.1f} ms) and took at most "
        f"{busiest['client_cpu']:.0%} of a core."
    )


def _first_token(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[float | None, str]:
    """The ratio of TTFT p90, and its mark."""
    more, less = ("p90" in run["first_token_at_least"] for run in (ours, theirs))
    if (more and less) or ours["first_token_s"] is None or theirs["first_token_s"] is None:
        return None, ""
    ratio = _over(float(ours["first_token_s"]["p90"]), float(theirs["first_token_s"]["p90"]))
    return ratio, ">" if more else "<" if less else ""


def _ratio(each: Mapping[str, Any]) -> str:
    return f"{each['first_token_mark']} {_times(each['first_token_p90'])}".lstrip()


def _over(ours: float, theirs: float) -> float | None:
    return ours / theirs if theirs else None


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _where(each: Mapping[str, Any]) -> str:
    return f"{each['scenario']}, load {each['load']:g}"
