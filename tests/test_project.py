"""The repository as a whole: links, packages, who may import what, and what is installed."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("cli", "engine", "models", "comm")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_the_folders_are_the_package_by_links() -> None:
    for folder in FOLDERS:
        link = ROOT / "lockstep" / folder
        assert link.is_symlink()
        assert link.readlink() == Path("..") / folder
        assert (ROOT / folder / "__init__.py").is_file()
    assert (ROOT / "lockstep" / "py.typed").is_file()
    assert not (ROOT / "__init__.py").exists()


def test_every_package_is_listed() -> None:
    found = {"lockstep"} | {
        "lockstep." + ".".join(path.parent.relative_to(ROOT).parts)
        for path in sources(*FOLDERS)
        if path.name == "__init__.py"
    }
    assert set(PACKAGES) == found


@pytest.mark.parametrize(
    ("pattern", "folders"),
    [
        (r"torch\.distributed|from torch import .*distributed", ("cli", "engine", "models")),
        (r"lockstep\.engine|lockstep\.cli|from lockstep import", ("models",)),
        (r"lockstep\.(cli|engine|models)|from lockstep import", ("comm",)),
        (r"lockstep\.cli|from lockstep import", ("engine",)),
        (r"(typer|rich)\b", ("engine", "models", "comm")),
        (r"(cli|engine|models|comm)\b", FOLDERS),
    ],
)
def test_imports_point_one_way(pattern: str, folders: tuple[str, ...]) -> None:
    imports = re.compile(rf"^\s*(?:from|import)\s+(?:{pattern})", re.MULTILINE)
    found = {str(path): imports.findall(path.read_text()) for path in sources(*folders)}
    assert not {path: lines for path, lines in found.items() if lines}


def test_code_is_ascii() -> None:
    assert not [str(path) for path in sources(*FOLDERS) if not path.read_text().isascii()]


def test_constraints_pin_every_dependency() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    for requirement in wanted:
        assert re.split(r"[>=<~]", requirement)[0] in pins, requirement
    assert pins["torch"] == "2.13.0"
    for name in ("torch", "tokenizers", "typer", "rich", "safetensors"):
        assert importlib.metadata.version(name).partition("+")[0] == pins[name]


def test_a_wheel_has_every_package_and_its_data(tmp_path: Path) -> None:
    source = tmp_path / "source"
    skipped = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests", "benchmarks", "docs")
    shutil.copytree(ROOT, source, symlinks=True, ignore=skipped)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("lockstep_decode-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in sources(*FOLDERS):
        assert f"lockstep/{path.relative_to(ROOT)}" in names
    for path in (ROOT / "models" / "builtin").glob("*/*"):
        if path.suffix in (".json", ".safetensors"):
            assert f"lockstep/{path.relative_to(ROOT)}" in names
    assert "lockstep/py.typed" in names
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"lockstep"}


def test_the_makefile_is_short() -> None:
    assert len((ROOT / "Makefile").read_text().splitlines()) < 30
