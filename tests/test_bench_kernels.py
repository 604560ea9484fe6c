"""The kernel bench parses its arguments and, without a GPU, says so instead of timing anything."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from bench.kernel_cases import sets_for
from bench.kernels import SHAPES, Result, main, summary


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.kernels", *args])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main()


def test_it_skips_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch)
    assert capsys.readouterr().out == "No CUDA device is visible, so the kernels were not timed.\n"
    run(monkeypatch, "--json", "--batch", "1,8", "--shape", "Qwen3-Next fp32")
    assert "No CUDA device" in json.loads(capsys.readouterr().out)["skipped"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--batch", "1,x"), "--batch 1,x is no comma list of positive numbers"),
        (("--batch", "0"), "--batch 0 is no comma list of positive numbers"),
        (("--shape", "Falcon"), "--shape Falcon is unknown; choose among Falcon-H1-7B bf16"),
        (("--operation", "scan"), "--operation scan is unknown; choose among state_update, delta_update"),
        (
            ("--operation", "paged_scan,state_update", "--shape", "Qwen3-Next fp32"),
            "layers of Qwen3-Next fp32 have no paged_scan,state_update",
        ),
    ],
)
def test_wrong_arguments_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *args)
    assert message in capsys.readouterr().err


def test_sets_keep_the_arenas_small() -> None:
    for mixer, dtype in SHAPES.values():
        for batch in (1, 64, 256):
            for step_bytes in (2 * mixer.channels * 6, 2 * mixer.inner * mixer.size * dtype.itemsize):
                sets = sets_for(mixer, dtype, batch, step_bytes)
                held = 2 * batch * sets * mixer.stripes * mixer.inner * mixer.size * dtype.itemsize
                assert 4 <= sets <= 128 and held <= 16 << 30


def test_the_summary_names_the_worst_of_each_comparison() -> None:
    def result(variant: str, batch: int, time: float, share: float) -> Result:
        return Result("state_update", "a shape", variant, batch, time, 0.0, share)

    lines = list(
        summary(
            [
                result("D0 in place", 64, 10.0, 0.9),
                result("S1 in place", 64, 10.2, 0.88),
                result("S1 forked", 64, 10.4, 0.86),
                result("S1 in place", 1, 4.0, 0.1),
                result("FlashInfer D0 in place", 64, 20.0, 0.4),
            ]
        )
    )
    assert lines == [
        "state_update a shape, worst: paged/contiguous 1.020, forked/in place 1.020, D0/FlashInfer 0.500, "
        "share of copy from batch 64 86.0%"
    ]
