"""Short-convolution layers over conv lines: our backend stands in for the forward of LFM2's layers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_hybrid.engine.page_maps import DecodeMaps, ExtendMaps
from sglang_hybrid.engine.seams import SeamError
from sglang_hybrid.kernels import choose, plan_segments
from sglang_hybrid.pools.views import ConvView
from tests.support.recurrence import convolve, relative_error

HIDDEN, WIDTH = 6, 3
BATCH = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False))
IDLE = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: True))


class Layer:
    """What our backend reads of `Lfm2ShortConv`; projections are plain matrices."""

    layer_idx = 7

    def __init__(self) -> None:
        self.inner, self.outer = torch.randn(3 * HIDDEN, HIDDEN), torch.randn(HIDDEN, HIDDEN)
        self.conv_weight, self.conv_bias = torch.randn(HIDDEN, WIDTH), torch.randn(HIDDEN)

    def in_proj(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.inner.T, None

    def out_proj(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.outer.T, None

    def want(self, x: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """One sequence after `window`, as the model is defined."""
        before, after, value = self.in_proj(x)[0].chunk(3, -1)
        mixed, windows = convolve(before * value, self.conv_weight, self.conv_bias, False, window)
        return self.out_proj(after * mixed.float())[0], windows


def backend(lines: torch.Tensor, maps: DecodeMaps | ExtendMaps) -> Any:
    from sglang_hybrid.engine.short_conv import HybridShortConvBackend

    made = object.__new__(HybridShortConvBackend)
    made.route, made.convs, made.forward_metadata = choose("torch", "cpu"), {7: ConvView(lines)}, maps
    return made


def test_prefill_hands_out_the_window_of_every_boundary() -> None:
    """Two sequences, one resumed.  A row behind the batch's tokens is padding."""
    torch.manual_seed(1)
    layer, x = Layer(), torch.randn(15, HIDDEN)
    lines = torch.full((8, HIDDEN, WIDTH - 1), float("nan"))
    lines[3] = torch.randn(HIDDEN, WIDTH - 1)
    before = lines.clone()
    source, target = torch.tensor([-1, 3]), torch.tensor([5, 6, 7])
    maps = ExtendMaps(plan_segments([0, 11, 14], [0, 8], 8), source[:, None], source, target[:, None], target)
    y = backend(lines, maps).mix(layer, x, BATCH)
    assert y.shape == (15, HIDDEN)
    for begin, end, window, emitted in (
        (0, 11, torch.zeros(HIDDEN, WIDTH - 1), {8: 5, 11: 6}),
        (11, 14, before[3], {3: 7}),
    ):
        want, windows = layer.want(x[begin:end], window)
        assert relative_error(y[begin:end], want) < 2e-6
        for tokens, line in emitted.items():
            assert relative_error(lines[line], windows[tokens - 1]) < 2e-6
    assert torch.equal(lines[3], before[3])


def test_a_decode_step_forks() -> None:
    """Two requests read one line and write two; a padding row has no source and goes to the sink."""
    torch.manual_seed(2)
    layer, x = Layer(), torch.randn(3, HIDDEN)
    lines = torch.randn(6, HIDDEN, WIDTH - 1)
    before = lines.clone()
    source, target = torch.tensor([4, 4, -1]), torch.tensor([2, 5, 0])
    maps = DecodeMaps(source[:, None], source, target[:, None], target)
    y = backend(lines, maps).mix(layer, x, BATCH)
    for row in range(2):
        want, windows = layer.want(x[row : row + 1], before[4])
        assert relative_error(y[row], want[0]) < 2e-6
        assert relative_error(lines[int(target[row])], windows[0]) < 2e-6
    assert torch.equal(lines[[1, 3, 4]], before[[1, 3, 4]])


def test_an_idle_batch_passes_through() -> None:
    x = torch.randn(2, HIDDEN)
    source = torch.tensor([-1])
    made = backend(torch.zeros(2, HIDDEN, 2), DecodeMaps(source[:, None], source, source[:, None], source))
    assert made.mix(Layer(), x, IDLE) is x


def model(*layers: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(*layers)


def stock_layer(kind: Any, index: int) -> torch.nn.Module:
    made: torch.nn.Module = object.__new__(kind)
    torch.nn.Module.__init__(made)
    made.layer_idx = index  # type: ignore[assignment]
    return made


def test_every_layer_with_windows_is_taken_over() -> None:
    from sglang.srt.models.lfm2 import Lfm2BidirectionalShortConv, Lfm2ShortConv
    from sglang.srt.models.lfm2_moe import Lfm2MoeShortConv

    made = backend(torch.zeros(2, HIDDEN, 2), None)  # type: ignore[arg-type]
    for kind in (Lfm2ShortConv, Lfm2MoeShortConv):
        layer = stock_layer(kind, 7)
        made.take_over(model(torch.nn.Linear(2, 2), layer))
        assert layer.forward.func == made.mix and layer.forward.args == (layer,)
    for wrong in (
        model(),
        model(stock_layer(Lfm2ShortConv, 6)),
        model(stock_layer(Lfm2ShortConv, 7), stock_layer(Lfm2ShortConv, 8)),
        model(stock_layer(Lfm2BidirectionalShortConv, 7)),
    ):
        with pytest.raises(SeamError, match=r"expected \[7\], found"):
            made.take_over(wrong)


def test_nobody_gets_a_slot_pool() -> None:
    made = backend(torch.zeros(2, HIDDEN, 2), None)  # type: ignore[arg-type]
    with pytest.raises(SeamError, match="layer 5 asks for a slot pool"):
        made.conv_state_metadata(5, BATCH)
