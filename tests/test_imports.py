"""The house rules that a reader relies on: direction of imports, no cycles, small files, few public names."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import llmprof

ROOT = Path(__file__).resolve().parent.parent
GROUND = {"errors", "schema"}
ARMS = {"hooks", "extrapolate", "report"}
ROOF = {"", "cli", "__main__", "commands", "tensorboard", "integrations"}
MAY_IMPORT = {
    "errors": {"errors"},
    "schema": GROUND,
    **{arm: GROUND | {arm} for arm in ARMS},
    "judge": GROUND | {"extrapolate", "report", "judge"},
    **{room: GROUND | ARMS | ROOF for room in ROOF},
    "commands": GROUND | ARMS | ROOF | {"judge"},
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def product_files() -> dict[str, Path]:
    """Every module of the package by its import name; the two links are followed, so names are llmprof.*."""
    files = {}
    for folder in (ROOT / "llmprof", ROOT / "llmprof" / "hooks", ROOT / "llmprof" / "extrapolate"):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(part for part in parts if part != "__init__")] = path
    return files


def all_files() -> list[Path]:
    """Every Python file of the repository's own folders."""
    folders = ("llmprof", "hooks", "extrapolate", "tests", "examples", "benchmarks")
    return sorted({path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")})


FILES = product_files()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def imports(tree: ast.AST) -> Iterator[str]:
    """Names that a tree imports: `from a.b import c` gives both a.b and a.b.c."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(module: str) -> str:
    """The part of the package that a module belongs to: "schema" for llmprof.schema.profile, "" for llmprof."""
    return module.split(".")[1] if "." in module else ""


def is_type_checking(node: ast.AST) -> bool:
    """True for `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports_when_loaded(tree: ast.Module) -> set[str]:
    """Names imported when the module itself is loaded: not inside functions, not for type checkers alone."""
    body = [node for node in tree.body if not is_type_checking(node)]
    kept = [
        node for node in body if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    return {name for node in kept for name in imports(node)}


def test_the_package_is_found_through_both_links() -> None:
    assert "llmprof.schema.profile" in FILES
    assert any(name.startswith("llmprof.hooks.") for name in FILES)
    assert any(name.startswith("llmprof.extrapolate.") for name in FILES)


@pytest.mark.parametrize("module", sorted(FILES))
def test_imports_point_down(module: str) -> None:
    allowed = MAY_IMPORT[room(module)]
    names = {name for name in imports(TREES[module]) if name.startswith("llmprof.")}
    wrong = {name for name in names if (name in FILES or name.count(".") > 1) and room(name) not in allowed}
    assert not wrong, f"{module} ({room(module) or 'root'}) must not import {sorted(wrong)}"


@pytest.mark.parametrize("module", sorted(FILES))
def test_torch_and_generic_names_stay_out(module: str) -> None:
    tops = {name.split(".")[0] for name in imports(TREES[module])}
    assert not tops & {"hooks", "extrapolate"}, (
        "import llmprof.hooks and llmprof.extrapolate by their full names"
    )
    if room(module) != "hooks":
        assert "torch" not in tops, "torch is imported in hooks/ only"


def test_no_import_cycles() -> None:
    graph = {
        name: {i for i in imports_when_loaded(tree) if i in FILES} - {name} for name, tree in TREES.items()
    }
    while leaves := [name for name, needs in graph.items() if not needs]:
        for leaf in leaves:
            del graph[leaf]
        for needs in graph.values():
            needs.difference_update(leaves)
    assert not graph, f"these modules import each other in a circle: {sorted(graph)}"


@pytest.mark.parametrize("path", all_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_small_and_say_what_they_do(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert ast.get_docstring(tree), "a module opens with one or two sentences: what it turns into what"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


def test_public_names_are_few_sorted_and_real() -> None:
    assert len(llmprof.__all__) <= 12
    assert list(llmprof.__all__) == sorted(llmprof.__all__)
    for name in llmprof.__all__:
        assert getattr(llmprof, name).__name__ == name


def test_importing_llmprof_loads_neither_torch_nor_pandas_nor_a_generic_name() -> None:
    code = (
        "import sys, llmprof, llmprof.cli, llmprof.schema.store, llmprof.extrapolate.predict\n"
        "print([n for n in ('torch', 'pandas', 'hooks', 'extrapolate') if n in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert answer.stdout.strip() == "[]"


def test_the_commands_say_their_version_without_loading_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\nfrom llmprof.cli import main\nsys.exit(main(['--version']))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert answer.returncode == 0, answer.stderr
    assert llmprof.__version__ in answer.stdout
