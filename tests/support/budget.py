"""Bytes for a wanted amount of memory, from a demo model's config.json alone.

Independent of the code under test on purpose. Shapes are those of `Mamba2StateShape` and `MHATokenToKVPool`,
all in fp32 (`server_config.ENV` and the fp32 checkpoint see to that).
"""

import json
from dataclasses import dataclass
from pathlib import Path

FP32 = 4

SSM_FIELDS = (
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
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
    conv: int
    conv_pages: int = 1
    """S1 pages of its conv line: none where a family has none."""

    @classmethod
    def of(cls, model_dir: Path) -> "StateBytes":
        """From config.json."""
        config = json.loads((model_dir / "config.json").read_text())
        config = config.get("text_config", config)
        blocks = config.get("layers_block_type") or ()
        kinds = config.get("layer_types") or [one for one in blocks if one in ("mamba", "attention")]
        group = config.get("layer_group_size", 0)
        if group:
            kinds = [*["mamba"] * (group - 1), "attention"] * (config["num_hidden_layers"] // group)
        # Without kinds every layer has both halves.
        layers = sum(kind.endswith("attention") and kind != "linear_attention" for kind in kinds or ())
        layers = layers if kinds else config["num_hidden_layers"]
        recurrent = len(kinds) - layers if kinds else layers
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        elements = 2 * config["num_key_value_heads"] * head_dim
        if latent := config.get("kv_lora_rank"):
            elements = latent + config["qk_rope_head_dim"]
        names = next((names for names in SSM_FIELDS if names[0] in config), ())
        # A short convolution keeps its window and nothing else.
        heads, rows, row = (config[name] for name in names) if names else (0, 0, 0)
        stripes = -(-recurrent // layers)
        # Of Mamba2, short convolutions, KDA and (none) lightning attention; nobody asks for another's yet.
        channels = heads * rows + 2 * config.get("mamba_n_groups", 0) * row
        window = config.get("mamba_d_conv", 1) - 1
        if "conv_L_cache" in config:
            channels, window = config["hidden_size"], config["conv_L_cache"] - 1
        if delta := config.get("linear_attn_config"):
            heads, rows = delta["num_heads"], delta["head_dim"]
            row, channels, window = rows, 3 * heads * rows, delta["short_conv_kernel_size"] - 1
        if group:
            heads, rows = config["num_attention_heads"], config["head_dim"]
            row, channels = rows, 0
        return cls(
            layers=layers,
            kv_row=elements * FP32,
            ssm_rows=stripes * heads * rows,
            ssm_row=row * FP32,
            conv=stripes * channels * window * FP32,
            conv_pages=0 if group else 1,
        )

    @property
    def checkpoint(self) -> int:
        """SSM and conv state, rounded up to whole KV rows."""
        return -(-(self.ssm_rows * self.ssm_row + self.conv) // self.kv_row) * self.kv_row

    def page(self, grid: int) -> int:
        """Bytes of an S1 page: the KV of one grid step in one layer."""
        return grid * self.kv_row

    def w(self, grid: int) -> int:
        """S1 pages of one complete recurrent state: its SSM member pages and its conv page."""
        members = -(-self.ssm_rows // (self.page(grid) // self.ssm_row)) if self.ssm_rows else 0
        return members + self.conv_pages

    def pages(self, grid: int, tokens: int, spare: int, running: int) -> int:
        """Pages for K tokens, `spare` checkpoints and R live states (docs/cases.md: K, spare, R)."""
        return -(-tokens // grid) + (spare + running) * self.w(grid)

    def pools(self, organization: str, grid: int, budget: int, share: float | None) -> list[tuple[int, int]]:
        """(pages, bytes of a page) of each pool of a layer, sinks included."""
        arena = budget // self.layers
        if organization == "D0":
            units = int(arena * (share or 0.5)) // self.page(16)
            states = (arena - units * self.page(16)) // self.checkpoint
            return [(units, self.page(16)), (states, self.checkpoint)]
        page = max(self.page(grid), self.checkpoint) if organization == "S0" else self.page(grid)
        return [(arena // page, page)]

    def slots(self, grid: int, tight: bool) -> int:
        """Conv slots of a slab page: of the next power of two, or of the next whole KiB."""
        slot = -(-self.conv // 1024) * 1024 if tight else 1 << (self.conv - 1).bit_length()
        return self.page(grid) // slot

    def most_running(
        self, organization: str, grid: int, budget: int, share: float | None, tight: bool
    ) -> int:
        """Requests of one unit and one live state each that fit at once, while one leaves a boundary."""
        sizes = [pages - 1 for pages, _ in self.pools(organization, grid, budget, share)]
        if organization == "D0":
            return min(sizes[0], sizes[1] - 1)
        pages = {"S0": 1, "S1": self.w(grid), "S2": self.w(grid) - 1}[organization]
        slots = self.slots(grid, tight)
        most = 0
        while (most + 1) * (1 + pages) + 1 + (organization == "S2") * -(-(most + 1) // slots) <= sizes[0]:
            most += 1
        return most

    def budget(self, grid: int, pages: int) -> int:
        """`--hybrid-budget-bytes` for exactly so many usable pages, the sink page 0 on top."""
        return (pages + 1) * self.page(grid) * self.layers
