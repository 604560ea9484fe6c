"""How deep a prompt could have been reused, and why it was not (docs/architecture.md).

What requests once computed is remembered after it has left memory, by fingerprint and without any
token: for each boundary whether a checkpoint was taken there, and in eighths of a grid step how far
text went on beyond it.  Fingerprints chain, so one stands for the whole path before it.  They are
64 bits wide: a report may be wrong once in some 10^19 comparisons, and nothing but reports hangs on it.

Memory is bounded by the pool: `FINGERPRINTS_PER_BLOCK` times the attention blocks that fit in it, at
about 100 bytes each.  What is forgotten counts as never computed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable
from enum import IntEnum, StrEnum
from typing import NamedTuple

from sglang_hybrid.geometry import ceil_div
from sglang_hybrid.radix.tree import GridTree, Match

PIECES = 8
"""Parts of a grid step in which text beyond the last boundary is compared."""

BOUNDARIES_PER_BLOCK = 4
INNER_PER_BLOCK = 8
FINGERPRINTS_PER_BLOCK = 2 * BOUNDARIES_PER_BLOCK + INNER_PER_BLOCK
LEAST_BLOCKS = 256
"""A smaller pool remembers as if it had so many blocks."""


class Cause(StrEnum):
    """Why a prompt was not reused deeper.  The first three explain Gap_R, at the boundary R_max."""

    NEVER_TAKEN = "never_taken"
    """The placement wanted no checkpoint there, or none to stay."""
    REFUSED = "refused_for_memory"
    """A checkpoint was wanted and found no memory."""
    EVICTED = "evicted"
    """It stood there, or its KV did, and had to go."""
    OTHER_KEY = "other_key"
    """Deeper boundaries were computed under another extra key or cache salt."""
    OFF_GRID = "off_grid"
    """Text was shared beyond R_max, but not as far as the next boundary that can be used."""
    BELOW_GRID = "below_grid_step"
    """Text was shared, but less than one grid step of it can be used."""


class Reuse(NamedTuple):
    """What an admission found, in tokens.

    `r_max` is the deepest boundary that an earlier request of the same key had computed, whether or
    not anything of it is left; `attention` is how deep its KV is still there, `j_adopt` where both
    halves are: the request starts from it.  `lost` tokens more would have been reused without
    `cause`; for the first three causes they are Gap_R.
    """

    prompt: int
    r_max: int
    attention: int
    j_adopt: int
    lost: int
    cause: Cause | None

    @property
    def gap_r(self) -> int:
        return self.r_max - self.j_adopt


class Fate(IntEnum):
    """What became of a checkpoint when its boundary was last computed."""

    NEVER = 0
    REFUSED = 1
    TAKEN = 2


class Trail:
    """A request's own text as a chain of fingerprints, one a piece."""

    __slots__ = ("chain", "recorded", "refused", "seed", "waited")

    def __init__(self, namespace: Hashable) -> None:
        self.seed = hash(namespace)
        self.chain = [0]
        """`chain[i]` stands for the text of the first i pieces, whatever the key."""
        self.waited = False
        """The request has let a running prefill go ahead."""
        self.recorded = 0
        """Pieces that the history has from this request or had before it."""
        self.refused: set[int] = set()
        """Token depths where a checkpoint found no memory and that are not recorded yet."""

    def keyed(self, piece: int) -> int:
        return hash((self.seed, self.chain[piece]))


class Lookup:
    """The last match of a request that waits: what its admission is judged by."""

    __slots__ = ("match", "namespace", "trail", "usable")

    def __init__(self, namespace: Hashable, usable: int, match: Match, trail: Trail | None = None) -> None:
        self.namespace = namespace
        self.usable = usable
        """Tokens that the match could cover."""
        self.match = match
        self.trail = trail
        """Of its text, once somebody has asked; kept from lookup to lookup."""


class Recent:
    """A dict of bounded size that forgets what was put longest ago, half of it at a time."""

    def __init__(self, most: int) -> None:
        self._half = ceil_div(most, 2)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: int) -> int | None:
        found = self._young.get(key)
        return self._old.get(key) if found is None else found

    def put(self, key: int, value: int) -> None:
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[key] = value


class History:
    """One for a tree.  Work is in proportion to the text of one request; nothing walks the tree."""

    def __init__(self, tree: GridTree) -> None:
        self.tree = tree
        self.grid = tree.organization.grid
        # A digest of a block says nothing about its parts.
        self._step = self.grid if tree.has_digests else ceil_div(self.grid, PIECES)
        self._pieces = ceil_div(self.grid, self._step)
        tokens = [min(piece * self._step, self.grid) for piece in range(self._pieces + 1)]
        self._cuts = [end * tree.block_bytes // self.grid for end in tokens]
        """Bytes of a block's key before the end of so many of its pieces."""
        self.reset()

    def reset(self) -> None:
        """Forget everything, as a flush does."""
        organization = self.tree.organization
        blocks = max(LEAST_BLOCKS, organization.unit_pool.size // organization.units_per_block)
        self._boundaries = Recent(BOUNDARIES_PER_BLOCK * blocks)
        """Keyed fingerprint of a boundary -> its fate."""
        self._anywhere = Recent(BOUNDARIES_PER_BLOCK * blocks)
        """Boundaries by text alone."""
        self._inner = Recent(INNER_PER_BLOCK * blocks)
        """Keyed fingerprints between boundaries."""
        self.most = FINGERPRINTS_PER_BLOCK * blocks

    def __len__(self) -> int:
        """Fingerprints that are remembered, at most `most`."""
        return len(self._boundaries) + len(self._anywhere) + len(self._inner)

    # -- admission --------------------------------------------------------------------------

    def admit(
        self,
        namespace: Hashable,
        tokens: bytes,
        prompt: int,
        usable: int,
        found: Match,
        trail: Trail | None = None,
    ) -> tuple[Reuse, Trail]:
        """What this request could have reused, and the trail to hand to `computed` later: its own, if it
        has one since it waited.

        `usable` is how many of its `prompt` tokens a match may cover: at least the last one is always
        computed.  `found` is the match that it starts from.
        """
        trail = Trail(namespace) if trail is None else trail
        self.extend(trail, tokens, usable)
        deepest = usable // self.grid
        known = self._deepest(deepest, trail, keyed=True)
        # Whatever is still there was computed, even when it is forgotten here.
        r_max = max(known, found.attention_depth, found.depth)
        cause, lost = self._cause(trail, usable, r_max, found)
        self._refresh(trail, known)
        trail.recorded = found.depth * self._pieces
        grid = self.grid
        reuse = Reuse(prompt, r_max * grid, found.attention_depth * grid, found.depth * grid, lost, cause)
        return reuse, trail

    def _deepest(self, blocks: int, trail: Trail, *, keyed: bool) -> int:
        """Deepest boundary within `blocks` that was computed: under this key, or under any."""
        for block in range(blocks, 0, -1):
            piece = block * self._pieces
            if keyed and self._boundaries.get(trail.keyed(piece)) is not None:
                return block
            if not keyed and self._anywhere.get(trail.chain[piece]) is not None:
                return block
        return 0

    def _cause(self, trail: Trail, usable: int, r_max: int, found: Match) -> tuple[Cause | None, int]:
        grid = self.grid
        if r_max > found.depth:
            return self._fate(trail, r_max), (r_max - found.depth) * grid
        elsewhere = self._deepest(usable // grid, trail, keyed=False)
        if elsewhere > r_max:
            return Cause.OTHER_KEY, (elsewhere - r_max) * grid
        beyond = self._beyond(trail, r_max, self._pieces_in(usable))
        if beyond:
            return (Cause.OFF_GRID if r_max else Cause.BELOW_GRID), beyond
        return None, 0

    def _fate(self, trail: Trail, block: int) -> Cause:
        """Why this boundary, which was computed, does not serve."""
        fate = self._boundaries.get(trail.keyed(block * self._pieces))
        if fate == Fate.NEVER:
            return Cause.NEVER_TAKEN
        return Cause.REFUSED if fate == Fate.REFUSED else Cause.EVICTED

    def _beyond(self, trail: Trail, block: int, last: int) -> int:
        """Tokens of pieces beyond this boundary, up to the last, that an earlier request of the key computed
        too."""
        first = piece = block * self._pieces
        while piece < last and self._inner.get(trail.keyed(piece + 1)) is not None:
            piece += 1
        return self._tokens(piece) - self._tokens(first)

    def _refresh(self, trail: Trail, blocks: int) -> None:
        """The boundaries of this path have been asked for: they are forgotten last."""
        for block in range(1, blocks + 1):
            piece = block * self._pieces
            fate = self._boundaries.get(trail.keyed(piece))
            if fate is not None:
                self._boundaries.put(trail.keyed(piece), fate)
                self._anywhere.put(trail.chain[piece], 0)

    # -- what is computed -------------------------------------------------------------------

    def computed(self, trail: Trail, tokens: bytes, length: int, taken: Container[int]) -> None:
        """The request has computed `length` tokens; `taken` holds the blocks that end in a checkpoint."""
        self.extend(trail, tokens, length)
        last, pieces, put_inner = self._pieces_in(length), self._pieces, self._inner.put
        seed, chain = trail.seed, trail.chain
        for piece in range(trail.recorded + 1, last + 1):
            block, inside = divmod(piece, pieces)
            if inside:
                put_inner(hash((seed, chain[piece])), 0)
                continue
            fate = Fate.TAKEN if block in taken else Fate.NEVER
            if block * self.grid in trail.refused:
                trail.refused.remove(block * self.grid)
                fate = max(fate, Fate.REFUSED)
            self._boundaries.put(trail.keyed(piece), fate)
            self._anywhere.put(trail.chain[piece], 0)
        trail.recorded = max(trail.recorded, last)

    def refused(self, trail: Trail, depth: int) -> None:
        """The checkpoint at token `depth` finds no memory, or loses what it had to the request itself."""
        piece = self._pieces_in(depth)
        if piece <= trail.recorded:
            self._boundaries.put(trail.keyed(piece), Fate.REFUSED)
        else:
            trail.refused.add(depth)

    def superseded(self, trail: Trail, depth: int) -> None:
        """The placement lets the checkpoint at token `depth` go, now that a deeper one stands."""
        piece = self._pieces_in(depth)
        if piece <= trail.recorded:  # otherwise `computed` will not find it
            self._boundaries.put(trail.keyed(piece), Fate.NEVER)

    # -- pieces -----------------------------------------------------------------------------

    def _pieces_in(self, length: int) -> int:
        """Whole pieces in the first `length` tokens; the last of a block may be shorter than the others."""
        blocks, rest = divmod(length, self.grid)
        return blocks * self._pieces + rest // self._step

    def boundary(self, trail: Trail, block: int) -> int:
        """Keyed fingerprint of the text of so many blocks."""
        return trail.keyed(block * self._pieces)

    def _tokens(self, piece: int) -> int:
        """Tokens before the end of this many pieces."""
        blocks, inside = divmod(piece, self._pieces)
        return blocks * self.grid + inside * self._step

    def reaches(self, trail: Trail, length: int) -> bool:
        """Whether the trail covers so many tokens."""
        return len(trail.chain) > self._pieces_in(length)

    def follow(self, lookup: Lookup, text: Callable[[], bytes], length: int) -> Trail:
        """The trail of a request that waits, over at least `length` tokens; `text` is read if need be."""
        trail = lookup.trail
        if trail is None:
            trail = lookup.trail = Trail(lookup.namespace)
        if not self.reaches(trail, length):
            self.extend(trail, text(), length)
        return trail

    def extend(self, trail: Trail, tokens: bytes, length: int) -> None:
        """Take the trail on to the last whole piece of so many of its tokens."""
        chain, cuts, pieces = trail.chain, self._cuts, self._pieces
        last, piece, end = chain[-1], len(chain) - 1, self._pieces_in(length)
        while piece < end:
            block, inside = divmod(piece, pieces)
            start = block * cuts[-1]
            last = hash((last, tokens[start + cuts[inside] : start + cuts[inside + 1]]))
            chain.append(last)
            piece += 1
