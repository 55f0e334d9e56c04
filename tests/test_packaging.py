"""The source distribution and the wheel: built once, looked into, installed elsewhere and tested there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import llmprof
from llmprof.commands import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
TESTED_FROM_THE_WHEEL = ("test_layout.py", "test_store.py", "test_catalogue.py")


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command to its end and returns what it printed; its output is shown when it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    answer = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout
    return answer.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel built from it, of the files that git tracks (a clean clone has no others)."""
    base = tmp_path_factory.mktemp("packaging")
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout: what is packaged is what is tracked")
    source, out = base / "source", base / "dist"
    source.mkdir()
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    tracked = [name for name in names.decode().split("\0") if name and os.path.lexists(ROOT / name)]
    for name in tracked:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to((ROOT / name).readlink())
        else:
            target.write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=base)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def package_files() -> set[str]:
    """Files of the package as git tracks them, under the names that they have when installed."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    linked = {"hooks": "llmprof/hooks", "extrapolate": "llmprof/extrapolate"}
    wanted = set()
    for name in names.splitlines():
        top, _, rest = name.partition("/")
        path = f"{linked[top]}/{rest}" if top in linked else name
        if path.startswith("llmprof/") and rest and not path.endswith(".md") and (ROOT / name).is_file():
            wanted.add(path)
    return wanted - set(linked.values())


def test_the_wheel_holds_the_whole_package_and_no_generic_name(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[1]).namelist())
    assert package_files() <= names, sorted(package_files() - names)
    tops = {name.split("/")[0] for name in names}
    assert tops == {"llmprof", f"llmprof_torch-{llmprof.__version__}.dist-info"}


def test_the_wheel_says_what_it_is(built: tuple[Path, Path]) -> None:
    wheel = zipfile.ZipFile(built[1])
    info = f"llmprof_torch-{llmprof.__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert "llmprof = llmprof.cli:main" in entry_points
    assert "[tensorboard_plugins]" in entry_points


def test_the_source_distribution_holds_examples_and_changelog(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "README.md", "examples/train_llama.py"} <= names


def test_the_wheel_works_where_only_it_is_installed(built: tuple[Path, Path], tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    )
    # The dependencies are reused as a plain folder: path files in it, such as our editable one, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", built[1], cwd=tmp_path)
    origin = run(python, "-c", "import llmprof; print(llmprof.__file__)", cwd=tmp_path).strip()
    assert Path(origin).is_relative_to(site)
    assert llmprof.__version__ in run(tmp_path / "venv" / "bin" / "llmprof", "--version", cwd=tmp_path)
    tests = [ROOT / "tests" / name for name in TESTED_FROM_THE_WHEEL]
    output = run(
        python,
        "-m",
        "pytest",
        "-q",
        "-o",
        "pythonpath=",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        ROOT,
        *tests,
        cwd=tmp_path,
    )
    assert " passed" in output


def readme_tree() -> list[str]:
    """Paths that the folder tree of the README names, from the root."""
    block = (ROOT / "README.md").read_text(encoding="utf-8").split("## What is where")[1].split("```")[1]
    paths, folder = [], ""
    for line in filter(None, block.splitlines()):
        name = line.split()[0]
        if line.startswith("  "):
            paths.append(folder + name)
        else:
            folder = name
            paths.append(name)
    return paths


def test_the_tree_in_the_readme_is_the_tree() -> None:
    paths = readme_tree()
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    tops = {name.split("/")[0] for name in names.splitlines()}
    assert tops == {path.strip("/") for path in paths if "/" not in path.strip("/")}


def test_the_readme_names_every_command_and_no_other() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `llmprof (\w+)", text, flags=re.MULTILINE)) == set(COMMANDS)
    assert set(re.findall(r"^llmprof (\w+)", text, flags=re.MULTILINE)) <= set(COMMANDS)


def test_the_python_in_the_readme_names_what_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "llmprof"
            ):
                assert node.attr in llmprof.__all__
