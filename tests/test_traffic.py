"""Traffic of profiles and traces: what a profile promises holds of its requests; bad words are refused."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from sglang_hybrid.simulator.traffic import PROFILES, Profile, TrafficError
from sglang_hybrid.simulator.traffic_read import read_trace, read_traffic


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_requests_have_the_profiles_means(profile: Profile) -> None:
    seeds = [profile.requests(seed, 1500) for seed in range(3)]
    everything = [one for requests in seeds for one in requests]
    assert fmean(one.new for one in everything) == pytest.approx(profile.output, rel=0.1)
    assert fmean(requests[-1].at for requests in seeds) == pytest.approx(1500 / profile.rate, rel=0.15)
    # Conversations that would pass the limit end: what is left of long ones is shorter.
    assert 0.8 * profile.input < fmean(one.prompt for one in everything) < 1.1 * profile.input
    assert all(one.prompt + one.new <= profile.limit for one in everything)
    assert all(first.at <= second.at for first, second in zip(seeds[0], seeds[0][1:]))


def test_seeds_decide_everything_and_rates_stretch_time_alone() -> None:
    profile = PROFILES["rag"]
    once, again = profile.requests(7, 50), profile.requests(7, 50)
    assert once == again and once != profile.requests(8, 50)
    faster = profile.at_rate(2 * profile.rate).requests(7, 50)
    assert [one.segments for one in faster] == [one.segments for one in once]
    assert faster[-1].at == pytest.approx(once[-1].at / 2)


def test_sharing_is_the_part_of_conversations_behind_a_shared_context() -> None:
    for sharing in (0.0, 0.4, 1.0):
        requests = Profile(sharing=sharing).requests(0, 2000)
        shared = [one for one in requests if one.segments[0][0][0] == "context"]  # type: ignore[index]
        assert len(shared) / len(requests) == pytest.approx(sharing, abs=0.03)
    assert {one.segments[0][0] for one in shared} == {("context", k) for k in range(8)}


def test_a_turn_repeats_all_that_was_said() -> None:
    requests = Profile(turns=4, input=4500, context=500, rate=50, limit=100_000).requests(0, 400)
    followed = {one.answer: one for one in requests}
    repeated = [one for one in requests if len(one.segments) > 2]
    assert len(repeated) > 200
    for one in repeated:
        before = followed.get(one.segments[-2][0])
        if before is not None:
            assert one.segments[:-2] == before.segments and one.segments[-2][1] == before.new
            assert one.at > before.at


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "neither a file nor a profile"),
        ("rag,speed=3", "no 'speed'"),
        ("rag,rate=fast", "rate=fast is no number"),
        ("rag,contexts=2.5", "contexts=2.5 is no whole number"),
        ("rag,rate", "rate= is no number"),
        ("rate=0", "rate=0.0 is not between 0.001 and 10000"),
        ("rate=nan", "finite"),
        ("sharing=1.5", "sharing=1.5 is not between 0 and 1"),
        ("input=100", "use input=2601 or more"),
        ("limit=3000", "limit=3000 is less than a first turn"),
        ("{", "no JSON object"),
        ("{}{}", "no JSON object"),
        ('{"profile": "none"}', "is no object of a profile's figures"),
        ('{"rate": [1]}', "rate=[1] is no number"),
    ],
)
def test_bad_traffic_is_refused_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(TrafficError) as refusal:
        read_traffic(text)
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


def test_profiles_come_by_name_in_words_and_from_a_file(tmp_path: Path) -> None:
    assert read_traffic("chat") == PROFILES["chat"]
    assert read_traffic("chat,rate=9") == PROFILES["chat"].at_rate(9)
    assert read_traffic("rate=9,contexts=3") == Profile(rate=9, contexts=3)
    assert read_traffic('{"profile": "rag", "output": 99}') == Profile("rag", 4, 3332, 99)
    (tmp_path / "mine.json").write_text('{"rate": 2}')
    assert read_traffic(str(tmp_path / "mine.json")) == Profile(rate=2)


def row(number: int, prompt: int = 700) -> str:
    return json.dumps(
        {"timestamp": 500 * number, "input_length": prompt, "output_length": 9, "hash_ids": [1, number + 2]}
    )


def test_a_traces_seeds_are_windows_of_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    too_long = json.dumps(json.loads(row(200)) | {"output_length": 9000})
    path.write_text("\n".join([*map(row, range(200)), too_long]))
    trace = read_trace(path, 8192)
    assert (len(trace.all), trace.skipped) == (200, 1)
    windows = [trace.requests(seed, 40) for seed in range(5)]
    assert len({window[0].segments for window in windows}) == 5
    for window in windows:
        assert len(window) == 40 and window[0].at == 0 and window[-1].at == pytest.approx(39 * 0.5)
        assert window[0].segments[0] == (("hash", 1), 512) and window[0].prompt == 700
    assert trace.at_rate(2 * trace.rate).requests(0, 40)[-1].at == pytest.approx(39 * 0.25)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([row(1)], "has 1 requests of up to 8192 tokens"),
        (["{}"], "line 1 is no request of a Mooncake trace"),
        (["nonsense"], "line 1 is no request"),
        ([row(1, prompt=2000)], "2 hash_ids for 2000 tokens"),
        ([row(0)] * 80, "arrive at once"),
    ],
)
def test_bad_traces_are_refused_in_one_sentence(lines: list[str], says: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(TrafficError) as refusal:
        read_trace(path, 8192)
    assert says in str(refusal.value) and "\n" not in str(refusal.value)
