"""Checks of a grid tree against its organization's pools, in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_hybrid.pools.pages import IntegrityError

if TYPE_CHECKING:
    from sglang_hybrid.radix.tree import GridTree


def check_nodes(tree: GridTree) -> None:
    """Every block is linked, locked and counted as it should be, and its pages know it."""
    blocks = locked = dead = 0
    pool = tree.organization.unit_pool
    for node in tree.nodes():
        blocks += node.blocks
        locked += node.blocks * (node.locks > 0)
        dead += node.blocks * (not node.locks and not node.alive)
        assert node.parent is not None
        if node.blocks < 1 or len(node.key) != node.blocks * tree.block_bytes:
            raise IntegrityError(f"the run to depth {node.depth} has {node.blocks} blocks and another key")
        if len(node.units) != node.blocks * tree.organization.units_per_block:
            raise IntegrityError(f"the run to depth {node.depth} has {node.blocks} blocks and other units")
        if node.depth != node.parent.depth + node.blocks or not tree.is_linked(node):
            raise IntegrityError(f"the block at depth {node.depth} is linked wrongly")
        if node.locks < sum(child.locks > 0 for child in node.children.values()):
            raise IntegrityError(f"the block at depth {node.depth} has fewer locks than locked children")
        below = sum(child.alive > 0 for child in node.children.values())
        if node.alive != below + (node.checkpoint is not None):
            raise IntegrityError(f"the block at depth {node.depth} serves {node.alive} things, not {below}")
        for unit in node.units:
            if not any(entry is node for entry in pool.dependents(unit)):
                raise IntegrityError(f"unit {unit} does not know the block at depth {node.depth}")
            if node.locks and not pool.references(unit):
                raise IntegrityError(f"unit {unit} of a locked block has no execution reference")
        checkpoint = node.checkpoint
        if checkpoint is not None:
            if checkpoint.owner is not node:
                raise IntegrityError(f"the checkpoint at depth {node.depth} has another owner")
            for page in checkpoint.pages:
                if not any(e is checkpoint for e in tree.organization.state_pool.dependents(page)):
                    raise IntegrityError(f"page {page} does not know its checkpoint")
    if (blocks, locked, dead) != (tree.blocks, tree.blocks_locked, tree.blocks_dead):
        raise IntegrityError(
            f"{blocks} blocks ({locked} locked, {dead} dead) in the tree, "
            f"counters say {tree.blocks} ({tree.blocks_locked}, {tree.blocks_dead})"
        )


def check_index(tree: GridTree) -> None:
    """Pages know nothing that cannot be found, but for what an open reclaim has detached."""
    found: set[int] = set()
    for node in tree.nodes():
        found |= {id(node), id(node.checkpoint)}
    for pool in tree.organization.pools:
        for reclaim in pool.reclaims.values():
            found.update(map(id, reclaim.entries))
            if reclaim.is_frozen and any(not e.frozen for e in pool.dependents(reclaim.page)):
                raise IntegrityError(f"page {reclaim.page} is under reclaim and still offers an entry")
    for pool in tree.organization.pools:
        for page in range(1, pool.size + 1):
            if any(id(entry) not in found for entry in pool.dependents(page)):
                raise IntegrityError(f"page {page} knows an entry that has left the lookup")
