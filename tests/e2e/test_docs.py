"""Every command and every program of the pages in docs/, run for real."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.pages import ROOT, blocks, run_block, run_program, service

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.harness import Up

pytestmark = pytest.mark.timeout(400)

PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
CONSOLES = [(page, number, block) for page in PAGES for number, block in enumerate(blocks(page, "console"))]
PROGRAMS = [(page, number, block) for page in PAGES for number, block in enumerate(blocks(page, "python"))]


def test_there_are_pages_with_commands_and_programs() -> None:
    assert {page for page, *_ in CONSOLES} == {f"docs/{name}.md" for name in ("failures", "operating", "tuning")}
    assert {page for page, *_ in PROGRAMS} == {f"docs/{name}.md" for name in ("clients", "wire")}


@pytest.mark.parametrize("block", [pytest.param(block, id=f"{page}-{number}") for page, number, block in CONSOLES])
def test_commands_run(fleet: Up, block: str) -> None:
    run_block(block, fleet)


@pytest.fixture(scope="module")
def batch_worker(fleet: Up, batches: Path) -> Iterator[None]:
    """Runs the fleet's batches."""
    where = f"--batches {batches} --redis {fleet.redis} --target {fleet.target}"
    settings = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with service(f"octavo batch worker {where}", settings):
        yield


@pytest.mark.usefixtures("batch_worker")
@pytest.mark.parametrize("program", [pytest.param(block, id=f"{page}-{number}") for page, number, block in PROGRAMS])
def test_programs_run_and_print(fleet: Up, program: str) -> None:
    assert run_program(program, fleet).strip()


def test_by_hand_one_gateway_alone_is_enough(fleet: Up) -> None:
    """Where a reader runs one, nobody is at the second one's address."""
    (program,) = (block for page, _, block in PROGRAMS if page == "docs/wire.md" and ".Attach(" in block)
    whole = run_program(program, fleet)
    assert "127.0.0.1:50052" in program
    assert run_program(program.replace("127.0.0.1:50052", "127.0.0.1:1"), fleet) == whole != "\n"
