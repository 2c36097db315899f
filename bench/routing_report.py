"""What a sweep of policies looks like as a table and as a page of Markdown. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.routing_figures import shown_first_token

if TYPE_CHECKING:
    from collections.abc import Mapping

COLUMNS: Final = (
    *("scenario", "load", "policy", "requests", "refused", "unanswered", "failed", "hits"),
    *("TTFT p50", "p90", "p99", "tokens/s", "output tok/s", "predicted = found", "stolen", "busiest", "lag p99"),
)


def cells(run: Mapping[str, Any]) -> tuple[str, ...]:
    """A run's line of the table; latencies in seconds, the load generator's lag in milliseconds."""
    lag = run["lag_s"]
    return (
        str(run["scenario"]),
        f"{run['load']:g}",
        str(run["policy"]),
        str(run["requests"]),
        str(run["refused"]),
        str(run["unanswered"]),
        str(sum(run["errors"].values())),
        _percent(run["hit_rate"]),
        *(shown_first_token(run, rank) for rank in ("p50", "p90", "p99")),
        f"{run['tokens_per_s']:.0f}",
        f"{run['output_tokens_per_s']:.1f}",
        _percent(run["predicted_equal"]),
        _percent(None if run["stolen"] is None or not run["sent"] else run["stolen"] / run["sent"]),
        _percent(run["busiest"]),
        "-" if lag is None else f"{1000 * lag['p99']:.1f} ms",
    )


def title_of(results: Mapping[str, Any]) -> str:
    """What, on what, with what: two lines."""
    machine, fleet, config = results["machine"], results["fleet"], results["config"]
    threads = "" if fleet["simulated"] else f" of {fleet['threads_per_worker']} thread(s)"
    return (
        f"{config['model']}, {fleet['workers']} workers{threads} with pools of {fleet['kv_tokens']} tokens on "
        f"{fleet['device']}; {machine['cpu']}, {machine['usable_cores']} cores; {machine['date'][:10]}\n"
        f"prefixes of {config['prefix_tokens']} tokens, tails of {config['tail_tokens']}, answers of "
        f"{config['output_tokens']}; load 1 is {results['capacity_per_s']:.2f} requests/s"
    )


def markdown(results: Mapping[str, Any]) -> str:
    """The page that is kept beside the figures."""
    machine, config, fleet = results["machine"], results["config"], results["fleet"]
    how = "in a closed loop, first" if results["capacity_measured"] else "as given"
    lines = [
        "# Policies of routing, compared",
        "",
        f"`{results['command']}` on {machine['date']}: {machine['cpu']}, {machine['usable_cores']} cores "
        f"({', '.join(machine['instruction_sets'])}), {machine['memory_gib']} GiB; load average at the start "
        f"{machine['load_average'][0]}. Python {machine['python']}, torch {machine['packages']['torch']}.",
        "",
        f"{fleet['workers']} workers of `{config['model']}` on {fleet['device']}, with pools of {fleet['kv_tokens']} "
        f"tokens and at most {fleet['max_running']} sequences each, on the machine that client and gateways share. "
        f"Prompts are a prefix of {config['prefix_tokens']} tokens, drawn evenly from those of the scenario, and a "
        f"tail of {config['tail_tokens']}; answers have {config['output_tokens']}. *Ratio*: tokens of all prefixes "
        "over those of one pool. *Load*: arrivals (Poisson, the same for all policies) over what the fleet answers "
        f"without hits, {results['capacity_per_s']:.2f} requests/s ({how}). Each run has a salt of its own; "
        f"{config['fill_s']:g} s of as many requests as the fleet answers, which fill caches; {config['warm_s']:g} s "
        f"of its load that do not count and {config['seconds']:g} s that do; and up to {config['drain_s']:g} s for "
        "what has begun.",
        "",
        "TTFT is from the moment at which the client sent a request; one that was given up at the end counts with the "
        "time it had waited. `> x`: the figure lies among those, and is more than that; `-`: nothing was answered. "
        "Tokens/s are of prompts whose first token came, and of answers, while the run counted. *Hits*: share of the "
        "prompts' tokens that was found in a cache; *predicted = found*: share of the requests of which as much was "
        "found as was expected by the gateway, or by the worker that took the job. *Stolen*: share of all that was "
        "sent that a free worker took from the one that it was routed to. *Busiest*: share of the requests that went "
        "to one worker. *Lag*: how late the client sent.",
        "",
    ]
    if not results["complete"]:
        lines += ["**Interrupted: not all runs are here.**", ""]
    lines += [_row(COLUMNS), _row(["---"] * len(COLUMNS)), *(_row(cells(run)) for run in results["runs"]), ""]
    lines += [f"- {sentence}" for sentence in results["told"]]
    return "\n".join(lines) + "\n"


def _row(values: Any) -> str:
    return f"| {' | '.join(values)} |"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
