"""What the repository promises about itself: links lead somewhere, and what is imported is declared."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").rglob("*.md")])

DISTRIBUTION = {
    "flashinfer": "flashinfer_python",
    "prometheus_client": "prometheus-client",
    "zmq": "pyzmq",
    "PIL": "pillow",
}
"""Top-level module -> its distribution, where the names differ."""

OWN = {"sglang_hybrid", "bench", "tests", "examples"}

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as forges form them."""
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(page.read_text()))
    return {title.strip().replace(" ", "-") for title in kept}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def imported(folder: str) -> set[str]:
    """Top-level modules that are imported anywhere below a folder."""
    found: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return found - OWN - set(sys.stdlib_module_names)


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~ ;]", requirement)[0] for requirement in requirements}


@pytest.mark.parametrize(
    "folder, extras", [("sglang_hybrid", []), ("bench", ["bench"]), ("tests", ["bench", "test"])]
)
def test_what_is_imported_is_declared(folder: str, extras: list[str]) -> None:
    declared = names(PROJECT["dependencies"])
    for extra in extras:
        declared |= names(PROJECT["optional-dependencies"][extra])
    wanted = {DISTRIBUTION.get(module, module) for module in imported(folder)}
    # tests/support/planted is put on a server's path as a folder of its own.
    assert wanted - declared - {"planted_faults"} == set()


def test_no_page_or_module_names_a_file_that_is_not_here() -> None:
    """A document named in the code is in the repository."""
    named = re.compile(r"\b((?:docs/|bench/)?[A-Za-z_-]+\.md)\b")
    for path in [*PAGES, *(ROOT / "sglang_hybrid").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]:
        for name in named.findall(path.read_text()):
            here = [ROOT / name, path.parent / name, ROOT / "docs" / name]
            assert any(one.exists() for one in here), f"{path.relative_to(ROOT)} names {name}"
