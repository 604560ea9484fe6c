"""bench.serving without servers: arms of equal bytes, order, figures from recorded logs, the JSON object."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import serving
from bench.paired import paired_ratio, rotated
from bench.serving_arms import DEMO_GRID, Arm, Setting, demo_setting, held, stock_bytes, stock_pools
from bench.serving_client import figures, prompt_tokens
from bench.workloads import control
from sglang_hybrid.geometry import native_grid
from sglang_hybrid.pools.factory import make_organization


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return demo_setting(tmp_path_factory.mktemp("serving"), None, pages=254, clients=24)


def value(args: list[str], flag: str) -> str:
    """The one that argparse takes: the last."""
    return args[len(args) - 1 - args[::-1].index(flag) + 1]


# -- equal bytes ----------------------------------------------------------------------------------


def test_the_demo_has_the_proportions_of_the_source(demo: Setting) -> None:
    page = demo.grid * demo.model.kv_row_bytes
    assert demo.model.ssm_bytes == 3 * page and demo.grid == 64
    assert native_grid(demo.model, 16, 32) == 1792 // 8
    assert make_organization("S2", demo.model, demo.grid, demo.budget_bytes).usage().pages_total in (253, 254)


@pytest.mark.parametrize("ratio", [0.2, 0.9, 3])
def test_stocks_pools_come_closest_to_the_budget(demo: Setting, ratio: float) -> None:
    pools = stock_pools(demo.model, demo.budget_bytes, ratio)
    per_slot, per_token = stock_bytes(demo.model)
    assert per_slot == 2 * demo.model.checkpoint_bytes and per_token == 2 * demo.model.kv_row_bytes
    assert 0 <= demo.budget_bytes - pools.state_bytes(demo.model) < per_token
    assert pools.state_bytes(demo.model) == (pools.slots + 1) * per_slot + (pools.tokens + 1) * per_token
    assert 0 <= ratio / (1 + ratio) * demo.budget_bytes - (pools.slots + 1) * per_slot < per_slot


def test_a_budget_that_holds_nothing_is_refused(demo: Setting) -> None:
    with pytest.raises(ValueError, match="needs at least one of each"):
        stock_pools(demo.model, 2 * stock_bytes(demo.model)[0], 0.9)


def test_arguments_of_the_arms(demo: Setting) -> None:
    args = {name: demo.args(Arm.parse(name)) for name in serving.ARMS}
    pools = stock_pools(demo.model, demo.budget_bytes, 0.9)
    assert value(args["stock"], "--max-mamba-cache-size") == str(pools.slots)
    assert value(args["stock"], "--max-total-tokens") == str(pools.tokens)
    assert not any(word.startswith("--hybrid") for word in args["stock"])
    for name in ("S0", "S1", "S2", "D0"):
        assert value(args[name], "--hybrid-budget-bytes") == str(demo.budget_bytes)
        assert not any(word.startswith(("--max-total", "--max-mamba", "--mamba")) for word in args[name])
    assert value(args["S2"], "--hybrid-grid") == str(DEMO_GRID) and "--hybrid-grid" not in args["D0"]
    chunk = int(value(args["S2"], "--chunked-prefill-size"))
    assert {value(one, "--chunked-prefill-size") for one in args.values()} == {str(chunk)}
    assert chunk % demo.grid == chunk % native_grid(demo.model, 16, 32) == 0


def test_flags_of_an_arm_come_last() -> None:
    exact = Arm.parse("S1+exact+headroom=0.1")
    assert exact.memory == "S1" and exact.flags == ("--hybrid-exact", "--hybrid-headroom", "0.1")
    assert Arm.parse("stock+page-size=16").flags == ("--page-size", "16")
    split = Arm.parse("stock+mamba-full-memory-ratio=2.5")
    assert (split.ratio, Arm.parse("stock").ratio) == (2.5, 0.9)
    with pytest.raises(ValueError, match="S9 is unknown"):
        Arm.parse("S9")


STOCK_LOG = """
[t] Mamba Cache is allocated. max_mamba_cache_size: {slots}, conv_state size: 0.00GB, ssm_state size: 0.01GB
[t] KV Cache is allocated. dtype: torch.float32, #tokens: {tokens}, K size: {size} GB, V size: {size} GB
[t] max_total_num_tokens={tokens}, chunked_prefill_size=1792, max_running_requests=7, context_len=1024
"""


def server(log: str, total: int = 0) -> Any:
    states = [{"hybrid": {"bytes": {"attention": {"held": total - 5, "dead": 2}, "any": [3]}}}]
    return SimpleNamespace(log=lambda: log, info=lambda: {"internal_states": states})


def test_pools_of_other_bytes_are_found(demo: Setting) -> None:
    pools = stock_pools(demo.model, demo.budget_bytes, 0.9)
    stock = Arm.parse("stock")
    log = STOCK_LOG.format(slots=pools.slots, tokens=pools.tokens, size="0.00")
    assert held(stock, demo, server(log)) == (pools.state_bytes(demo.model), 7)
    for slots, tokens, size in (
        (pools.slots + 2, pools.tokens, "0.00"),
        (pools.slots, pools.tokens - 600, "0.00"),
        (pools.slots, pools.tokens, "0.10"),
    ):
        with pytest.raises(RuntimeError, match="its pools"):
            held(stock, demo, server(STOCK_LOG.format(slots=slots, tokens=tokens, size=size)))
    assert held(Arm.parse("S2"), demo, server(log, demo.budget_bytes)) == (demo.budget_bytes, 7)
    with pytest.raises(RuntimeError, match="the budget is"):
        held(Arm.parse("S2"), demo, server(log, demo.budget_bytes // 2))


# -- requests, order, figures ---------------------------------------------------------------------


def test_prompts_share_what_the_workload_shares() -> None:
    requests = serving.workload(12, 8).requests(3)
    texts = [prompt_tokens(request, 3, 32000) for request in requests]
    assert [len(text) for text in texts] == [request.prompt for request in requests]
    heads = {request.segments[0][0]: set() for request in requests}
    for request, text in zip(requests, texts, strict=True):
        heads[request.segments[0][0]].add(tuple(text[:325]))
    assert all(len(same) == 1 for same in heads.values())
    assert len({same.copy().pop() for same in heads.values()}) == len(heads) > 1
    apart = [tuple(prompt_tokens(request, 3, 32000)[:32]) for request in control(requests)]
    assert len(set(apart)) == len(apart)
    assert max(request.prompt + request.new for request in serving.workload(500, 8).requests(3)) <= 1024


def test_every_arm_has_every_place_once() -> None:
    orders = [rotated(serving.ARMS, repetition) for repetition in range(5)]
    for place in range(5):
        assert {order[place] for order in orders} == set(serving.ARMS)
    assert all(sorted(order) == sorted(serving.ARMS) for order in orders)
    assert rotated(serving.ARMS, 7) == rotated(serving.ARMS, 2)


def test_ratios_are_paired() -> None:
    found = paired_ratio([2, 30, 4], [1, 10, 4])
    assert found is not None and found.low is not None and found.high is not None
    assert found.ratio == pytest.approx(2) and found.low < 2 < found.high
    assert found.high - found.ratio == pytest.approx(4.303 / 3**0.5, rel=1e-3), "t interval of 2, 3 and 1"
    assert paired_ratio([2], [4]) == (0.5, None, None)
    assert paired_ratio([2, 3], [1, 0]) is None


RESULT: dict[str, Any] = {
    "cache_report": {"total_prompt_tokens": 900, "total_cached_tokens": 320},
    "completed": 3,
    "total_output_tokens": 60,
    "duration": 2.0,
    "output_throughput": 30.0,
    **{f"{kind}_{name}_ms": 1.5 for kind in ("mean", "p99") for name in ("ttft", "tpot", "e2e_latency")},
}
LOG = """
[t] Prefill batch, #new-seq: 2, #new-token: 480, #cached-token: 0, full token usage: 0.00, #running-req: 0, #queue-req: 1
[t] Decode batch, #running-req: 2, #full token: 480, full token usage: 0.1, gen throughput (token/s): 3, #queue-req: 1,
[t] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 400, #new_token_ratio: 0.5 -> 0.6
[t] Prefill batch, #new-seq: 1, #new-token: 150, #cached-token: 320, full token usage: 0.00, #running-req: 0, #queue-req: 0
[t] Decode batch, #running-req: 4, #full token: 480, full token usage: 0.1, gen throughput (token/s): 3, #queue-req: 0,
[t] Decode batch, #running-req: 3, #full token: 480, full token usage: 0.1, gen throughput (token/s): 3, #queue-req: 9,
"""  # noqa: E501


def test_figures_of_a_run() -> None:
    found = figures(RESULT, LOG)
    assert found["prefilled_tokens"] == 580 and found["reused_tokens"] == 320
    assert found["computed_tokens"] == 630 and found["recomputed_tokens"] == 50
    assert found["retractions"] == 2 and found["running"] == 3 and found["waiting"] == 1
    assert found["output_tokens_per_s"] == 30 and found["mean_e2e_ms"] == 1.5


def test_report_has_its_fields(demo: Setting) -> None:
    options, arms, _ = serving.chosen(["--repetitions", "2"])
    one = figures(RESULT, LOG) | {"same_answers": 1.0}
    less = one | {"prefilled_tokens": 290}
    runs = {
        "shared": {arm.name: [one, less if arm.name == "S2" else one] for arm in arms},
        "control": {arm.name: [one, one] for arm in arms},
    }
    pools = {arm.name: serving.Held(demo.budget_bytes, 24) for arm in arms}
    answer = json.loads(json.dumps(serving.report(demo, pools, runs, options)))
    for part in (answer, answer["control"]):
        assert set(serving.ARMS) <= set(part) and set(part["ratios"]) == {"S0", "S1", "S2", "D0"}
        for arm in serving.ARMS:
            assert {"prefilled_tokens", "reused_tokens", "output_tokens_per_s"} <= set(part[arm])
    assert answer["S2"]["prefilled_tokens"] == 435 and answer["S2"]["state_bytes"] == demo.budget_bytes
    assert answer["ratios"]["S2"]["prefilled_tokens"]["ratio"] == 0.75
    assert answer["control"]["ratios"]["S2"]["prefilled_tokens"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    assert not answer["balanced"] and answer["seeds"] == [serving.FIRST_SEED, serving.FIRST_SEED + 1]
    text = "\n".join(serving.lines(answer, serving.ARMS))
    assert "control" in text and "(0.750, " in text


def test_answers_are_compared_with_the_reference(monkeypatch: pytest.MonkeyPatch, demo: Setting) -> None:
    asked: list[tuple[str, int, int]] = []

    def measure(server: str, made: list[Any], arguments: list[str], seed: int) -> Any:
        asked.append((server, seed, len(made)))
        return figures(RESULT, LOG), ["a", "b", "other" if server == "S2" else "c"]

    monkeypatch.setattr(serving.client, "measure", measure)
    servers: Any = {"S2": "S2", "stock": "stock"}
    both = [serving.workload(3, 8).requests(seed) for seed in (1, 2)]
    found = serving.run_all(servers, {"shared": both, "control": both}, demo.vocabulary, [], 2)
    assert [run["same_answers"] for run in found["shared"]["S2"]] == [2 / 3, 2 / 3]
    assert [run["same_answers"] for run in found["control"]["stock"]] == [1, 1]
    first, second = serving.FIRST_SEED, serving.FIRST_SEED + 1
    order = [("S2", first), ("stock", first)] * 2 + [("stock", second), ("S2", second)] * 2
    assert asked == [(*one, 3) for one in order]


# -- arguments ------------------------------------------------------------------------------------


def test_what_comes_behind_two_dashes_goes_to_the_servers(tmp_path: Path) -> None:
    options, arms, passed = serving.chosen(["--quick", "--requests", "9", "--", "--schedule-policy", "lpm"])
    assert [arm.name for arm in arms] == ["stock", "S2"] and (options.requests, options.repetitions) == (9, 2)
    setting = serving.settle(options, tmp_path, passed)
    assert all(setting.args(arm)[-2:] == ["--schedule-policy", "lpm"] for arm in arms)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--arms", "S1,S7"], "S7 is unknown; choose among stock, S0, S1, S2, D0"),
        (["--arms", "S1,S1"], "names one twice"),
        (["--clients", "0"], "--clients 0 is too small"),
        (["--arms", "stock+mamba-full-memory-ratio=0"], "leaves a pool empty"),
        (["--state-bytes", "2,4"], "use three such as 2,4,2"),
    ],
)
def test_arguments_that_cannot_be(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        serving.chosen(argv)
    assert refused.value.code == 2 and said in capsys.readouterr().err
