"""What the radix tree and the cache manager tell an eviction policy, and the registry that holds policies to it."""
from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from ...registry import RegistrationError, Registry
from ..node import Node

if TYPE_CHECKING:
    from ...messages import CacheHint


class Use:
    """One request's use of its prefix, made by `EvictionPolicy.use` and handed back with what the request adds.

    number: the policy's, kept as the mark of what the request adds. seam: pages of the prompt, from its start, that are
    or were cached; an added node does not reach across it. hits: at which `Node.hits` of those added before it begin.
    """

    __slots__ = ("number", "seam", "hits")

    def __init__(self, number: int, seam: int = 0, hits: int = 0):
        self.number, self.seam, self.hits = number, seam, hits


class EvictionPolicy(Protocol):
    """An index of the tree's unlocked leaves: which one goes next. A policy changes nothing of a node but `hits`,
    `turn`, `mark`, `ghosts` and `queued`, which are there for it, and never calls a clock.

    capacity: pages that the cache can hold. watches: False = only `add` and `pop` are called.
    A split copies `hits`, `turn` and `mark` to both halves (`turn` of the front: its parent's); `ghosts` stays behind.
    """

    watches: bool
    capacity: int

    def __init__(self, capacity: int):
        ...

    def add(self, node: Node) -> None:
        """The node became an unlocked leaf, or one that was is used again (its `stamp` grew)."""
        ...

    def pop(self) -> Node | None:
        """Take out the leaf to evict next; None when there is none. Nodes that are no unlocked leaf any more are
        skipped: `node.evictable` tells. What is left of the leaf after its tail is dropped comes back by `add`."""
        ...

    # A policy may also have `run(pages: int) -> tuple[list[Node], int]`: leaves that go next, in order, taken out and
    # dropped already (no `pop`, no `drop`), of no more than `pages` but for the last, of which so many pages are kept
    # as the other number says; it keeps its place then. A parent whose last child is among them comes back by `add`
    # afterwards, so that it is in place already, or its child the last one. An empty list: ask `pop`.

    def tick(self, now: float) -> None:
        """It is `now`, in seconds; called between steps, a place for work that the others should not wait for."""
        ...

    def use(self, node: Node, depth: int, rest: bytes | memoryview, hint: CacheHint | None, priority: int) -> Use:
        """A request was admitted: its cached prefix ends with `node` after `depth` pages; a root when nothing is
        cached. rest: the tokens after the prefix, int32 bytes, or a view of them."""
        ...

    def grow(self, node: Node, end: int, use: Use) -> None:
        """The node is new, of that use; it ends after `end` pages. Called before `add`."""
        ...

    def drop(self, node: Node, keep: int) -> None:
        """The pages of this leaf after the first `keep` are evicted now; its edge and pages are still whole."""
        ...

    def end(self, node: Node, use: Use) -> None:
        """The request of that use has ended; what it leaves in the tree ends with `node`. Not locked yet or still."""
        ...


class Unwatching:
    """The rest of the contract for a policy that `add` and `pop` are enough for."""

    watches = False

    def __init__(self, capacity: int):
        self.capacity = capacity

    def tick(self, now: float) -> None:
        pass

    def use(self, node: Node, depth: int, rest: bytes | memoryview, hint: CacheHint | None, priority: int) -> Use:
        return Use(0)

    def grow(self, node: Node, end: int, use: Use) -> None:
        pass

    def drop(self, node: Node, keep: int) -> None:
        pass

    def end(self, node: Node, use: Use) -> None:
        pass


class EvictionRegistry(Registry):
    """Checks signatures as any registry does, then has the policy evict a small tree.

    own: this package's policies, name -> (module, class), registered when first asked for: their names cost no import.
    """

    def __init__(self, own: Mapping[str, tuple[str, str]] | None = None) -> None:
        super().__init__("eviction policy", EvictionPolicy, ("add", "pop", "tick", "use", "grow", "drop", "end"))
        self._own = dict(own or {})

    def names(self) -> list[str]:
        return sorted({*self._entries, *self._own})

    def create(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in self._own and name not in self._entries:
            module, kind = self._own[name]
            self.register(name, getattr(import_module(module, __package__), kind))
        return super().create(name, *args, **kwargs)

    def register(self, name: str, entry: type) -> type:
        if name in self._own and entry.__name__ != self._own[name][1]:
            raise RegistrationError(f"{self.kind} {name!r} is registered already, by {__package__}")
        super().register(name, entry)
        try:
            _try(entry)
        except Exception as error:
            del self._entries[name]
            where = f"{entry.__module__}.{entry.__qualname__}"
            raise RegistrationError(f"{self.kind} {name!r} ({where}): {error}") from error
        return entry


def _try(kind: type) -> None:
    """Three leaves behind one page, one of them in use: each that may go goes once, and no other."""
    policy = kind(8)
    if not isinstance(getattr(policy, "watches", None), bool):
        raise TypeError("`watches` is neither True nor False")
    if getattr(policy, "capacity", None) != 8:
        raise TypeError("`capacity` is not what it was made with")
    nodes = _family(policy)
    front, held = nodes[0], nodes[3]
    held.locks = front.locks = 1
    _pops(policy, nodes[1:3], nodes)
    held.locks = front.locks = 0
    policy.add(held)
    _pops(policy, [held], nodes)
    policy.add(front)
    _pops(policy, [front], nodes)


def _family(policy: EvictionPolicy) -> list[Node]:
    """A page and three leaves behind it, each come with a request of its own."""
    parent, nodes = Node(b"", b"", None, 0), []
    for i in range(4):
        edge = i.to_bytes(4, "little")
        policy.tick(float(i))
        use = policy.use(parent, min(i, 1), edge, None, 0)
        node = Node(edge, edge, parent, i + 1, edge)
        parent.children[edge] = node
        policy.grow(node, min(i, 1) + 1, use)
        policy.add(node)
        policy.end(node, use)
        nodes.append(node)
        parent = nodes[0]
    return nodes


def _pops(policy: EvictionPolicy, want: list[Node], nodes: list[Node]) -> None:
    """The policy gives exactly the nodes `want`, in whatever order, then None."""
    got = []
    while len(got) < 4:
        some = policy.run(1)[0] if hasattr(policy, "run") else []
        if not some and (node := policy.pop()) is not None:
            policy.drop(node, 0)
            some = [node]
        if not some:
            break
        got.append(node := some[0])
        if node.parent is not None:
            node.parent.children.pop(node.edge, None)
            node.parent = None
    if len(got) != len(want) or any(node not in want for node in got):
        names = [[nodes.index(n) for n in some] for some in (got, want)]
        raise ValueError(f"of the nodes 0 to 3, 3 in use or not, pop() gave {names[0]}, not {names[1]} in any order")
