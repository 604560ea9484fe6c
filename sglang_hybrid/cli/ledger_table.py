"""The ledger's answer for people: the tables and sentences of `sglang-hybrid ledger`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sglang_hybrid.pools.shared import PackedConv

WASTE = ("attention_padding", "attention_tail", "checkpoint_rounding", "conv_slab")


def number(value: int | float) -> str:
    """With thousands separators; one decimal where there is a fraction."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def mib(size: int | float) -> str:
    """KiB as MiB."""
    return f"{size / 1024:,.1f}"


def count(value: int, what: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{value:,} {what}{'' if value == 1 else 's'}"


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of cells, the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        yield "  " + "  ".join(cells).rstrip()


def table(answer: dict[str, Any]) -> Iterator[str]:
    """Lines of the report."""
    yield f"{answer['model']}: {answer['family']}, {answer['source']}"
    yield from _geometry(answer)
    yield ""
    yield from _costs(answer)
    if answer["budget_bytes"] is not None:
        yield ""
        yield from _budget(answer)
    yield ""
    yield _break_even(answer)
    yield from _packing(answer)
    yield from (_split(answer, name) for name, one in answer["organizations"].items() if one["split"])


def _geometry(answer: dict[str, Any]) -> Iterator[str]:
    shape = answer["geometry"]
    yield (
        f"TP {answer['tp']}, KV {answer['kv_dtype']}, SSM state {answer['ssm_dtype']}, "
        f"conv {answer['conv_dtype']}; {count(shape['attention_layers'], 'attention layer')}, "
        f"{count(shape['recurrent_layers'], 'recurrent layer')}: {count(shape['arenas'], 'arena')} of one "
        f"attention and {count(shape['stripes'], 'recurrent layer')}"
    )
    if shape["empty_stripes"]:
        yield f"{shape['empty_stripes']} of {shape['arenas'] * shape['stripes']} recurrent places stay empty"
    yield ""
    yield "KiB of one arena"
    members = "no page holds a row" if shape["members"] is None else count(shape["members"], "member page")
    stripes = shape["stripes"]
    rows = [
        ("KV row", number(shape["kv_row_kib"]), "a token"),
        ("attention block", number(shape["block_kib"]), count(answer["grid"], "token")),
        ("SSM state", number(shape["ssm_kib"] * stripes), members),
        ("conv line", number(shape["conv_line_kib"]), f"{number(shape['conv_kib'])} a recurrent layer"),
        (
            "checkpoint",
            number(shape["checkpoint_kib"]),
            f"{shape['checkpoint_bytes']:,} bytes; {mib(shape['checkpoint_kib_total'])} MiB in all arenas",
        ),
    ]
    width = max(len(row[1]) for row in rows)
    for name, size, note in rows:
        yield f"  {name:<15}  {size:>{width}}  {note}"


def _costs(answer: dict[str, Any]) -> Iterator[str]:
    demand = answer["demand"]
    asked = (
        f"{count(demand['attention_blocks'], 'attention block')} and "
        f"{count(demand['checkpoints'], 'checkpoint')}"
    )
    if demand["tokens"] is not None:
        asked = f"{count(demand['tokens'], 'token')}: {asked} at grid {answer['grid']}"
    yield f"{asked}, KiB of one arena; waste by kind"
    head = ("", "grid", "checkpoints", "page", "attention", "state", "total", "MiB, all", "useful")
    rows: list[Sequence[str]] = [(*head, "padding", "tail", "rounding", "slab")]
    refusals = []
    for name, one in answer["organizations"].items():
        if one["refused"]:
            refusals.append(f"  {name} refused: {one['refused']}")
            continue
        sizes = [one[key] for key in ("page_kib", "attention_kib", "state_kib", "kib")]
        share = f"{one['useful_kib'] / one['kib']:.0%}"
        waste = [number(one["waste"][kind]) for kind in WASTE]
        counts = number(one["grid"]), number(one["checkpoints"])
        rows.append((name, *counts, *map(number, sizes), mib(one["kib_total"]), share, *waste))
    yield from columns(rows)
    yield from refusals


def _budget(answer: dict[str, Any]) -> Iterator[str]:
    yield f"budget of {answer['budget_bytes']:,} bytes for all arenas; the sinks are paid from it"
    rows: list[Sequence[str]] = [("", "used", "lost", "sinks", "pages", "holds the demand")]
    for name, one in answer["organizations"].items():
        if one["refused"]:
            continue
        part = one["budget"]
        pages = number(part["pages"])
        if one["split"]:
            pages += f" units + {number(part['checkpoints'])}"
        holds = f"{number(part['holds'])} times" if part["feasible"] else "no"
        sizes = (part[key] for key in ("used_bytes", "lost_bytes", "sink_bytes"))
        rows.append((name, *map(number, sizes), pages, holds))
    yield from columns(rows)


def _break_even(answer: dict[str, Any]) -> str:
    even = answer["break_even"]
    if even["refused"]:
        return "S0 or S1: only S0 is legal at this grid"
    saves = even["s1_saves_kib"]
    here = f"here by {number(saves)} KiB" if saves >= 0 else f"here it is dearer by {number(-saves)} KiB"
    if even["ratio"]:
        ratio = f"{even['fraction']} = {even['ratio']:.3f}"
        return f"S1 is cheaper than S0 above {ratio} blocks a checkpoint; {here}"
    if even["ratio"] == 0:
        return f"S1 is always cheaper than S0, its checkpoints fill their pages; {here}"
    if even["extra_per_checkpoint_kib"] == 0:
        return "S1 costs what S0 costs: both hold a checkpoint in one page of a block"
    return f"S1 is never cheaper than S0, a checkpoint is smaller than a block; {here}"


def _packing(answer: dict[str, Any]) -> Iterator[str]:
    packing, refused = answer["packing"], answer["organizations"][PackedConv.name]["refused"]
    verdict = "packing pays" if packing["pays"] else "packing does not pay"
    yield f"conv line of {number(packing['line_kib'])} KiB: {verdict}"
    for name, key in (("power of two", "power_of_two"), ("tight", "tight")):
        slot = packing[key]
        size = f"  {name:<12}  slot {number(slot['slot_kib'])} KiB"
        if slot["refused"]:
            yield f"{size}: {'refused as S2 is' if slot['refused'] == refused else slot['refused']}"
            continue
        yield (
            f"{size}, {slot['slots_per_page']} a slab, {count(slot['slabs'], 'slab')}: "
            f"saves {number(slot['saved_kib'])} KiB on S1"
        )


def _split(answer: dict[str, Any], name: str) -> str:
    dual, shape = answer["organizations"][name], answer["geometry"]
    own = f"{name}'s native grid is {shape['native_grid']:,} tokens (scan chunk {shape['scan_chunk']})"
    if dual["refused"]:
        return own
    needs = (
        f"{own}; it needs {number(dual['attention_kib'])} KiB for attention and {number(dual['state_kib'])} "
        "for state, both at once"
    )
    part = dual["budget"]
    if part is None:
        return f"{needs} (--budget says whether they fit)"
    at = f"feasible at an attention share of {part['attention_share']:g}"
    if part["feasible_shares"] is None:
        return f"{needs}: not {at}, nor at any other"
    least, largest = part["feasible_shares"]
    if part["feasible"]:
        return f"{needs}: {at}, as at all from {least:g} to {largest:g}"
    return f"{needs}: not {at}, but from {least:g} to {largest:g}"
