"""Imports go one way, and the cheap entries stay cheap.

The layers below are the arrows of the design: a module may import its own layer and those under
it. A new module has to be placed here, which is the moment to think about where it belongs.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Lowest first. A name stands for the module and for everything inside the package of that name.
LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(layer.split())
    for layer in (
        "kvfs.errors kvfs.periodic kvfs.store_path kvfs.filesystems kvfs.forking",
        "kvfs.chain kvfs.keys kvfs.layout kvfs.presets kvfs.geometry",
        "kvfs.arena kvfs.backend kvfs.bodies kvfs.chain_entries kvfs.frames kvfs.record"
        " kvfs.slot_entries",
        "kvfs.segment kvfs.journal kvfs.namespace kvfs.plan kvfs.config",
        "kvfs.index",
        "kvfs.catalog kvfs.local kvfs.scan kvfs.follow kvfs.fetch kvfs.removal kvfs.segment_writer"
        " kvfs.publisher kvfs.under_way kvfs.writer kvfs.put kvfs.renewal kvfs.limits kvfs.usage"
        " kvfs.forgetting kvfs.notices",
        "kvfs.store kvfs.gc kvfs.repair kvfs.state kvfs.systemd",
        "kvfs.fetcher kvfs.peers",
        "kvfs.vfs kvfs.sim kvfs.bench kvfs.explain",
        "kvfs.mount kvfs.serve kvfs.connectors kvfs.gpu",
        "kvfs.cli kvfs.testing kvfs.demo kvfs.__main__",
    )
)

# Who alone may import what. "numpy" is missing: it may be used anywhere, but inside functions.
OWNERS = {
    "click": {"kvfs.cli", "kvfs.testing"},
    "cuda": {"kvfs.gpu"},
    "deepinfer": {"kvfs.connectors"},
    "hypercorn": {"kvfs.peers"},
    "lmdb": {"kvfs.bench", "kvfs.index"},
    "pyfuse3": {"kvfs.mount"},
    "sglang": {"kvfs.bench", "kvfs.connectors"},
    "torch": {"kvfs.bench", "kvfs.gpu", "kvfs.connectors"},
    "transformers": {"kvfs.connectors"},
    "triton": {"kvfs.gpu"},
    "vllm": {"kvfs.connectors"},
    "trio": {"kvfs.fetcher", "kvfs.mount", "kvfs.peers", "kvfs.testing"},
}
HEAVY = {
    "click", "hypercorn", "lmdb", "numpy", "pyfuse3", "sglang", "torch", "transformers", "trio",
    "vllm",
}  # fmt: skip
# The storage is reached through the backend, so that faults can be injected in one place.
# The index lies on a local disk and takes care of its own files; arena and fetcher use memory;
# benchmarks also measure what the file system does without kvfs.
STORAGE_USERS = {
    "kvfs.arena", "kvfs.backend", "kvfs.bench", "kvfs.cli", "kvfs.fetcher", "kvfs.index",
    "kvfs.state", "kvfs.testing",
}  # fmt: skip
STORAGE_CALLS = {"pread", "preadv", "pwrite", "pwritev", "fdatasync", "fsync", "posix_fallocate"}


def sources() -> Iterator[tuple[str, ast.Module]]:
    """(module name, syntax tree) of every module of the package."""
    for top, directory in {"kvfs": "kvfs", "kvfs.cli": "cli", "kvfs.gpu": "gpu"}.items():
        for path in sorted((ROOT / directory).rglob("*.py")):
            parts = path.relative_to(ROOT / directory).with_suffix("").parts
            name = ".".join((top, *parts)).removesuffix(".__init__")
            yield name, ast.parse(path.read_text(), filename=str(path))


MODULES = dict(sources())


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from runtime_nodes(node)


def top_level_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """What is executed when the module is imported: no function bodies."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from top_level_nodes(node)


def imported(nodes: Iterator[ast.AST]) -> set[str]:
    """Names of the imported modules; `from kvfs import chain` counts as kvfs.chain."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & MODULES.keys()) or {node.module}
    return found


def unit(module: str) -> str:
    """The part of a module's name that LAYERS speaks about."""
    return ".".join(module.split(".")[:2])


def layer(module: str) -> int:
    for number, names in enumerate(LAYERS):
        if unit(module) in names:
            return number
    raise AssertionError(f"{module} has no layer yet: place {unit(module)} in LAYERS")


@pytest.mark.parametrize("module", [m for m in MODULES if m != "kvfs"])
def test_arrows_point_down(module: str) -> None:
    own = layer(module)
    ours = {n for n in imported(runtime_nodes(MODULES[module])) if n.startswith("kvfs.")}
    upward = {name for name in ours if layer(name) > own}
    assert not upward, f"{module} (layer {own}) imports what is built on it"


def test_no_cycles() -> None:
    graph = {
        name: {
            n for n in imported(top_level_nodes(tree)) if n in MODULES and n not in ("kvfs", name)
        }
        for name, tree in MODULES.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("package", OWNERS)
def test_owners(package: str) -> None:
    users = {
        module
        for module, tree in MODULES.items()
        if package in {name.partition(".")[0] for name in imported(runtime_nodes(tree))}
    }
    strangers = {module for module in users if unit(module) not in OWNERS[package]}
    assert not strangers, f"{package} is for {', '.join(sorted(OWNERS[package]))} only"


def test_no_relative_imports() -> None:
    """cli/ and gpu/ are reached by two paths; only absolute names mean one module."""
    users = {
        module
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    }
    assert not users


def test_storage_is_reached_through_the_backend() -> None:
    users = {
        f"{module}:{node.lineno} os.{node.attr}"
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in STORAGE_CALLS
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and unit(module) not in STORAGE_USERS
    }
    assert not users


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    return set(done.stdout.split())


def test_import_kvfs_is_cheap() -> None:
    assert not loaded_by("import kvfs") & HEAVY


def test_the_help_of_the_command_line_is_cheap() -> None:
    assert not loaded_by("import kvfs.cli.main") & (HEAVY - {"click"})


def test_the_core_needs_neither_numpy_nor_an_engine() -> None:
    core = [n for n in MODULES if n != "kvfs" and layer(n) <= layer("kvfs.store")]
    statement = "; ".join(f"import {name}" for name in core)
    assert not loaded_by(statement) & (HEAVY - {"lmdb"})
