"""A [groups, V] tile as V columns and back, inside a thread's registers.

A thread reads 16 bytes at a time, V elements of one group.  Taps of a conv window lie V to a word
whatever its width is, so the convolution works on columns, picked by constant index.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def columns(tile: tl.tensor, V: tl.constexpr) -> tl.tuple:
    """[groups, V] -> V tensors [groups]; V is 4 or 8."""
    groups: tl.constexpr = tile.shape[0]
    if V == 8:
        even, odd = tl.split(tl.reshape(tile, [groups, 4, 2]))
        e = columns(even, 4)
        o = columns(odd, 4)
        return (e[0], o[0], e[1], o[1], e[2], o[2], e[3], o[3])
    else:
        even, odd = tl.split(tl.reshape(tile, [groups, 2, 2]))
        c0, c2 = tl.split(even)
        c1, c3 = tl.split(odd)
        return (c0, c1, c2, c3)


@triton.jit
def tile_of(c: tl.tuple, V: tl.constexpr) -> tl.tensor:
    """V tensors [groups] -> [groups, V]; V is 4 or 8."""
    groups: tl.constexpr = c[0].shape[0]
    if V == 8:
        even = tile_of((c[0], c[2], c[4], c[6]), 4)
        odd = tile_of((c[1], c[3], c[5], c[7]), 4)
        return tl.reshape(tl.join(even, odd), [groups, 8])
    else:
        return tl.reshape(tl.join(tl.join(c[0], c[2]), tl.join(c[1], c[3])), [groups, 4])
