"""Imports point down only: the core is plain Python, the kernels run without SGLang."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "sglang_hybrid"
FLOORS = (
    ("geometry", "ledger", "models"),
    ("pools",),
    ("radix",),
    ("kernels",),
    ("engine", "platforms", "plugin"),
    ("cli", "planner", "simulator"),
)
"""From the ground up. A room may use rooms of its own floor and of those below."""

LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
CORE = ("geometry", "ledger", "models", "pools", "radix", "simulator")
TENSORS = {"pools/arena.py", "pools/views.py"}
"""The two files of the core's folders that may know torch; the simulator runs on what is left."""

HEAVY = {"torch", "sglang", "triton", "flashinfer", "transformers", "numpy"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Path below the package."""
    return path.relative_to(PACKAGE).as_posix()


def room_of(name: str) -> str:
    """First folder or module name: `pools/pages.py` is in `pools`."""
    return name.split("/")[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Dotted names of everything a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def core_files() -> list[Path]:
    """Files of the core that must be plain Python."""
    return [path for path in MODULES if room_of(name_of(path)) in CORE and name_of(path) not in TENSORS]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    room = room_of(name_of(path))
    if room == "__init__":
        assert not any(name.startswith("sglang_hybrid") for name in imports(path))
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "sglang_hybrid" and len(parts) > 1 and parts[1] in LEVEL:
            assert LEVEL[parts[1]] <= LEVEL[room], f"{room} is below {parts[1]}"


@pytest.mark.parametrize("path", core_files(), ids=name_of)
def test_core_is_plain_python(path: Path) -> None:
    for name in imports(path):
        assert name.split(".")[0] not in HEAVY, name
        assert name.split(".")[:3] not in (
            ["sglang_hybrid", "pools", "arena"],
            ["sglang_hybrid", "pools", "views"],
        ), f"{name} brings torch"


def test_kernels_run_without_sglang() -> None:
    found = [(name_of(p), n) for p in MODULES if room_of(name_of(p)) == "kernels" for n in imports(p)]
    assert found
    assert not [(path, name) for path, name in found if name.split(".")[0] in {"sglang", "transformers"}]


BLOCKER = """
import importlib, importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in {blocked!r}:
            raise ImportError(fullname + " is blocked")
sys.meta_path.insert(0, Blocker())
for name in {modules!r}:
    importlib.import_module(name)
"""


def import_blocked(modules: list[str], blocked: set[str]) -> subprocess.CompletedProcess[str]:
    """Import modules in a fresh interpreter where some packages cannot be imported."""
    code = BLOCKER.format(modules=modules, blocked=blocked)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def dotted(path: Path) -> str:
    """Module name of a file of the package."""
    return "sglang_hybrid." + name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_core_imports_without_torch_and_sglang() -> None:
    done = import_blocked([dotted(path) for path in core_files()], HEAVY)
    assert done.returncode == 0, done.stderr


def test_kernels_import_without_sglang() -> None:
    kernels = [dotted(path) for path in MODULES if room_of(name_of(path)) == "kernels"]
    done = import_blocked(kernels, {"sglang", "sgl_kernel", "transformers"})
    assert done.returncode == 0, done.stderr


def test_blocker_blocks() -> None:
    assert import_blocked(["json"], {"json"}).returncode != 0
