"""Folders of results: made before a measurement begins, refused plainly when they can't be."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

from bench import output
from bench.output import NO_PLOT, results_folder, write_json, write_plot
from ops.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """A folder that nobody can make, not even an administrator."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "out"


@pytest.mark.parametrize(
    "words", [("bench",), ("bench", "kernels"), ("bench", "quality"), ("bench", "peers"), ("tune",)], ids=" ".join
)
def test_every_command_refuses_before_it_measures(words: tuple[str, ...], blocked: Path) -> None:
    """Or it would tell that there is no such model, for which a fleet would have to be started, or minutes go by."""
    ran = CliRunner().invoke(main, [*words, "--model", "nosuch", "--out", str(blocked)])
    assert ran.exit_code == 2
    assert ran.output.splitlines()[-1] == (
        f"Error: Invalid value for --out: results can't be written to {blocked}: Not a directory"
    )


def test_a_folder_is_made_with_those_above_and_left_empty(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    for _ in range(2):
        results_folder(out, "png")
        assert list(out.iterdir()) == []


def test_a_plot_that_cannot_be_drawn_is_told_first_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "find_spec", lambda _: None)
    results_folder(tmp_path, "none")
    for words in (("tune",), ("bench",), ("bench", "peers")):
        ran = CliRunner().invoke(main, [*words, "--model", "nosuch", "--out", str(tmp_path)])
        assert (ran.exit_code, ran.output) == (1, f"Error: {NO_PLOT}\n")


def test_results_are_written_whole(tmp_path: Path, blocked: Path) -> None:
    path = tmp_path / "out" / "some.json"
    for results in ({"a": 1}, [2.5]):
        write_json(results, path)
        assert json.loads(path.read_text()) == results
    assert [each.name for each in path.parent.iterdir()] == ["some.json"]
    with pytest.raises(click.ClickException, match=r"some\.json can't be written: Not a directory"):
        write_json({}, blocked / "some.json")
    with pytest.raises(TypeError):
        write_json({"a": object()}, path)
    assert json.loads(path.read_text()) == [2.5]


def test_plots_are_drawn_where_they_are_wanted(tmp_path: Path, blocked: Path) -> None:
    write_plot(lambda path: path.touch(), tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()
    with pytest.raises(click.ClickException, match=r"b\.png can't be written: Not a directory"):
        write_plot(lambda path: path.touch(), blocked / "b.png")

    def without(_: Path) -> None:
        raise ImportError("no module named matplotlib")

    with pytest.raises(click.ClickException, match="no plot without matplotlib"):
        write_plot(without, tmp_path / "c.png")
