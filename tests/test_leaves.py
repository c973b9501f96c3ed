"""Leaves of one class, in lines by their last use."""
from __future__ import annotations

from isthmus.core.cache.eviction.learned import Leaves
from isthmus.core.cache.node import Node

COST = 1  # seconds


def test_leaves_come_in_the_order_of_their_last_use_whatever_order_they_came_in():
    root, leaves = Node(b"", b"", None, 0), Leaves()
    nodes = [Node(bytes([i] * 4), bytes(4), root, 0) for i in range(6)]
    for node, mark in zip(nodes, (3, 5, 4, 9, 1, 7), strict=True):
        node.mark = mark
        leaves.add(mark, node)
    nodes[1].locks, nodes[3].mark, nodes[0].parent = 1, 12, None  # in use, used again, gone
    leaves.add(12, nodes[3])
    found = [leaves.take() for _ in range(4) if leaves.first()]
    assert [node.mark for node in found] == [1, 4, 7, 12] and leaves.first() == 0
    assert not any(node.queued for node in nodes)
    for node in found[::-1]:
        leaves.add(node.mark, node)
    found[1].locks = 1
    assert leaves.compact() == 3 and not leaves.late and found[1].queued == 0
    assert [leaves.take() for _ in range(3) if leaves.first()] == [found[0], *found[2:]]
