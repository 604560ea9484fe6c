"""The package builds a wheel, and the wheel works where nothing else of this checkout is."""

import os
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PROBE = """
import importlib.metadata as metadata
import sglang_hybrid
print(sglang_hybrid.__file__)
for group in ("sglang.srt.plugins", "sglang.srt.platforms"):
    for point in metadata.entry_points(group=group):
        if point.value.startswith("sglang_hybrid."):
            assert callable(point.load()), point
            print(point.name)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed."""
    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=elsewhere, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "sglang_hybrid", source / "sglang_hybrid", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    run(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--wheel-dir", folder, source, cwd=folder,
    )  # fmt: skip
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_every_module(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if name.endswith(".py")}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sglang_hybrid").rglob("*.py")}
    assert packed == modules
    assert "sglang_hybrid/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_works_in_another_environment(wheel: Path, tmp_path: Path) -> None:
    """A fresh environment that sees this one's packages: import, entry points, console script."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        wheel,
        cwd=tmp_path,
    )
    packages = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip())
    # A path file inside a path that came from a path file is not read: this checkout stays out of sight.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")

    where, *points = run(python, "-c", PROBE, cwd=tmp_path).split()
    assert Path(where).is_relative_to(packages)
    assert sorted(points) == ["sglang_hybrid", "sglang_hybrid_cpu"]
    assert "demo-model" in run(tmp_path / "env" / "bin" / "sglang-hybrid", "--help", cwd=tmp_path)
