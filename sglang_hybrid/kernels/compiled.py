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
_BITS = re.compile(r"\.[USB]?(128|64|16|8)(?=\.|$)")


class Compiled(NamedTuple):
    """`registers` of a thread; `spills`: instructions that touch local memory; `shared` bytes of a program;
    `loads` and `stores`: bytes of every access to the state, one an instruction."""

    registers: int
    spills: int
    shared: int
    loads: tuple[int, ...]
    stores: tuple[int, ...]

    @property
    def narrowest(self) -> int:
        """Bytes of the narrowest access to the state; 0 when none was found."""
        return min((*self.loads, *self.stores), default=0)


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
    of_state = False
    for text in code.splitlines():
        if source := _FILE.search(text):
            of_state = Path(source[1]).name == STATE_FILE
        elif opcode := _OPCODE.search(text):
            if opcode["name"] in ("LDL", "STL"):
                spills += 1
            elif of_state:
                (stores if opcode["name"] == "STG" else loads).append(access_bytes(opcode["rest"]))
    return Compiled(int(registers[1]), spills, shared, tuple(loads), tuple(stores))


def access_bytes(modifiers: str) -> int:
    """Bytes a thread moves, from an instruction's modifiers: `.E.128` 16, `.E.U16` 2, `.E` 4."""
    bits = _BITS.search(modifiers)
    return int(bits[1]) // 8 if bits else 4


def _output(tool: Path, *args: str) -> str:
    done = subprocess.run([tool, *args], capture_output=True, text=True)
    if done.returncode:
        raise KernelError(f"{tool.name} failed: {done.stderr[-500:]}")
    return done.stdout
