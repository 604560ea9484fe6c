"""What `make proof` proves of the path that a GPU takes, without one: a sentence, and the tests behind it."""

from collections import Counter
from collections.abc import Iterable, Mapping

PROOFS: Mapping[str, tuple[str, ...]] = {
    "No forward reads a stale byte: units that held a state are cleared before it, on its stream.": (
        "tests/test_unit_tails.py",
        "tests/engine/test_unit_tails.py",
    ),
    "Every KV dtype is stored as SGLang's kernels want it, and they read no row but a sequence's own.": (
        "tests/test_kv_dtypes.py",
        "tests/test_sglang_kernels.py",
        "tests/engine/test_fp8.py",
    ),
    "Decode by SGLang's graph runner over whole pages equals eager, padded, forked and retracted.": (
        "tests/test_recorded_graphs.py",
        "tests/engine/test_graphs.py",
    ),
    "No order of streams that events and waits allow changes a token; each wait is needed.": (
        "tests/test_streams.py",
    ),
    "Every family and organization starts on sm_80, sm_90 and sm_100 as expected, or is refused.": (
        "tests/test_resolution.py",
    ),
    "A batch costs two pinned copies that nothing waits for; a decode step waits for nothing.": (
        "tests/test_copies.py",
        "tests/test_decode_step.py",
    ),
}


def proof_of(path: str) -> str | None:
    """The sentence that a test file stands behind; `path` from the repository's root."""
    return next((sentence for sentence, files in PROOFS.items() if path in files), None)


def report(outcomes: Iterable[tuple[str, str]]) -> list[str]:
    """A line a proof, from (node id, outcome) of the tests that ran; without any it is not proved."""
    counts: dict[str, Counter[str]] = {sentence: Counter() for sentence in PROOFS}
    for node, outcome in outcomes:
        sentence = proof_of(node.partition("::")[0])
        if sentence is not None:
            counts[sentence][outcome] += 1
    lines = []
    for sentence, seen in counts.items():
        bad = seen["failed"] + seen["error"]
        verdict = "proved" if seen["passed"] and not bad else "NOT PROVED"
        lines.append(f"{verdict} ({seen['passed']} tests passed, {bad} failed): {sentence}")
    return lines
