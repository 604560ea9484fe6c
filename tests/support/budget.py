"""Bytes for a wanted amount of memory, from a demo model's config.json alone.

Independent of the code under test on purpose. Shapes are those of `Mamba2StateShape` and `MHATokenToKVPool`,
all in fp32 (`configs.ENV` and the fp32 checkpoint see to that).
"""

import json
from dataclasses import dataclass
from pathlib import Path

FP32 = 4

SSM_FIELDS = (
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    ("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim"),
)
"""Heads of a recurrent layer, rows of a head, elements of a row: Mamba2, gated delta rule."""


@dataclass(frozen=True)
class StateBytes:
    """State of one attention layer and of the recurrent layers that lie in its pages."""

    layers: int
    """Attention layers."""
    kv_row: int
    ssm_rows: int
    ssm_row: int

    @classmethod
    def of(cls, model_dir: Path) -> "StateBytes":
        """From config.json."""
        config = json.loads((model_dir / "config.json").read_text())
        kinds = config.get("layer_types")
        # Without kinds every layer has both halves.
        layers = sum(kind.endswith("attention") and kind != "linear_attention" for kind in kinds or ())
        layers = layers if kinds else config["num_hidden_layers"]
        recurrent = len(kinds) - layers if kinds else layers
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        names = next(names for names in SSM_FIELDS if names[0] in config)
        heads, rows, row = (config[name] for name in names)
        return cls(
            layers=layers,
            kv_row=2 * config["num_key_value_heads"] * head_dim * FP32,
            ssm_rows=-(-recurrent // layers) * heads * rows,
            ssm_row=row * FP32,
        )

    def page(self, grid: int) -> int:
        """Bytes of an S1 page: the KV of one grid step in one layer."""
        return grid * self.kv_row

    def w(self, grid: int) -> int:
        """S1 pages of one complete recurrent state: its SSM member pages and its conv page."""
        return -(-self.ssm_rows // (self.page(grid) // self.ssm_row)) + 1

    def pages(self, grid: int, tokens: int, spare: int, running: int) -> int:
        """Pages for K tokens, `spare` checkpoints and R live states (CASES.md: K, spare, R)."""
        return -(-tokens // grid) + (spare + running) * self.w(grid)

    def budget(self, grid: int, pages: int) -> int:
        """`--hybrid-budget-bytes` for exactly so many usable pages, the sink page 0 on top."""
        return (pages + 1) * self.page(grid) * self.layers
