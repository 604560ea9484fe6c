"""`python -m bench.exact`: what exact mode costs, as CPU time of the demo model's forward pass on one core.

The operations of a forward with random weights of the demo model's shapes, without scheduler and server:
once as the CPU platform serves them, once in exact mode.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from sglang_hybrid.cli.demo_shape import DemoShape
from sglang_hybrid.kernels import causal_conv, conv_update, plan_segments, ssd_scan, state_update
from sglang_hybrid.kernels.exact_attention import exact_attention
from sglang_hybrid.kernels.exact_recurrence import exact_conv, exact_scan
from sglang_hybrid.platforms import exact_ops
from sglang_hybrid.pools.views import ConvView, StateView

GRID = 64
SHAPES = (
    ("prefill of 1 x 512 tokens", 1, 512, 0),
    ("prefill of 4 x 128 tokens", 4, 128, 0),
    ("decode of 1 after 256 tokens", 1, 1, 256),
    ("decode of 8 after 256 tokens", 8, 1, 256),
)
"""Name, sequences, new tokens of each, tokens before."""


class Batch:
    """Inputs of a batch of extends of equal length, and the model's weights."""

    def __init__(self, sequences: int, tokens: int, before: int) -> None:
        shape = self.shape = DemoShape()
        self.sequences, self.tokens, self.before = sequences, tokens, before
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.splits = (queries, keys, keys), (shape.ssm_width, shape.conv_channels, shape.ssm_heads)
        self.qkv, self.o = self._weight(queries + 2 * keys), self._weight(shape.hidden, queries)
        self.inner, self.out = self._weight(sum(self.splits[1])), self._weight(shape.hidden, shape.ssm_width)
        self.up, self.down = (
            self._weight(2 * shape.intermediate),
            self._weight(shape.hidden, shape.intermediate),
        )
        self.head = self._weight(shape.vocab)
        self.taps, self.a = torch.randn(shape.conv_channels, shape.conv_width), -torch.rand(shape.ssm_heads)
        self.x = torch.randn(sequences * tokens, shape.hidden)
        self.kv = torch.randn(2, sequences, before + tokens, shape.kv_heads, shape.head_dim)
        self.states = torch.zeros(sequences, shape.ssm_heads, shape.ssm_head_dim, shape.ssm_state)
        self.windows = torch.zeros(sequences, shape.conv_channels, shape.conv_width - 1)
        starts = [i * tokens for i in range(sequences + 1)]
        self.plan = plan_segments(starts, [before] * sequences, GRID)

    def _weight(self, rows: int, columns: int | None = None) -> torch.Tensor:
        return torch.randn(rows, columns or self.shape.hidden)

    def forward(self, exact: bool) -> torch.Tensor:
        """Logprobs of each sequence's next token."""
        x = self.x
        for _ in range(self.shape.layers):
            h = norm(x)
            x = x + self.attention(h, exact) + self.recurrence(h, exact)
            gate, up = F.linear(norm(x), self.up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, self.down)
        last = x.view(self.sequences, self.tokens, -1)[:, -1]
        return F.linear(norm(last), self.head).log_softmax(-1)

    def attention(self, h: torch.Tensor, exact: bool) -> torch.Tensor:
        """As `TorchNativeAttnBackend` does it, or `exact_attention`; KV is there already."""
        q = F.linear(h, self.qkv).split(self.splits[0], -1)[0]
        outs = []
        for queries, k, v in zip(q.view(self.sequences, self.tokens, self.shape.heads, -1), *self.kv):
            if exact:
                outs.append(exact_attention(queries, k, v, self.before, 0.1))
                continue
            rows = queries
            if self.tokens > 1:
                rows = queries.new_zeros(self.before + self.tokens, *queries.shape[1:])
                rows[self.before :] = queries
            rows, k, v = (t.transpose(0, 1)[None] for t in (rows, k, v))
            whole = F.scaled_dot_product_attention(rows, k, v, is_causal=self.tokens > 1, enable_gqa=True)
            outs.append(whole[0].transpose(0, 1)[-self.tokens :])
        return F.linear(torch.cat(outs).flatten(1), self.o)

    def recurrence(self, h: torch.Tensor, exact: bool) -> torch.Tensor:
        gate, conv_in, dt = F.linear(h, self.inner).split(self.splits[1], -1)
        if exact:
            mixed, _ = exact_conv(conv_in, self.taps, None, self.plan, windows=self.windows)
            y, _ = exact_scan(*self.split(mixed, dt), self.plan, dt_softplus=True, initial_states=self.states)
        elif self.tokens == 1:
            rows = torch.arange(self.sequences)
            mixed = conv_update(ConvView(self.windows), rows, rows, conv_in, self.taps, None)
            _, heads, dim, size = self.states.shape
            view = StateView(self.states.view(-1, heads * dim, size), 0, heads, dim)
            y = state_update(view, rows[:, None], rows[:, None], *self.split(mixed, dt), dt_softplus=True)
        else:
            mixed, _ = causal_conv(conv_in, self.taps, None, self.plan, windows=self.windows)
            y, _ = ssd_scan(*self.split(mixed, dt), self.plan, dt_softplus=True, initial_states=self.states)
        return F.linear(norm(y.flatten(1) * F.silu(gate)), self.out)

    def split(
        self, mixed: torch.Tensor, dt: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, dt, A, B and C of the recurrence."""
        shape = self.shape
        grouped = shape.ssm_groups * shape.ssm_state
        x, b, c = mixed.split([shape.ssm_width, grouped, grouped], -1)
        x = x.reshape(-1, shape.ssm_heads, shape.ssm_head_dim)
        b, c = (t.reshape(-1, shape.ssm_groups, shape.ssm_state) for t in (b, c))
        return x, dt, self.a, b, c


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def milliseconds(run: Callable[[], object], repeats: int = 6) -> float:
    """Least CPU time of a run."""
    run()
    times = []
    for _ in range(repeats):
        begun = time.process_time()
        run()
        times.append(time.process_time() - begun)
    return 1e3 * min(times)


def main() -> None:
    torch.set_num_threads(1)
    print("| forward of the demo model, CPU ms on one core | as served | exact | ratio |\n|---|---|---|---|")
    for name, *sizes in SHAPES:
        with torch.inference_mode():
            batch = Batch(*sizes)
            plain = milliseconds(partial(batch.forward, False))
            exact_ops.install()
            exact = milliseconds(partial(batch.forward, True))
            exact_ops.remove()
        print(f"| {name} | {plain:.1f} | {exact:.1f} | {exact / plain:.1f} |")


if __name__ == "__main__":
    main()
