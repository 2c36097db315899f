"""`octavo bench replay`: options and what is printed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from bench.params import PoliciesParam
from bench.replay_records import NoRecords, read_records, records_from_redis, write_records
from kvstore.errors import KvError
from ops.config import option
from ops.console import emit_json, note
from ops.show import print_table


@click.command("replay")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=False)
@click.option("--redis", default="", help="URL of a fleet's broker, which keeps the last 10,000 decisions or so.")
@option("--namespace", default="default", help="With --redis: the fleet's name within it.")
@click.option("--policies", type=PoliciesParam(), default=PoliciesParam.ALL, show_default=True, help="To decide by.")
@click.option("--save", type=click.Path(path_type=Path, dir_okay=False), help="Write the decisions to a file, too.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of what chance decides.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def replay(
    file: Path | None,
    *,
    redis: str,
    namespace: str,
    policies: tuple[str, ...],
    save: Path | None,
    seed: int,
    as_json: bool,
) -> None:
    """Make recorded decisions of gateways again, by other policies.

    FILE has one decision a line, as `octavo bench routing --routes` and --save write it. Each is made again from what
    it was made from. What would have become of the fleet is not asked: loads and caches stay as they were recorded.

    \b
    made by, again by  the policy that decided, and the one that decides now
    other choice       decisions that now go elsewhere; between equals it is none.
                       random: what is expected, (n-1)/n among n workers
    cost               mean of the choices, in seconds, by today's cost function
    until first token  the part of it before the first token: waiting, prompt, pages
    cached             share of the prompts' tokens that was expected in caches
    made, again        of the recorded choices, and of those made now
    """
    from bench import replay as replayed
    from gateway.router import Policy

    if (file is None) == (not redis):
        raise click.UsageError("give either a FILE or --redis URL")
    try:
        records = read_records(file) if file is not None else asyncio.run(records_from_redis(redis, namespace))
        if save is not None:
            write_records(records, save)
    except (KvError, NoRecords, OSError) as error:
        raise click.ClickException(str(error)) from error
    found = replayed.replay(records, [Policy(policy) for policy in policies], seed)
    if not found:
        raise click.ClickException("there are no decisions")
    note(f"{len(records)} decisions")
    if as_json:
        emit_json(replayed.replay_figures(found))
        return
    print_table(replayed.REPLAY_COLUMNS, [replayed.replay_cells(each) for each in found])
