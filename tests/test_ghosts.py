"""What was evicted is remembered for a while, so that learning hears when it comes again."""
from __future__ import annotations

import numpy as np
from isthmus.core.cache.eviction.ghosts import Ghosts
from isthmus.core.cache.node import Node

COST = 1  # seconds


def test_ghosts_are_bounded_and_the_oldest_go_first():
    ghosts, root = Ghosts(4), Node(b"", b"", None, 0)
    for i in range(10):
        edge = np.array([i], np.int32).tobytes()
        ghosts.bury([Node(edge, edge, root, i, edge)])
    assert ghosts.pages == [4, 0] and len(ghosts._order) == 4
    found = [i for i in range(10) if ghosts.recall(root, np.array([i, 0], np.int32).tobytes(), 4)]
    assert found == [6, 7, 8, 9] and ghosts.pages == [0, 0]


def test_pages_trimmed_off_one_node_are_one_ghost():
    ghosts, root = Ghosts(100), Node(b"", b"", None, 0)
    text = np.arange(5, dtype=np.int32).tobytes()
    node = Node(text, text, root, 0, text[:4])
    for keep in (3, 2, 0):
        ghosts.bury([node], keep)
        if keep:
            node.edge, node.pages, node.size = node.edge[:4 * keep], node.pages[:4 * keep], keep
    (ghost,) = ghosts.recall(root, text[:16], 4)
    assert ghost.pages == 4, "what is asked for is four of its five pages"
    assert ghosts.pages == [0, 0] and not ghosts.recall(root, text, 4)
