"""A SGLang plugin of the engine tests: offers the attention backend of `whole_page_backend`, and checks at
every forward that what its whole pages hold behind the tokens is finite."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "whole_pages"
"""Value of `--attention-backend`."""
SCHEDULER = "sglang.srt.managers.scheduler"


def offer() -> None:
    """Offer it to SGLang, and to the rules of `--hybrid-mem`.  Found by SGLang in every server process."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices

    from sglang_hybrid.engine import input_rules

    add_attention_backend_choices([NAME])
    input_rules.ATTENTION_BACKENDS.append(NAME)
    if SCHEDULER in sys.modules:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        register_attention_backend(NAME)(build)
        check_each_forward()


def build(runner: Any) -> Any:
    """The backend for a model runner, which reads latent rows from the pool, as torch's own does."""
    from sglang_hybrid.platforms.kda_ops import read_latent_rows

    read_latent_rows(NAME)
    return importlib.import_module("whole_page_backend").WholePages(runner)


def check_each_forward() -> None:
    """Check after every metadata preparation, on the stream of the forward that follows it."""
    from sglang_hybrid.engine.page_maps import PageMapMetadata

    def checked(prepare: Callable[..., None]) -> Callable[..., None]:
        def prepare_and_check(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
            prepare(self, forward_batch, *args, **kwargs)
            if not fault_planted():
                check_tails(self.requests, forward_batch.req_pool_indices, forward_batch.seq_lens)

        return prepare_and_check

    for name in ("init_forward_metadata", "init_forward_metadata_out_graph"):
        setattr(PageMapMetadata, name, checked(getattr(PageMapMetadata, name)))


def fault_planted() -> bool:
    """Whether a test has taken the guard out: then outputs must show it."""
    folder = os.environ.get("SGLANG_HYBRID_TEST_FAULTS")
    return folder is not None and any(Path(folder).glob("tail-*"))


def check_tails(requests: Any, rows: Any, lengths: Any) -> None:
    """Raise unless all arenas are finite from each sequence's end to the end of its last unit.

    The unit is found as an attention kernel finds it, in SGLang's table.  Row 0 belongs to padding.
    """
    import torch

    organization, arenas = requests.organization, requests.arenas
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        if not row:
            continue
        last = int(requests.req_to_token[row, length - 1])
        unit = last // organization.slots_per_unit
        end = unit * organization.slots_per_unit + organization.unit_tokens
        for arena in range(arenas.model.arenas):
            kv = arenas.kv(arena)[last + 1 : end].float()
            bad = int((~torch.isfinite(kv)).sum())
            assert not bad, (
                f"arena {arena}: {bad} values behind token {length} of request row {row} (unit {unit}, "
                f"slots {last + 1} to {end}) are not finite"
            )
