"""What the compiler made of a launch, read from the machine code: no GPU needed.

Triton's package carries ptxas and nvdisasm, so a kernel can be compiled for any architecture anywhere.
Accesses to the recurrent state are told from others by source file: they are all in `state_access`.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import native_specialize_impl

from sglang_hybrid.kernels.checks import KernelError
from sglang_hybrid.kernels.launch import Launch

STATE_FILE = "state_access.py"

_FILE = re.compile(r'//## File "([^"]+)", line \d+')
_OPCODE = re.compile(r"\b(?P<name>LDG|STG|LDGSTS|RED|ATOMG|LDL|STL)(?P<rest>(?:\.[A-Z0-9_]+)*)\b")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
_BITS = re.compile(r"\.[USB]?(128|64|16|8)(?=\.|$)")


class Compiled(NamedTuple):
    """`registers` of a thread; `spills`: instructions that touch local memory; `shared` bytes of a program;
    `loads` and `stores`: bytes of every access to the state, one an instruction."""

    registers: int
    spills: int
    shared: int
    loads: tuple[int, ...]
    stores: tuple[int, ...]
    barriers: tuple[bool, ...]
    """Of every instruction, in order: whether all warps of the program wait at it."""
    loops: tuple[tuple[int, int], ...]
    """First and last instruction of every loop, in the order in which they begin."""

    @property
    def narrowest(self) -> int:
        """Bytes of the narrowest access to the state; 0 when none was found."""
        return min((*self.loads, *self.stores), default=0)


class Chain(NamedTuple):
    """What a warp of a launch's longest program issues, one instruction after another.

    `steps`: passes through innermost loops; `step` and `barriers`: instructions and barriers of a pass
    through the one that issues most; `instructions`: all of them.
    """

    steps: int
    step: int
    barriers: int
    instructions: int


def chain_of(code: Compiled, trips: tuple[int, ...]) -> Chain:
    """The chain of a launch whose longest program goes `trips` times through its loops (`Launch.trips`).

    Raises `KernelError` when the machine code has another number of loops: then one was unrolled or removed.
    """
    if len(code.loops) != len(trips):
        raise KernelError(f"the code has {len(code.loops)} loops, needs {len(trips)}: {code.loops}")
    passes = [1] * len(code.barriers)
    for (first, last), count in zip(code.loops, trips):
        for index in range(first, last + 1):
            passes[index] *= count
    inner = [
        (first, last)
        for first, last in code.loops
        if not any(first <= low and high <= last and (low, high) != (first, last) for low, high in code.loops)
    ]
    first, last = max(inner, key=lambda loop: sum(passes[loop[0] : loop[1] + 1]), default=(0, -1))
    return Chain(
        sum(passes[low] for low, _ in inner),
        last - first + 1,
        sum(code.barriers[first : last + 1]),
        sum(passes),
    )


def source_of(launch: Launch) -> ASTSource:
    """The launch specialized as Triton's runtime would: constants, types, and what divides by 16."""
    kernel, args = launch.kernel, launch.args
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible: dict[tuple[int], Any] = {}
    for index, param in enumerate(kernel.params):
        value = args[param.name]
        kind, hint = "constexpr", None
        if not param.is_constexpr:
            by_value, by_alignment = not param.do_not_specialize, not param.do_not_specialize_on_alignment
            kind, hint = native_specialize_impl(CUDABackend, value, False, by_value, by_alignment)
        signature[param.name] = kind
        if kind == "constexpr":
            constants[param.name] = value
        elif isinstance(hint, str):
            divisible[(index,)] = CUDABackend.parse_attr(hint)
    return ASTSource(kernel, signature, constants, divisible)


def compile_for(launch: Launch, capability: int) -> Compiled:
    """Compile for sm_<capability> and read the machine code; Triton's cache makes a second call cheap."""
    target = GPUTarget("cuda", capability, 32)
    kernel = triton.compile(source_of(launch), target=target, options=launch.options)
    return read_code(kernel.asm["cubin"], kernel.metadata.shared)


def read_code(cubin: bytes, shared: int) -> Compiled:
    """Read a cubin.  Raises `KernelError` when the disassembler fails."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code = _output(tools / "nvdisasm", "--print-code", "--print-line-info", file.name)
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    if registers is None:
        raise KernelError(f"cuobjdump names no registers: {usage[:200]!r}")
    spills = 0
    loads: list[int] = []
    stores: list[int] = []
    barriers: list[bool] = []
    loops: list[tuple[int, int]] = []
    labels: dict[str, int] = {}
    of_state = False
    for text in code.splitlines():
        if label := _LABEL.match(text):
            labels[label[1]] = len(barriers)
        if instruction := _INSTRUCTION.search(text):
            branch = _BRANCH.search(instruction[1])
            if branch and labels.get(branch[1], len(barriers)) < len(barriers):
                loops.append((labels[branch[1]], len(barriers)))
            barriers.append("BAR." in instruction[1])
        if source := _FILE.search(text):
            of_state = Path(source[1]).name == STATE_FILE
        elif opcode := _OPCODE.search(text):
            if opcode["name"] in ("LDL", "STL"):
                spills += 1
            elif of_state:
                (stores if opcode["name"] == "STG" else loads).append(access_bytes(opcode["rest"]))
    return Compiled(
        int(registers[1]), spills, shared, tuple(loads), tuple(stores), tuple(barriers), tuple(sorted(loops))
    )


def access_bytes(modifiers: str) -> int:
    """Bytes a thread moves, from an instruction's modifiers: `.E.128` 16, `.E.U16` 2, `.E` 4."""
    bits = _BITS.search(modifiers)
    return int(bits[1]) // 8 if bits else 4


def _output(tool: Path, *args: str) -> str:
    done = subprocess.run([tool, *args], capture_output=True, text=True)
    if done.returncode:
        raise KernelError(f"{tool.name} failed: {done.stderr[-500:]}")
    return done.stdout
