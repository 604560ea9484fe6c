"""Bytes for a wanted amount of memory, from a demo model's config.json alone.

Independent of the code under test on purpose. Shapes are those of `Mamba2StateShape` and `MHATokenToKVPool`,
all in fp32 (`configs.ENV` and the fp32 checkpoint see to that).
"""

import json
from dataclasses import dataclass
from pathlib import Path

FP32 = 4


@dataclass(frozen=True)
class StateBytes:
    """State of one layer of a Falcon-H1, where every layer has both attention and Mamba."""

    layers: int
    kv_row: int
    ssm_rows: int
    ssm_row: int

    @classmethod
    def of(cls, model_dir: Path) -> "StateBytes":
        """From config.json."""
        config = json.loads((model_dir / "config.json").read_text())
        return cls(
            layers=config["num_hidden_layers"],
            kv_row=2 * config["num_key_value_heads"] * config["head_dim"] * FP32,
            ssm_rows=config["mamba_n_heads"] * config["mamba_d_head"],
            ssm_row=config["mamba_d_state"] * FP32,
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
