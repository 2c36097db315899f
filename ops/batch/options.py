"""What the commands of `octavo batch` have in common."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvstore.batches import BatchStore
from kvstore.errors import KvError
from kvstore.keys import DEFAULT_NAMESPACE
from ops.config import option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LINES: Final = click.IntRange(1, 256)
"""That run at once."""
DEFAULT_REDIS: Final = "redis://127.0.0.1:6379/0"


def broker_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Which fleet."""
    for decorate in (
        option("--namespace", default=DEFAULT_NAMESPACE, help="Fleet's name within one Redis."),
        option("--redis", default=DEFAULT_REDIS, help="URL of the fleet's broker."),
    ):
        function = decorate(function)
    return function


def folder_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where the files are."""
    kind = click.Path(path_type=Path, file_okay=False)
    text = "Folder of batches, which whoever submits shares with the workers of batches."
    return option("--batches", type=kind, required=True, help=text)(function)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@contextmanager
def opened(redis: str, namespace: str) -> Iterator[BatchStore]:
    """The fleet's batches; failures are the command's."""
    from gateway.batch.batches import BatchStateError, BatchUnknown
    from gateway.batch.lines import FileError

    try:
        store = BatchStore(redis, namespace)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    try:
        yield store
    except FileError as error:
        raise click.ClickException(f"the file is refused, and nothing of it was accepted\n{error}") from error
    except BatchUnknown as error:
        raise click.ClickException(f"{error}; `octavo batch list` shows those that are known") from error
    except (KvError, BatchStateError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{error.filename or 'file'}: {error.strerror or error}") from error
    finally:
        store.close()
