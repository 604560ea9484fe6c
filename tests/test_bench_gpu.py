"""The script for a GPU: what it sends, what it calls wrong, and that a part which cannot run says why."""

import subprocess
import sys
from collections.abc import Sequence

import pytest

from bench import gpu, gpu_servers
from sglang_hybrid.cli.verify_compare import Answer
from sglang_hybrid.cli.verify_runs import Prompt
from tests.support.arguments import ROOT

NAN = float("nan")


def answer(ids: Sequence[int], logprob: float = -1.0, gap: float = 1.0, cached: int = 0) -> Answer:
    return Answer(tuple(ids), (logprob,) * len(ids), (gap,) * len(ids), cached)


class Echo:
    """A server whose answer is the prompt's last id, over and over."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def flush(self) -> None: ...

    def ask(self, prompts: Sequence[Prompt], tokens: int) -> list[Answer]:
        self.asked.append(len(prompts))
        return [answer([prompt[-1]] * tokens) for prompt in prompts]


def test_requests_are_mixed() -> None:
    sent = gpu_servers.waves(gpu_servers.GPU)
    prompts = [prompt for wave in sent for prompt in wave]
    assert len(prompts) == 200 == len(set(prompts))
    assert sent == gpu_servers.waves(gpu_servers.GPU)
    contexts = [prompt[:-7] for prompt in sent[0]]
    behind = [sum(prompt[: len(context)] == context for prompt in prompts) for context in contexts]
    assert min(behind) >= 8 and sum(behind) in range(120, 180)
    # Prefills on both sides of a tile and of a grid step; answers that cross a boundary.
    lengths = {len(prompt) for prompt in prompts}
    assert min(lengths) < 64 and max(lengths) > 3 * 512
    assert all(len(prompt) + max(gpu_servers.ANSWERS) < 8 * 512 for prompt in prompts)
    server = Echo()
    assert len(gpu_servers.answers(server, sent)) == 200
    assert server.asked == [8, *[25] * 7, 17]


def test_equal_answers() -> None:
    found = gpu_servers.compare([answer([1, 2], cached=512)], [answer([1, 2])], 0.25)
    assert found == gpu_servers.Compared(2, 0, 512, [])


def test_another_token_is_wrong_unless_it_was_a_near_tie() -> None:
    ours, stock = [answer([1, 9, 9])], [answer([1, 2, 3])]
    assert gpu_servers.compare(ours, stock, 0.25).wrong == [
        "request 0, 0 tokens cached, output token 1: 9 instead of 2, which was ahead by 1.000"
    ]
    near = gpu_servers.compare(ours, [answer([1, 2, 3], gap=0.2)], 0.25)
    assert (near.tokens, near.near_ties, near.wrong) == (1, 1, [])


@pytest.mark.parametrize("logprob", [NAN, float("-inf")])
def test_a_logprob_that_is_no_number_is_wrong_at_equal_ids(logprob: float) -> None:
    (said,) = gpu_servers.compare([answer([1], logprob)], [answer([1])], 0.25).wrong
    assert said.startswith("request 0: logprobs (")


def test_a_step_outside_a_graph_is_seen() -> None:
    log = (
        "Decode batch, #running-req: 2, cuda graph: True\nDecode batch, #running-req: 9, cuda graph: False\n"
    )
    assert gpu_servers.decode_steps(log) == 2
    assert [line[-5:] for line in gpu_servers.without_graph(log)] == ["False"]


def test_arms() -> None:
    stock, *ours = gpu_servers.arms(ROOT, gpu_servers.GPU, 1000)
    assert "--hybrid-mem" not in stock.args and stock.env == {}
    assert [arm.name for arm in ours] == ["S1 on fa3", "S1 on flashinfer", "S1 on triton"]
    for arm in ours:
        assert arm.args[arm.args.index("--hybrid-mem") + 1] == "S1"
        assert arm.env == {"SGLANG_HYBRID_POISON": "1"}
    assert sum(gpu.SECONDS.values()) < 240


def test_a_part_that_fails_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(dry: bool) -> gpu.Outcome:
        raise RuntimeError("no such thing")

    monkeypatch.setitem(gpu.PARTS, "kernels", broken)
    monkeypatch.setitem(gpu.PARTS, "servers", lambda dry: gpu.Outcome("passed", "well"))
    assert gpu.main(["kernels", "servers"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("RuntimeError: no such thing") and said[1].endswith("well")
    assert gpu.main(["servers"]) == 0


WITHOUT_SGLANG = """
import sys
sys.modules["sglang"] = None
import importlib.util as util
found = util.find_spec
util.find_spec = lambda name, *rest: None if name == "sglang" else found(name, *rest)
from bench import gpu
code = gpu.main([])
assert not any(name.startswith("sglang.") for name in sys.modules)
sys.exit(code)
"""


def test_it_runs_without_sglang_and_without_a_gpu() -> None:
    """A machine that is lent may have a GPU and torch alone: then the servers are what is left out."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SGLANG], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(" s: ")[1] for line in done.stdout.splitlines()] == [
        "no CUDA device is visible",
        "sglang is not importable here",
        "no CUDA device is visible",
    ]


@pytest.mark.long
@pytest.mark.parametrize("part", ["kernels", "servers"])
def test_dry_run(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A case of each table in the interpreter; stock and S1 on the CPU platform, 24 requests."""
    assert gpu.main([part, "--dry-run"]) == 0, capsys.readouterr().out
    assert f"{part}: passed" in capsys.readouterr().out
