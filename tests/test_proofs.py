"""`make proof`: its files exist, and its last lines tell a proof from none."""

from pathlib import Path

from tests.support.proofs import PROOFS, proof_of, report

ROOT = Path(__file__).parents[1]


def test_every_file_exists_and_stands_behind_one_proof() -> None:
    files = [file for group in PROOFS.values() for file in group]
    assert len(files) == len(set(files))
    assert all((ROOT / file).is_file() for file in files)
    assert proof_of("tests/test_streams.py") in PROOFS
    assert proof_of("tests/test_cli.py") is None


def test_a_proof_needs_a_test_that_passed_and_none_that_failed() -> None:
    streams, copies = "tests/test_streams.py::a", "tests/test_copies.py::b[x]"
    lines = report([(streams, "passed"), (copies, "passed"), (copies, "error"), ("tests/x.py::c", "passed")])
    assert [line.split(" (")[0] for line in lines] == [
        "NOT PROVED", "NOT PROVED", "NOT PROVED", "proved", "NOT PROVED", "NOT PROVED",
    ]  # fmt: skip
    assert "(1 tests passed, 1 failed)" in lines[-1]
