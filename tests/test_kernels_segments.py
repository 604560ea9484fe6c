"""A ragged batch is cut where the absolute position says, whatever the batch looks like."""

from collections.abc import Sequence

import pytest
import torch

from sglang_hybrid.kernels import KernelError, choose_chunk, plan_segments
from sglang_hybrid.kernels.segments import Segments

BASE: tuple[tuple[int, ...], tuple[int, ...], int | None] = ((19, 25, 37), (0, 16, 8), 8)
CASES = [
    BASE,
    ((1,), (0,), 8),
    ((19, 25, 37), (0, 16, 8), None),
    ((19, 25, 37), (0, 16, 8), 16),
    ((19, 25, 37), (0, 16, 8), 1),
    ((19, 25, 37), (0, 16, 8), 12),
    ((19, 25, 37), (3, 7, 5), 8),
    ((8, 16, 24), (0, 8, 0), 8),
    ((1, 1, 1), (7, 8, 9), 8),
    ((600, 1, 130), (500, 511, 0), 512),
    ((600, 70), (0, 63), 96),
    ((130,), (0,), 134),
]


def plan(lengths: Sequence[int], begins: Sequence[int], grid: int | None) -> Segments:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return plan_segments(starts, begins, grid)


@pytest.mark.parametrize(("lengths", "begins", "grid"), CASES)
def test_pieces_cover_the_batch_and_never_straddle(
    lengths: tuple[int, ...], begins: tuple[int, ...], grid: int | None
) -> None:
    cut = plan(lengths, begins, grid)
    tokens = [int(t) for row, mask in zip(cut.piece_tokens, cut.piece_mask, strict=True) for t in row[mask]]
    assert tokens == list(range(sum(lengths)))
    for piece in range(cut.pieces):
        inside = cut.piece_tokens[piece][cut.piece_mask[piece]]
        assert set(cut.token_seq[inside].tolist()) == {int(cut.piece_seq[piece])}
        positions = cut.token_position[inside].tolist()
        assert positions == list(range(positions[0], positions[-1] + 1))
        for step in (cut.chunk, grid):
            if step is not None:
                assert positions[0] // step == positions[-1] // step


@pytest.mark.parametrize(("lengths", "begins", "grid"), CASES)
def test_every_boundary_and_every_end_is_emitted_once(
    lengths: tuple[int, ...], begins: tuple[int, ...], grid: int | None
) -> None:
    cut = plan(lengths, begins, grid)
    want = []
    for seq, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        for position in range(begin + 1, begin + length + 1):
            if position == begin + length or (grid is not None and position % grid == 0):
                want.append((seq, position))
    assert list(cut.emissions) == want
    flat = [int(end) - 1 for end in cut.emission_flat_end]
    assert [(int(cut.token_seq[t]), int(cut.token_position[t]) + 1) for t in flat] == want
    for index, piece in enumerate(cut.emission_piece.tolist()):
        assert int(cut.piece_emission[piece]) == index
        assert int(cut.piece_tokens[piece][cut.piece_mask[piece]][-1]) == flat[index]
    assert [cut.emissions[i] for i in cut.last_emission.tolist()] == [
        (seq, begin + length) for seq, (begin, length) in enumerate(zip(begins, lengths, strict=True))
    ]


@pytest.mark.parametrize(("lengths", "begins", "grid"), CASES)
def test_index_tensors_agree_with_each_other(
    lengths: tuple[int, ...], begins: tuple[int, ...], grid: int | None
) -> None:
    cut = plan(lengths, begins, grid)
    slots = cut.piece_tokens.flatten()[cut.token_slot]
    assert torch.equal(slots, torch.arange(cut.tokens)) and cut.piece_mask.flatten()[cut.token_slot].all()
    for seq, begin in enumerate(begins):
        assert int(cut.token_position[cut.seq_flat_start[seq]]) == begin
    done: list[int] = []
    for depth, (pieces, sequences, emits) in enumerate(cut.rounds):
        assert pieces.tolist() == (cut.first_piece[sequences] + depth).tolist()
        assert torch.equal(emits.flatten(), cut.piece_emission[pieces] >= 0)
        done += pieces.tolist()
    assert sorted(done) == list(range(cut.pieces))


@pytest.mark.parametrize(("lengths", "begins", "grid"), CASES)
def test_blocks_are_pieces_of_up_to_256_tokens(
    lengths: tuple[int, ...], begins: tuple[int, ...], grid: int | None
) -> None:
    cut = plan(lengths, begins, grid)
    assert cut.block_tokens == min(256, grid or 256)
    firsts = [*cut.first_block.tolist(), cut.blocks]
    assert cut.most_blocks == max(high - low for low, high in zip(firsts, firsts[1:]))
    ends: dict[int, int] = {}
    for seq, begin in enumerate(begins):
        position = begin
        for block in range(firsts[seq], firsts[seq + 1]):
            length = int(cut.block_length[block])
            assert int(cut.block_start[block]) == int(cut.seq_flat_start[seq]) + position - begin
            step = grid or 256
            assert position // step == (position + length - 1) // step
            assert position % step // 256 == (position + length - 1) % step // 256
            position += length
            ends[int(cut.block_emission[block])] = position
        assert position == begin + lengths[seq]
    assert [ends[index] for index in range(len(cut.emissions))] == [end for _, end in cut.emissions]


@pytest.mark.parametrize(("grid", "blocks"), [(512, 32), (520, 47), (521, 47), (64, 128), (None, 32)])
def test_a_grid_without_divisors_has_no_more_blocks(grid: int | None, blocks: int) -> None:
    """Each block of 8,192 tokens keeps a whole state in memory while the prefill runs."""
    assert plan((8192,), (0,), grid).blocks == blocks


def test_a_token_has_the_same_neighbours_whatever_was_cached() -> None:
    cold = plan((200,), (0,), 48)
    for begin in (48, 96, 144):
        resumed = plan((200 - begin,), (begin,), 48)
        assert resumed.chunk == cold.chunk
        tail = cold.piece_tokens[-resumed.pieces :]
        assert torch.equal(resumed.piece_mask, cold.piece_mask[-resumed.pieces :])
        assert torch.equal((resumed.piece_tokens + begin)[resumed.piece_mask], tail[resumed.piece_mask])


@pytest.mark.parametrize(
    ("grid", "chunk"), [(None, 64), (512, 64), (1792, 64), (8, 8), (96, 48), (100, 50), (67, 1), (1, 1)]
)
def test_chunk_divides_the_grid(grid: int | None, chunk: int) -> None:
    assert choose_chunk(grid) == chunk


@pytest.mark.parametrize(
    ("starts", "begins", "grid", "chunk", "word"),
    [
        ([1, 4], [0], 8, None, "query_start"),
        ([0, 4, 4], [0, 0], 8, None, "query_start"),
        ([], [], 8, None, "query_start"),
        ([0, 4], [0, 0], 8, None, "begins"),
        ([0, 4], [-1], 8, None, "begins"),
        ([0, 4], [0], 8, 3, "chunk"),
        ([0, 4], [0], 0, None, "grid"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_named(
    starts: list[int], begins: list[int], grid: int, chunk: int | None, word: str
) -> None:
    with pytest.raises(KernelError, match=word):
        plan_segments(starts, begins, grid, chunk)


def test_an_empty_batch_has_no_pieces() -> None:
    cut = plan_segments([0], [], 8)
    assert (cut.tokens, cut.sequences, cut.pieces, cut.emissions, cut.rounds) == (0, 0, 0, (), ())
