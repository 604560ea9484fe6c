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
from sglang_hybrid.kernels.upload import upload_lists

MAX_CHUNK = 64
"""Longest piece.  The scan's work inside a piece is quadratic; longer ones gain nothing on a CPU."""
MAX_BLOCK = 256
"""Longest block.  A block's state goes through memory: shorter blocks cost traffic, longer ones products."""


def choose_chunk(grid: int | None) -> int:
    """Largest divisor of `grid` that is at most `MAX_CHUNK`; `MAX_CHUNK` itself without a grid."""
    if grid is None:
        return MAX_CHUNK
    if grid < 1:
        raise KernelError(f"grid is {grid}, needs at least 1")
    return max(size for size in range(1, min(MAX_CHUNK, grid) + 1) if grid % size == 0)


@dataclass(frozen=True)
class Segments:
    """Index tensors of one ragged batch: T tokens, S sequences, Q pieces of at most L tokens, K emissions.

    An emission is a state to hand out: at every boundary an extend passes or ends on, and at the
    end of every extend.  Emissions are ordered by sequence, then by position, so the last one of
    sequence b (`last_emission[b]`) is always its end.  "Flat" counts tokens of the batch.

    The fields come to the device in one copy; they are what the Triton kernels read.  What the torch route
    needs besides is derived on the device when it is first asked for.  All tensors are int64, masks bool.
    """

    chunk: int
    """L, the most tokens of a piece."""
    grid: int | None
    tokens: int
    sequences: int
    seq_flat_start: torch.Tensor
    """[S] flat index of the first token of a sequence."""
    seq_length: torch.Tensor
    """[S] tokens of a sequence."""
    first_piece: torch.Tensor
    """[S] first piece of a sequence; the pieces of a sequence follow each other."""
    last_emission: torch.Tensor
    """[S] emission at the end of a sequence."""
    piece_start: torch.Tensor
    """[Q] flat index of the first token of a piece; the tokens of a piece follow each other."""
    piece_length: torch.Tensor
    """[Q] tokens of a piece, 1 to L."""
    piece_position: torch.Tensor
    """[Q] absolute position of the first token of a piece."""
    piece_seq: torch.Tensor
    """[Q] sequence of a piece."""
    piece_emission: torch.Tensor
    """[Q] emission of the state after a piece; -1: none."""
    piece_order: torch.Tensor
    """[Q] pieces, the first of every sequence, then the second of all that have one, and so on."""
    first_block: torch.Tensor
    """[S] first block of a sequence.  Blocks have at most `block_tokens` (`block_bounds`): what the Triton
    scan of Mamba2 works on at once."""
    block_start: torch.Tensor
    """[blocks] flat index of the first token of a block."""
    block_length: torch.Tensor
    """[blocks] tokens of a block."""
    block_emission: torch.Tensor
    """[blocks] emission of the state after a block; -1: none."""
    emission_piece: torch.Tensor
    """[K] piece whose final state is emitted."""
    emission_seq: torch.Tensor
    """[K] sequence of an emission."""
    emission_flat_end: torch.Tensor
    """[K] flat index just past the emission's last token."""
    emissions: tuple[tuple[int, int], ...]
    """Host copy: (sequence, absolute end position) of every emission."""
    round_sizes: tuple[int, ...]
    """Host: how many sequences have an i-th piece."""
    longest: int
    """Tokens of the longest extend."""
    block_tokens: int
    """Most tokens of a block."""
    most_blocks: int
    """Blocks of the sequence that has the most."""

    @property
    def blocks(self) -> int:
        return self.block_start.shape[0]

    @property
    def pieces(self) -> int:
        return self.piece_start.shape[0]

    @cached_property
    def emission_index(self) -> dict[tuple[int, int], int]:
        """(sequence, absolute end position) -> emission."""
        return {key: index for index, key in enumerate(self.emissions)}

    @cached_property
    def token_seq(self) -> torch.Tensor:
        """[T] sequence of a token."""
        return self._per_token(self.seq_length)

    @cached_property
    def token_position(self) -> torch.Tensor:
        """[T] absolute position of a token."""
        return self._flat + (self.piece_position - self.piece_start)[self._token_piece]

    @cached_property
    def token_slot(self) -> torch.Tensor:
        """[T] place of a token in the padded [Q * L] pieces."""
        shift = torch.arange(self.pieces, device=self.piece_start.device) * self.chunk - self.piece_start
        return self._flat + shift[self._token_piece]

    @cached_property
    def piece_mask(self) -> torch.Tensor:
        """[Q, L] bool, true where the slot holds a token."""
        return torch.arange(self.chunk, device=self.piece_length.device) < self.piece_length[:, None]

    @cached_property
    def piece_tokens(self) -> torch.Tensor:
        """[Q, L] flat index of the token in a slot; 0 where the slot is padding."""
        columns = torch.arange(self.chunk, device=self.piece_start.device)
        return torch.where(self.piece_mask, self.piece_start[:, None] + columns, 0)

    @cached_property
    def rounds(self) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]:
        """Round i: (pieces [n], their sequences [n], bool [n, 1, 1, 1] "emits"), the i-th pieces of all
        sequences that have one.  Sequential in i, parallel within."""
        emits = (self.piece_emission[self.piece_order] >= 0)[:, None, None, None]
        columns = (self.piece_order, self.piece_seq[self.piece_order], emits)
        return tuple(zip(*(torch.split(column, list(self.round_sizes)) for column in columns)))

    @cached_property
    def _flat(self) -> torch.Tensor:
        return torch.arange(self.tokens, device=self.piece_start.device)

    @cached_property
    def _token_piece(self) -> torch.Tensor:
        return self._per_token(self.piece_length)

    def _per_token(self, lengths: torch.Tensor) -> torch.Tensor:
        """[T] index of the run a token lies in."""
        runs = torch.arange(len(lengths), device=lengths.device)
        return torch.repeat_interleave(runs, lengths, output_size=self.tokens)


class Cut:
    """A ragged batch cut on the host, the index lists of `Segments` not yet on a device."""

    def __init__(self, starts: list[int], begins: list[int], grid: int | None, chunk: int) -> None:
        self.chunk, self.grid, self.starts = chunk, grid, starts
        self.lengths = [high - low for low, high in zip(starts, starts[1:])]
        self.emissions: list[tuple[int, int]] = []
        self.round_sizes: list[int] = []
        lists: dict[str, list[int]] = {
            "seq_flat_start": starts[:-1], "seq_length": self.lengths, "first_piece": [], "last_emission": [],
            "piece_start": [], "piece_length": [], "piece_position": [], "piece_seq": [],
            "piece_emission": [], "piece_order": [],
            "first_block": [], "block_start": [], "block_length": [], "block_emission": [],
            "emission_piece": [], "emission_seq": [], "emission_flat_end": [],
        }  # fmt: skip
        self.lists = lists
        rounds: list[list[int]] = []
        for seq, (begin, start, length) in enumerate(zip(begins, starts, self.lengths)):
            end = begin + length
            lists["first_piece"].append(len(lists["piece_seq"]))
            for step, (low, high) in enumerate(piece_bounds(begin, length, grid, chunk)):
                piece = len(lists["piece_seq"])
                if step == len(rounds):
                    rounds.append([])
                rounds[step].append(piece)
                emission = -1
                if high == end or (grid is not None and high % grid == 0):
                    emission = len(self.emissions)
                    self.emissions.append((seq, high))
                    lists["emission_piece"].append(piece)
                    lists["emission_seq"].append(seq)
                    lists["emission_flat_end"].append(start + high - begin)
                lists["piece_start"].append(start + low - begin)
                lists["piece_length"].append(high - low)
                lists["piece_position"].append(low)
                lists["piece_seq"].append(seq)
                lists["piece_emission"].append(emission)
            lists["last_emission"].append(len(self.emissions) - 1)
        self.block_tokens = MAX_BLOCK if grid is None else min(MAX_BLOCK, grid)
        self.most_blocks = 0
        ends = {end: emission for emission, end in enumerate(lists["emission_flat_end"])}
        for begin, start, length in zip(begins, starts, self.lengths):
            lists["first_block"].append(len(lists["block_start"]))
            bounds = block_bounds(begin, length, grid)
            self.most_blocks = max(self.most_blocks, len(bounds))
            for low, high in bounds:
                lists["block_start"].append(start + low - begin)
                lists["block_length"].append(high - low)
                lists["block_emission"].append(ends.get(start + high - begin, -1))
        lists["piece_order"] = [piece for pieces in rounds for piece in pieces]
        self.round_sizes = [len(pieces) for pieces in rounds]

    def on(self, device: torch.device | str, *more: Sequence[int]) -> tuple[Segments, list[torch.Tensor]]:
        """The segments, and `more` lists of ints beside them, on `device`: one copy, not waited for."""
        lists = [*self.lists.values(), *more]
        tensors = upload_lists(lists, device)
        segments = Segments(
            chunk=self.chunk,
            grid=self.grid,
            tokens=self.starts[-1],
            sequences=len(self.lengths),
            **dict(zip(self.lists, tensors)),
            emissions=tuple(self.emissions),
            round_sizes=tuple(self.round_sizes),
            longest=max(self.lengths, default=0),
            block_tokens=self.block_tokens,
            most_blocks=self.most_blocks,
        )
        return segments, tensors[len(self.lists) :]


def piece_bounds(begin: int, length: int, grid: int | None, chunk: int) -> list[tuple[int, int]]:
    """Cut [begin, begin + length) at every multiple of `chunk` and of `grid`; absolute positions."""
    end = begin + length
    cuts = {begin, end, *range(begin - begin % chunk + chunk, end, chunk)}
    if grid is not None:
        cuts.update(range(begin - begin % grid + grid, end, grid))
    ordered = sorted(cuts)
    return list(zip(ordered, ordered[1:]))


def block_bounds(begin: int, length: int, grid: int | None) -> list[tuple[int, int]]:
    """Cut [begin, begin + length) at every boundary, and each `MAX_BLOCK` tokens from a boundary on.

    A block's state goes through memory: a grid with few divisors must not make many of them.
    """
    end = begin + length
    step = MAX_BLOCK if grid is None else grid
    cuts = {begin, end}
    for boundary in range(begin - begin % step, end, step):
        cuts.update(cut for cut in range(boundary, min(boundary + step, end), MAX_BLOCK) if cut > begin)
    ordered = sorted(cuts)
    return list(zip(ordered, ordered[1:]))


def cut_segments(
    query_start: Sequence[int], begins: Sequence[int], grid: int | None, chunk: int | None = None
) -> Cut:
    """Cut the extends of a ragged batch into pieces, on the host (`Cut.on` brings them to a device).

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
    return Cut(starts, firsts, grid, chunk)


def plan_segments(
    query_start: Sequence[int],
    begins: Sequence[int],
    grid: int | None,
    chunk: int | None = None,
    device: torch.device | str = "cpu",
) -> Segments:
    """`cut_segments` on `device`: same arguments and errors."""
    segments, _ = cut_segments(query_start, begins, grid, chunk).on(device)
    return segments
