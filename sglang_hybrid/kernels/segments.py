"""How a ragged batch of extends is cut into pieces that a scan may work on.

Cut once a forward, on the host, from plain ints; every recurrent layer then uses the same index
tensors.  Pieces never straddle a multiple of the chunk (so a token always shares its piece with
the same neighbours, whatever was cached before it) nor a boundary of the grid (so the state there
exists and can be handed out).

    absolute position   0        64       128      192   grid = 128, chunk = 64
    extend [40, 150)        [40,64)[64,128)|[128,150)    three pieces, two emissions: 128, 150
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_hybrid.kernels.checks import KernelError

MAX_CHUNK = 64
"""Longest piece.  The scan's work inside a piece is quadratic; longer ones gain nothing on a CPU."""


def choose_chunk(grid: int | None, limit: int = MAX_CHUNK) -> int:
    """Largest divisor of `grid` that is at most `limit`; `limit` itself without a grid."""
    if grid is None:
        return limit
    if grid < 1:
        raise KernelError(f"grid is {grid}, needs at least 1")
    return max(size for size in range(1, min(limit, grid) + 1) if grid % size == 0)


@dataclass(frozen=True)
class Segments:
    """Index tensors of one ragged batch: T tokens, S sequences, Q pieces of L slots, K emissions.

    An emission is a state to hand out: at every boundary an extend passes or ends on, and at the
    end of every extend.  Emissions are ordered by sequence, then by position, so the last one of
    sequence b (`last_emission[b]`) is always its end.  "Flat" counts tokens of the batch.
    """

    chunk: int
    grid: int | None
    tokens: int
    sequences: int
    token_seq: torch.Tensor
    """[T] sequence of a token."""
    token_position: torch.Tensor
    """[T] absolute position of a token."""
    token_slot: torch.Tensor
    """[T] place of a token in the padded [Q * L] pieces."""
    piece_tokens: torch.Tensor
    """[Q, L] flat index of the token in a slot; 0 where the slot is padding."""
    piece_mask: torch.Tensor
    """[Q, L] bool, true where the slot holds a token."""
    seq_flat_start: torch.Tensor
    """[S] flat index of the first token of a sequence."""
    piece_seq: torch.Tensor
    """[Q] sequence of a piece."""
    first_piece: torch.Tensor
    """[S] first piece of a sequence; the pieces of a sequence follow each other."""
    piece_starts_seq: torch.Tensor
    """[Q] bool, the piece is the first of its sequence."""
    piece_emission: torch.Tensor
    """[Q] emission of the state after a piece; -1: none."""
    rounds: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]
    """Round i: (pieces [n], their sequences [n], bool [n, 1, 1, 1] "emits"), the i-th pieces of all
    sequences that have one.  Sequential in i, parallel within."""
    emission_piece: torch.Tensor
    """[K] piece whose final state is emitted."""
    emission_seq: torch.Tensor
    """[K] sequence of an emission."""
    emission_flat_end: torch.Tensor
    """[K] flat index just past the emission's last token."""
    last_emission: torch.Tensor
    """[S] emission at the end of a sequence."""
    emissions: tuple[tuple[int, int], ...]
    """Host copy: (sequence, absolute end position) of every emission."""
    longest: int
    """Tokens of the longest extend."""

    @property
    def pieces(self) -> int:
        return self.piece_tokens.shape[0]

    @cached_property
    def emission_index(self) -> dict[tuple[int, int], int]:
        """(sequence, absolute end position) -> emission."""
        return {key: index for index, key in enumerate(self.emissions)}


def piece_bounds(begin: int, length: int, grid: int | None, chunk: int) -> list[tuple[int, int]]:
    """Cut [begin, begin + length) at every multiple of `chunk` and of `grid`; absolute positions."""
    end = begin + length
    cuts = {begin, end, *range(begin - begin % chunk + chunk, end, chunk)}
    if grid is not None:
        cuts.update(range(begin - begin % grid + grid, end, grid))
    ordered = sorted(cuts)
    return list(zip(ordered, ordered[1:]))


def plan_segments(
    query_start: Sequence[int],
    begins: Sequence[int],
    grid: int | None,
    chunk: int | None = None,
    device: torch.device | str = "cpu",
) -> Segments:
    """Cut the extends of a ragged batch into pieces (`Segments`).

    `query_start`: S + 1 flat offsets, extend b is tokens [query_start[b], query_start[b + 1]).
    `begins`: S absolute positions of the extends' first tokens.  `grid`: tokens between two
    boundaries, None for no boundaries (only ends are emitted).  `chunk`: longest piece, default
    `choose_chunk(grid)`; with a grid it must divide the grid, or equal tokens would be cut
    differently at different depths.

    Raises `KernelError` for offsets that do not begin at 0 or do not grow (an empty extend has no
    state to emit), for a number of begins other than S, and for a negative begin.
    """
    starts = [int(start) for start in query_start]
    firsts = [int(begin) for begin in begins]
    if not starts or starts[0] != 0 or any(b <= a for a, b in zip(starts, starts[1:])):
        raise KernelError(f"query_start is {starts}, needs to begin at 0 and to grow with every sequence")
    if len(firsts) != len(starts) - 1 or any(begin < 0 for begin in firsts):
        raise KernelError(f"begins is {firsts}, needs {len(starts) - 1} positions of at least 0")
    chunk = choose_chunk(grid) if chunk is None else chunk
    if chunk < 1 or (grid is not None and grid % chunk):
        raise KernelError(f"chunk is {chunk}, needs a divisor of the grid {grid}")
    return _build(starts, firsts, grid, chunk, torch.device(device))


def _build(
    starts: list[int], begins: list[int], grid: int | None, chunk: int, device: torch.device
) -> Segments:
    flat_start: list[int] = []
    lengths: list[int] = []
    piece_seq: list[int] = []
    first_piece: list[int] = []
    piece_emission: list[int] = []
    emission_piece: list[int] = []
    emission_flat_end: list[int] = []
    emissions: list[tuple[int, int]] = []
    rounds: list[list[int]] = []
    for seq, begin in enumerate(begins):
        first_piece.append(len(piece_seq))
        end = begin + starts[seq + 1] - starts[seq]
        for step, (low, high) in enumerate(piece_bounds(begin, end - begin, grid, chunk)):
            if step == len(rounds):
                rounds.append([])
            rounds[step].append(len(piece_seq))
            emits = high == end or (grid is not None and high % grid == 0)
            piece_emission.append(len(emissions) if emits else -1)
            if emits:
                emission_piece.append(len(piece_seq))
                emission_flat_end.append(starts[seq] + high - begin)
                emissions.append((seq, high))
            piece_seq.append(seq)
            flat_start.append(starts[seq] + low - begin)
            lengths.append(high - low)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    sequences = len(begins)
    tokens = starts[-1]
    per_seq = ints([b - a for a, b in zip(starts, starts[1:])])
    token_seq = torch.repeat_interleave(torch.arange(sequences, device=device), per_seq, output_size=tokens)
    flat = torch.arange(tokens, device=device)
    shift = ints([begin - start for begin, start in zip(begins, starts)])
    piece_of_token = torch.repeat_interleave(
        torch.arange(len(lengths), device=device), ints(lengths), output_size=tokens
    )
    starts_flat = ints(flat_start)
    columns = torch.arange(chunk, device=device)
    mask = columns < ints(lengths)[:, None]
    emission_of_piece = ints(piece_emission)
    seq_of_piece = ints(piece_seq)
    starts_seq = torch.zeros(len(lengths), dtype=torch.bool, device=device)
    starts_seq[ints(first_piece)] = True
    planned_rounds = []
    for pieces in rounds:
        index = ints(pieces)
        planned_rounds.append(
            (index, seq_of_piece[index], (emission_of_piece[index] >= 0)[:, None, None, None])
        )
    ends = [seq for seq, _ in emissions]
    last = {seq: index for index, seq in enumerate(ends)}
    return Segments(
        chunk=chunk,
        grid=grid,
        tokens=tokens,
        sequences=sequences,
        token_seq=token_seq,
        token_position=flat + shift[token_seq],
        token_slot=piece_of_token * chunk + flat - starts_flat[piece_of_token],
        piece_tokens=torch.where(mask, starts_flat[:, None] + columns, 0),
        piece_mask=mask,
        seq_flat_start=ints(starts[:-1]),
        piece_seq=seq_of_piece,
        first_piece=ints(first_piece),
        piece_starts_seq=starts_seq,
        piece_emission=emission_of_piece,
        rounds=tuple(planned_rounds),
        emission_piece=ints(emission_piece),
        emission_seq=ints(ends),
        emission_flat_end=ints(emission_flat_end),
        last_emission=ints([last[seq] for seq in range(sequences)]),
        emissions=tuple(emissions),
        longest=max((b - a for a, b in zip(starts, starts[1:])), default=0),
    )
