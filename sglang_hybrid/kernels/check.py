"""`python -m sglang_hybrid.kernels.check`: are the Triton kernels well compiled and frugal?  No GPU needed.

Every launch of `samples` is compiled for sm_80 and sm_90 and read back from machine code, and its bytes
are counted in the interpreter, which needs a process of its own.  Exits 1 when a kernel spills, touches
state in less than 16 bytes a thread, or moves more than 1.01 times the floor: each byte of state once
in and once out.

`--chains` compiles the prefill of 8,192 tokens at the shapes of real models instead, and says what a warp of
the longest program of each launch issues (`compiled.Chain`): programs, serial steps, instructions and
barriers a step, all instructions.  `python -m bench.chains` sets the stock kernels beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from sglang_hybrid.kernels.launch import WORD_BYTES

if TYPE_CHECKING:
    from sglang_hybrid.kernels.compiled import Chain

CAPABILITIES = (80, 90)
MOST_OVER_FLOOR = 1.01


class Row(NamedTuple):
    """One kernel on one architecture.

    `spills`: instructions that touch local memory; `shared`: bytes; `state_access_bytes`: narrowest access
    to state; `bytes_over_floor`: state bytes moved by the floor; `operand_share`: bytes of inputs, outputs,
    weights and maps asked for, before any cache, by the same floor.
    """

    name: str
    arch: str
    registers: int
    spills: int
    shared: int
    state_access_bytes: int
    bytes_over_floor: float
    operand_share: float

    def faults(self) -> list[str]:
        """What is wrong, in words."""
        found = []
        if self.spills:
            found.append(f"{self.spills} spills")
        if self.state_access_bytes < WORD_BYTES:
            found.append(f"state accesses of {self.state_access_bytes} bytes, needs {WORD_BYTES}")
        if not self.bytes_over_floor <= MOST_OVER_FLOOR:
            found.append(
                f"moves {self.bytes_over_floor:.4f} times the floor, needs {MOST_OVER_FLOOR} or less"
            )
        return found


def count(names: list[str]) -> dict[str, tuple[float, float]]:
    """(state bytes, other bytes) by the floor of each sample; under the interpreter."""
    from sglang_hybrid.kernels.samples import SAMPLES
    from sglang_hybrid.kernels.traffic import traffic

    found = {}
    for name in names:
        sample = SAMPLES[name]()
        moved = traffic(sample.launch, sample.state)
        found[name] = (moved.state / sample.floor, moved.other / sample.floor)
    return found


def rows(names: list[str]) -> list[Row]:
    """Compile here, count in a process under the interpreter; sorted as the samples are."""
    os.environ.pop("TRITON_INTERPRET", None)  # compiling needs real kernels
    counting = subprocess.Popen(
        [sys.executable, "-m", "sglang_hybrid.kernels.check", "--count", *names],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    from sglang_hybrid.kernels.compiled import compile_for
    from sglang_hybrid.kernels.samples import SAMPLES

    compiled = {
        (name, capability): compile_for(SAMPLES[name]().launch, capability)
        for name in names
        for capability in CAPABILITIES
    }
    output, _ = counting.communicate()
    if counting.returncode:
        raise SystemExit("counting bytes in the interpreter failed; its error stands above")
    counts = json.loads(output)
    return [
        Row(
            name, f"sm_{capability}", code.registers, code.spills, code.shared, code.narrowest,
            round(counts[name][0], 4), round(counts[name][1], 4),
        )
        for (name, capability), code in compiled.items()
    ]  # fmt: skip


CHAIN_COLUMNS = f"{'kernel':<64}{'programs':>9}{'steps':>7}{'step':>6}{'barriers':>9}{'chain':>8}"


def chain_line(name: str, programs: int, chain: Chain) -> str:
    """A launch in the columns of `CHAIN_COLUMNS`."""
    return (
        f"{name:<64}{programs:>9}{chain.steps:>7}{chain.step:>6}{chain.barriers:>9}{chain.instructions:>8}"
    )


def print_chains(only: str) -> None:
    """Chains of the launches of `prefills.PREFILLS` on sm_90."""
    from sglang_hybrid.kernels.compiled import chain_of, compile_for
    from sglang_hybrid.kernels.prefills import PREFILLS, prefill_launches

    print(CHAIN_COLUMNS)
    for name, mixer in PREFILLS.items():
        for launch in prefill_launches(mixer) if only in name else ():
            chain = chain_of(compile_for(launch, 90), launch.trips)
            print(chain_line(f"{name}: {launch.kernel.__name__}", prod(launch.grid), chain))


def main() -> None:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_hybrid.kernels.check", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--only", default="", help="samples whose name contains this (default all)")
    parser.add_argument("--chains", action="store_true", help="what the prefills of real models issue")
    parser.add_argument("--count", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count is not None:
        print(json.dumps(count(options.count)))
        return
    os.environ.pop("TRITON_INTERPRET", None)
    if options.chains:
        print_chains(options.only)
        return
    from sglang_hybrid.kernels.samples import SAMPLES

    names = [name for name in SAMPLES if options.only in name]
    if not names:
        parser.error(f"--only {options.only} matches none of: {', '.join(SAMPLES)}")
    table = rows(names)
    if options.json:
        print(json.dumps({"kernels": [row._asdict() for row in table]}, indent=1))
    else:
        print(
            f"{'kernel':<54}{'arch':>6}{'regs':>6}{'spills':>8}{'shared':>8}{'access':>8}{'floor':>8}{'other':>8}"
        )
        for row in table:
            print(
                f"{row.name:<54}{row.arch:>6}{row.registers:>6}{row.spills:>8}{row.shared:>8}"
                f"{row.state_access_bytes:>8}{row.bytes_over_floor:>8.4f}{row.operand_share:>8.4f}"
            )
    faults = [f"{row.name} on {row.arch}: {fault}" for row in table for fault in row.faults()]
    for fault in faults:
        print(fault, file=sys.stderr)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
