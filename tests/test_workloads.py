"""Workloads: what seeds decide, what stays equal between arms, and what a file becomes."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from bench.workloads import (
    Agents,
    Lognormal,
    SharedContexts,
    Turn,
    Zipf,
    arrivals,
    control,
    estimate_tokens,
    isolate,
    mooncake,
    r_max,
    sharegpt,
)
from sglang_hybrid.simulator.request import Request

GRID = 512


def test_the_mean_holds_after_the_cut() -> None:
    law, chance = Lognormal(732, 1.4, 4568), Random(0)
    drawn = [law.draw(chance) for _ in range(40_000)]
    assert 732 * 0.97 < sum(drawn) / len(drawn) < 732 * 1.03
    assert min(drawn) >= 1 and max(drawn) == 4568


def test_a_mean_beyond_the_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="a mean of 1024 is not between 0 and the cut at 1024"):
        Lognormal(1024, 1.0, 1024)


def test_arrivals_are_poisson_and_a_rate_stretches_them() -> None:
    slow, fast = arrivals(1, 2.0, 4000), arrivals(1, 4.0, 4000)
    assert slow[-1] / 4000 == pytest.approx(0.5, rel=0.05)
    gaps = [later - at for at, later in zip(slow, slow[1:])]
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)  # 1 / e
    assert fast == pytest.approx([at / 2 for at in slow])


def test_popularity_follows_zipf() -> None:
    law, chance = Zipf(8, 0.8), Random(0)
    drawn = [law.draw(chance) for _ in range(20_000)]
    assert drawn.count(0) / drawn.count(3) == pytest.approx(4**0.8, rel=0.1)
    assert set(drawn) == set(range(8))


def test_seeds_decide_everything_on_every_machine() -> None:
    """These very requests: published figures rest on them."""
    first, second = SharedContexts().requests(7)[:2]
    assert (round(first.at, 6), first.new) == (0.212631, 172)
    assert first.segments == ((("context", 2), 2600), (("question", 0), 897))
    assert (round(second.at, 6), second.new) == (1.164447, 202)
    assert second.segments == ((("context", 0), 2600), (("question", 1), 70))
    assert SharedContexts().requests(7) == SharedContexts().requests(7) != SharedContexts().requests(8)


def test_the_generator_keeps_the_sources_marks() -> None:
    requests = [one for seed in range(20) for one in SharedContexts().requests(seed)]
    assert sum(one.prompt for one in requests) / len(requests) == pytest.approx(3332, rel=0.02)
    assert max(one.new for one in requests) == 1024
    assert max(one.prompt + one.new for one in requests) <= 8192
    assert {one.segments[0] for one in requests} == {(("context", context), 2600) for context in range(8)}


def test_sharing_and_rate_change_nothing_else() -> None:
    base = SharedContexts(count=400)
    shared, none, some = (replace(base, sharing=q).requests(3) for q in (1.0, 0.0, 0.25))
    for arm in (none, some, [replace(one, at=one.at / 2) for one in replace(base, rate=1.5).requests(3)]):
        assert [(one.at, one.prompt, one.new) for one in arm] == pytest.approx(
            [(one.at, one.prompt, one.new) for one in shared]
        )
    assert not any(r_max(none, GRID))
    kept = [one.segments[0] == other.segments[0] for one, other in zip(some, shared)]
    assert sum(kept) / len(kept) == pytest.approx(0.25, abs=0.07)


def test_r_max_of_the_generator_is_its_context() -> None:
    requests = SharedContexts().requests(0)
    seen = set()
    for request, depth in zip(requests, r_max(requests, GRID)):
        context = request.segments[0]
        assert depth == (2560 if context in seen else 0)
        seen.add(context)


def test_r_max_leaves_one_token_to_compute_and_ends_inside_runs() -> None:
    def ask(*segments: tuple[str, int], new: int = 1, **others: object) -> Request:
        return Request(at=0.0, segments=segments, new=new, **others)  # type: ignore[arg-type]

    assert r_max([ask(("a", 1024)), ask(("a", 1024))], GRID) == [0, 512]
    assert r_max([ask(("a", 1025)), ask(("a", 1025))], GRID) == [0, 1024]
    assert r_max([ask(("a", 600)), ask(("a", 1600)), ask(("a", 1700))], GRID) == [0, 512, 1536]
    assert r_max([ask(("a", 600)), ask(("b", 600)), ask(("a", 600), ("b", 1))], GRID) == [0, 0, 512]
    answered = ask(("a", 300), new=213, answer="r")
    assert r_max([answered, ask(("a", 300), ("r", 213), ("b", 9))], GRID) == [0, 512]
    answered = ask(("a", 300), new=212, answer="r")  # its last token was never computed
    assert r_max([answered, ask(("a", 300), ("r", 212), ("b", 9))], GRID) == [0, 0]


def test_the_control_arm_has_nothing_in_common() -> None:
    requests = SharedContexts(count=60).requests(1) + Agents(count=8).requests(1)
    arm = control(requests)
    assert any(r_max(requests, 16)) and not any(r_max(arm, 16))
    assert [(one.at, one.prompt, one.new) for one in arm] == [
        (one.at, one.prompt, one.new) for one in requests
    ]


def test_isolated_requests_keep_their_texts() -> None:
    requests = SharedContexts(count=60).requests(1)
    arm = isolate(requests)
    assert [one.segments for one in arm] == [one.segments for one in requests]
    assert len({one.salt for one in arm}) == 60 and not any(r_max(arm, 16))


def test_agents_repeat_what_was_said() -> None:
    requests = Agents(count=12).requests(0)
    assert [one.at for one in requests] == sorted(one.at for one in requests)
    assert max(one.prompt + one.new for one in requests) <= 8192
    turns = [one for one in requests if one.segments[-1][0][1] == 3]  # type: ignore[index]
    assert len(turns) > 4
    for number, *rest in [one.segments for one in turns if len(one.segments) == 4]:
        before = next(one for one in requests if one.segments == (number, rest[0]))
        assert (before.answer, before.new) == rest[1]
    later = [(one, depth) for one, depth in zip(requests, r_max(requests, 16)) if len(one.segments) > 2]
    for one, depth in later:
        assert depth == (one.prompt - one.segments[-1][1] - 1) // 16 * 16  # all but the last sampled token


def test_agents_end_at_the_context_limit() -> None:
    long = [[Turn(2500, 500)] * 9]
    requests = Agents(count=1, system_tokens=1000).requests(0, long)
    assert [one.prompt for one in requests] == [3500, 6500]


SHAREGPT = [
    {
        "id": "a",
        "conversations": [{"from": "human", "value": "x" * 41}, {"from": "gpt", "value": "y" * 8}] * 2,
    },
    {"conversations": [{"from": "gpt", "value": "no question"}]},
    {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": ""}]},
    {
        "conversations": [
            {"from": "system", "value": "short"},
            {"from": "human", "value": "x" * 20_000},
            {"from": "gpt", "value": "y" * 4},
            {"from": "human", "value": "alone"},
        ],
    },
]


@pytest.fixture
def sharegpt_file(tmp_path: Path) -> Path:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(SHAREGPT))
    return path


def test_sharegpt_is_read_in_turns(sharegpt_file: Path) -> None:
    assert sharegpt(sharegpt_file) == [[Turn(11, 2), Turn(11, 2)], [Turn(5000, 1)]]
    assert sharegpt(sharegpt_file, len) == [[Turn(41, 8), Turn(41, 8)], [Turn(20_000, 4)]]
    assert [estimate_tokens(text) for text in ("", "a", "four", "fives")] == [0, 1, 1, 2]


def test_sharegpt_feeds_contexts_and_agents(sharegpt_file: Path) -> None:
    conversations = sharegpt(sharegpt_file)
    requests = SharedContexts(count=50).requests(0, [turns[0] for turns in conversations])
    assert {(one.prompt, one.new) for one in requests} == {(2611, 2), (2600 + 4568, 1)}
    assert {one.segments[-1][1] for one in Agents(count=20).requests(0, conversations)} == {11, 5000}


def test_a_file_without_conversations_is_named(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text(json.dumps(SHAREGPT[1:3]))
    with pytest.raises(ValueError, match=r"empty\.json holds no conversation"):
        sharegpt(path)


def test_a_mooncake_line_is_one_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(0, 1100, 7, [3, 4, 5]), (2000, 8000, 400, list(range(16))), (4000, 1024, 2000, [3, 4])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("\n".join(json.dumps(dict(zip(names, row))) for row in rows))
    requests = list(mooncake(path))
    assert requests == [  # the second is beyond the limit
        Request(at=0.0, segments=((3, 512), (4, 512), (5, 76)), new=7),
        Request(at=4.0, segments=((3, 512), (4, 512)), new=1024),
    ]
    assert [one.at for one in mooncake(path, rate=2.0)] == [0.0, 1.0]
    again = list(mooncake(path, 5))
    assert again[:2] == requests and [one.at for one in again] == [0.0, 4.0, 6.0, 10.0, 12.0]
    assert [one.new for one in again] == [7, 1024, 7, 1024, 7]
    assert r_max(again, 512) == [0, 512, 0, 512, 0], "what comes again shares nothing with what was"


def test_the_public_trace() -> None:
    requests = list(mooncake(count=300))
    assert len(requests) == 300 and all(one.prompt + one.new <= 8192 for one in requests)
    assert max(r_max(requests, GRID)) > 512
