"""What the built wheel holds, and what becomes of our commands beside another package's `kvctl`.

Everything is built from a copy of the checkout: a build in place would pack what an earlier build
left in build/, and would race with other builds.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("kvfs", "cli", "gpu", "man", "tests", "LICENSE", "README.md", "pyproject.toml")
LINKED = {"kvfs.cli": "cli", "kvfs.gpu": "gpu"}
SCRIPTS = {"kvctl", "kvfs", "mount.kvfs"}
# One build: an sdist, and the wheel from what that sdist holds, as an installer does it.
BUILD = """
import os, subprocess, sys
from setuptools import build_meta
out = sys.argv[1]  # the build rewrites sys.argv
name = build_meta.build_sdist(out)
subprocess.run(["tar", "-xf", f"{out}/{name}"], check=True)
os.chdir(name.removesuffix(".tar.gz"))
build_meta.build_wheel(out)
"""


def packages_on_disk() -> set[str]:
    """Dotted names of all directories that hold Python code and would be imported as kvfs.*."""
    found = set()
    for top, directory in {"kvfs": "kvfs", **LINKED}.items():
        for path in (ROOT / directory).rglob("*.py"):
            parts = path.parent.relative_to(ROOT / directory).parts
            found.add(".".join((top, *parts)))
    return found


def files_on_disk() -> set[str]:
    """Everything below the package directories that belongs into the wheel, by its path there."""
    found = set()
    for top, directory in {"kvfs": "kvfs", **LINKED}.items():
        for path in (ROOT / directory).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                inside = PurePosixPath(top.replace(".", "/")) / path.relative_to(ROOT / directory)
                found.add(str(inside))
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one sdist and one wheel in it."""
    work = tmp_path_factory.mktemp("build")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, work / part, symlinks=True, ignore=ignore)
        elif source.exists():
            shutil.copy(source, work / part)
    out = work / "out"
    command = [sys.executable, "-I", "-c", BUILD, str(out)]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def test_every_package_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(project["packages"]) == packages_on_disk(), "bring the list in pyproject.toml up"
    linked = {name: path for name, path in project["package-dir"].items() if name != "kvfs"}
    assert linked == LINKED


def test_links_of_the_checkout() -> None:
    for name, directory in LINKED.items():
        link = ROOT / name.replace(".", "/")
        assert link.is_symlink() and link.resolve() == ROOT / directory


def test_only_kvfs_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.partition("/")[0] for name in names}
    version = wheel.name.split("-")[1]
    assert top - {f"kvfs-{version}.data"} == {"kvfs", f"kvfs-{version}.dist-info"}
    data = {name.split("/")[1:3] == ["data", "share"] for name in names if ".data/" in name}
    assert data <= {True}


def test_every_file_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if name.startswith("kvfs/")}
    assert inside == files_on_disk()


def test_man_pages_are_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        pages = {PurePosixPath(n).name for n in archive.namelist() if "/share/man/" in n}
    assert pages == {p.name for s in "158" for p in (ROOT / "man").glob(f"*.{s}")}


def test_the_sdist_reads_like_the_checkout(built: Path, tmp_path: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    subprocess.run(["tar", "-xf", path, "-C", tmp_path], check=True)
    (top,) = tmp_path.glob("kvfs-*")
    assert (top / "cli" / "main.py").is_file() and (top / "gpu" / "__init__.py").is_file()
    assert not (top / "kvfs" / "cli").exists()


def test_nothing_else_becomes_importable(wheel: Path, tmp_path: Path) -> None:
    """Outside the checkout, against the wheel: no top-level cli, gpu, tests or man."""
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from importlib.util import find_spec\n"
        "import kvfs.cli.main, kvfs.gpu\n"
        "assert kvfs.__file__.startswith(sys.argv[1]), kvfs.__file__\n"
        "print([n for n in ('cli', 'gpu', 'tests', 'man') if find_spec(n)])\n"
    )
    command = [sys.executable, "-I", "-c", code, str(tmp_path / "site")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_scripts(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/entry_points.txt"))
        lines = archive.read(name).decode().splitlines()
    scripts = dict(line.split(" = ") for line in lines if " = " in line)
    # mount(8) calls its helper with words of its own.
    assert scripts.pop("mount.kvfs") == "kvfs.cli.mount_helper:main"
    assert scripts == dict.fromkeys(SCRIPTS - {"mount.kvfs"}, "kvfs.cli.main:main")


# another package's kvctl


def stub_wheel(directory: Path) -> Path:
    """A package that installs a console script `kvctl`, as KV-cache packages do."""
    path = directory / "othercache-1.0-py3-none-any.whl"
    info = "othercache-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("othercache.py", "def main():\n    print('othercache')\n")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: othercache\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/entry_points.txt", "[console_scripts]\nkvctl = othercache:main\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


class Environment:
    """A virtual environment that borrows our dependencies, but not our editable kvfs."""

    def __init__(self, path: Path) -> None:
        venv.create(path, symlinks=True)
        self.bin = path / "bin"
        site = next((path / "lib").glob("python*")) / "site-packages"
        # A line in a .pth file adds the directory, but reads no .pth files of that directory.
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def pip(self, *arguments: str) -> None:
        python = str(self.bin / "python")
        command = [sys.executable, "-m", "pip", "--python", python, "--no-input", "-q", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def install(self, wheel: Path) -> None:
        self.pip("install", "--no-deps", "--no-index", "--no-compile", str(wheel))

    def uninstall(self, name: str) -> None:
        self.pip("uninstall", "-y", name)

    def output(self, *command: str) -> str:
        command = (str(self.bin / command[0]), *command[1:])
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.bin, check=True)
        return done.stdout

    def assert_ours_work(self) -> None:
        assert self.output("kvfs", "--version").startswith("kvfs")
        assert self.output("mount.kvfs", "--version").startswith("mount.kvfs")
        assert "kvfs" in self.output("python", "-m", "kvfs", "--version")


@pytest.mark.parametrize("ours_first", [True, False], ids=["ours-first", "ours-last"])
def test_another_kvctl_does_not_take_our_command(
    wheel: Path, tmp_path: Path, ours_first: bool
) -> None:
    environment = Environment(tmp_path / "venv")
    wheels = [wheel, stub_wheel(tmp_path)]
    for path in wheels if ours_first else reversed(wheels):
        environment.install(path)
    environment.assert_ours_work()
    if not ours_first:  # the last one installed owns the name, and ours says who it is
        assert "kvfs" in environment.output("kvctl", "--version")
    environment.uninstall("othercache")
    environment.assert_ours_work()
