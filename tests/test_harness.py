"""The harness of the engine tests judges; here it is judged itself, without a server."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.budget import StateBytes
from tests.support.cold import differences
from tests.support.configs import CONFIGS
from tests.support.expect import DenseGrid, common_prefix, hit
from tests.support.reply import Reply
from tests.support.server import LiveServer, ServerDied
from tests.support.tokens import T

COLD = Reply(ids=(7, 8, 9), logprobs=(-0.1, -0.2, -0.3), gaps=(1.0, 0.01, 1.0))


def test_prompts_differ_everywhere() -> None:
    assert {5 <= token <= 511 for s in range(507) for token in T(s, 50)} == {True}
    for a, b in ((1, 2), (0, 506), (100, 207)):
        assert all(x != y for x, y in zip(T(a, 400), T(b, 400), strict=True))
    assert T(3, 40)[:17] == T(3, 17)


@pytest.mark.parametrize(
    ("common", "n", "start", "tokens"),
    [(7, 7, None, 0), (8, 8, None, 0), (9, 9, None, 8), (17, 17, None, 16), (43, 43, None, 40),
     (43, 43, 39, 32), (42, 66, None, 40), (42, 66, 0, 0), (42, 66, -1, 40)],
)  # fmt: skip
def test_hit_formula(common: int, n: int, start: int | None, tokens: int) -> None:
    assert hit(8, common, n, start) == tokens


def test_dense_grid() -> None:
    grid = DenseGrid(8)
    grid.commit(T(1, 20), [1, 2, 3, 4, 5])
    assert grid.hit([*T(1, 20), 1, 2, 3, 4, 5, 6]) == 24
    assert grid.hit([*T(1, 20), 9, 9, 9, 9, 9, 9]) == 16
    assert grid.hit(T(1, 20), key=("a", None)) == 0
    grid.commit(T(1, 17), [9])
    assert grid.nodes() == 3
    grid.commit(T(1, 17), [9], key=("a", None))
    assert grid.nodes() == 5
    grid.clear()
    assert grid.nodes() == grid.hit(T(1, 20)) == 0


def test_common_prefix() -> None:
    assert (common_prefix([1, 2, 3], [1, 2]), common_prefix([1], [2]), common_prefix([], [2])) == (2, 0, 0)


@pytest.mark.parametrize(
    ("change", "equal"),
    [
        ({}, True),
        ({"logprobs": (-0.1005, -0.2, -0.3)}, True),
        ({"logprobs": (-0.102, -0.2, -0.3)}, False),
        ({"ids": (6, 8, 9)}, False),
        ({"ids": (7, 8)}, False),
        # At the near tie another token is no fault, if it was as likely; what follows cannot be compared.
        ({"ids": (7, 5, 4), "logprobs": (-0.1, -0.21, -9.0)}, True),
        ({"ids": (7, 5, 4), "logprobs": (-0.1, -0.9, -0.3)}, False),
        ({"ids": (6, 5, 4)}, False),
        ({"ids": (7, 8, 4)}, False),
    ],
)
def test_differences_to_cold(change: dict[str, tuple[float, ...]], equal: bool) -> None:
    assert (differences(replace(COLD, **change), COLD) is None) == equal


def test_prefill_log(tmp_path: Path) -> None:
    server = LiveServer([], tmp_path / "log", {})
    (tmp_path / "log").write_text("[x] Prefill batch, #new-seq: 9, #new-token: 9, #cached-token: 9, usage\n")
    mark = server.log_mark()
    with (tmp_path / "log").open("a") as log:
        log.write("[x] Prefill batch, #new-seq: 3, #new-token: 81, #cached-token: 16, usage\nDecode batch\n")
    assert server.prefill_batches(mark) == [(3, 81, 16)]


def test_a_dead_server_is_reported(tmp_path: Path) -> None:
    server = LiveServer(["--no-such-flag-anywhere"], tmp_path / "log", {})
    with pytest.raises(ServerDied, match=r"(?s)status 2.*model-path"):
        server.start()
    server.stop()


def test_budget_of_a_small_model(tmp_path: Path) -> None:
    """Two layers, KV rows of 256 bytes, 24 state rows of 128: three members and a conv page at grid 4."""
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, '
        '"mamba_n_heads": 3, "mamba_d_head": 8, "mamba_d_state": 32}'
    )
    state = StateBytes.of(tmp_path)
    assert (state.page(4), state.w(4)) == (1024, 4)
    assert state.pages(4, tokens=10, spare=2, running=1) == 3 + 3 * 4
    assert state.budget(4, pages=15) == 16 * 1024 * 2


def test_budget_of_separate_layers(tmp_path: Path) -> None:
    """Three recurrent layers over two attention layers: two stripes of 24 rows in the pages of either."""
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 5, "num_key_value_heads": 2, "hidden_size": 64, "num_attention_heads": 4, '
        '"layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention", '
        '"linear_attention"], '
        '"linear_num_value_heads": 3, "linear_value_head_dim": 8, "linear_key_head_dim": 32}'
    )
    state = StateBytes.of(tmp_path)
    assert (state.layers, state.page(4), state.w(4)) == (2, 1024, 7)


def test_names_of_configurations() -> None:
    assert all(name == config.name for name, config in CONFIGS.items())
