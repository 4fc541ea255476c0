"""Whose pages are whose: the pages of every sequence, and the prefixes that sequences share.

A page that is full of tokens becomes a node of a tree, under the page before it; a new sequence starts from the longest
path that its tokens follow. Nodes nobody uses are kept until their pages are wanted, the longest unused first.

Sliding layers have pages of their own, which a sequence gives back as they leave its window. A prefix can be shared up
to where the window before it is still there.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(eq=False)
class _Node:
    """A full page. `users` follow it; `window_users` of them also look at its sliding page."""

    parent: "_Node | None"
    tokens: tuple[int, ...]
    page: int
    sliding: int | None
    users: int = 0
    window_users: int = 0
    in_tree: bool = True
    children: dict[tuple[int, ...], "_Node"] = dataclasses.field(default_factory=dict)
    experts: np.ndarray | None = None


@dataclasses.dataclass(eq=False)
class Held:
    """The pages of one sequence by page number: `sliding` is None before `first`; the first pages are shared ones.

    shared: whether its pages may become nodes.
    """

    pages: list[int] = dataclasses.field(default_factory=list)
    sliding: list[int | None] = dataclasses.field(default_factory=list)
    first: int = 0
    nodes: list[_Node] = dataclasses.field(default_factory=list)
    shared: bool = True


class Pages:
    """The two pools, of `pages` and of `sliding_pages` pages of `page_size` tokens, and the tree."""

    def __init__(self, page_size: int, pages: int, sliding_pages: int, window: int):
        self.page_size, self.window = page_size, window
        self._free = list(range(pages))[::-1]
        self._free_sliding = list(range(sliding_pages))[::-1]
        self._root = _Node(None, (), -1, None)
        # Sequences give their nodes back from the last to the first: whatever is longest unused has no children.
        self._idle: collections.OrderedDict[_Node, None] = collections.OrderedDict()
        self._idle_sliding: collections.OrderedDict[_Node, None] = collections.OrderedDict()

    @property
    def available(self) -> tuple[int, int]:
        """Pages that can be had, in full and in sliding layers."""
        return len(self._free) + len(self._idle), len(self._free_sliding) + len(self._idle_sliding)

    def start(self, tokens: Sequence[int]) -> Held:
        """A sequence on the longest prefix of `tokens` that is there, at least one token being left to compute."""
        nodes = self._path(tokens)
        held = Held([node.page for node in nodes], [None] * len(nodes), self._first(len(nodes) * self.page_size), nodes)
        for node in nodes:
            self._use(node)
        for i in range(held.first, len(nodes)):
            held.sliding[i] = self._look(nodes[i])
        return held

    def shared(self, tokens: Sequence[int]) -> int:
        """The tokens that `start` would find."""
        return len(self._path(tokens)) * self.page_size

    def reserve(self, held: Held, length: int) -> bool:
        """Gives the sequence pages for its first `length` tokens. False where pages ran out; what it got stays."""
        while len(held.pages) * self.page_size < length:
            if not (self._free or self._evict()) or not (self._free_sliding or self._evict_sliding()):
                return False
            held.pages.append(self._free.pop())
            held.sliding.append(self._free_sliding.pop())
        return True

    def computed(self, held: Held, tokens: Sequence[int], filled: int) -> list[_Node]:
        """The first `filled` of the tokens are computed: shares full pages, gives back what left the window.

        Returns the nodes that are new.
        """
        new = []
        while held.shared and (len(held.nodes) + 1) * self.page_size <= filled:
            if (node := self._share(held, tokens)) is not None:
                new.append(node)
        first = self._first(filled)
        for i in range(held.first, min(first, len(held.sliding))):
            self._leave(held, i)
        held.first = max(first, held.first)
        return new

    def release(self, held: Held) -> None:
        """The sequence has ended."""
        for i in range(held.first, len(held.sliding)):
            self._leave(held, i)
        self._free += held.pages[len(held.nodes) :]
        for node in reversed(held.nodes):
            node.users -= 1
            if not node.users:
                if node.in_tree:
                    self._idle[node] = None
                else:
                    self._free.append(node.page)
        held.pages, held.sliding, held.nodes, held.first = [], [], [], 0

    def forget(self) -> None:
        """Nothing computed so far may be shared any more; sequences keep what they have."""
        left = list(self._root.children.values())
        for node in left:
            left += node.children.values()
            node.in_tree, node.children = False, {}
            if not node.users:
                self._free.append(node.page)
            if node.sliding is not None and not node.window_users:
                self._free_sliding.append(node.sliding)
                node.sliding = None
        self._root.children = {}
        self._idle.clear()
        self._idle_sliding.clear()

    # --- the tree ---

    def _path(self, tokens: Sequence[int]) -> list[_Node]:
        P, node, path = self.page_size, self._root, []
        while (len(path) + 1) * P < len(tokens):
            node = node.children.get(tuple(tokens[len(path) * P : (len(path) + 1) * P]))
            if node is None:
                break
            path.append(node)
        i = len(path) - 1
        while i >= self._first(len(path) * P):
            if path[i].sliding is None:  # given away: the path can only be followed to before it
                del path[i:]
            i -= 1
        return path

    def _first(self, position: int) -> int:
        """The first page that a query at this position sees in a sliding layer."""
        return max(0, position - self.window + 1) // self.page_size

    def _share(self, held: Held, tokens: Sequence[int]) -> _Node | None:
        """The next page of the sequence becomes a node; None where there was one of the same tokens."""
        i = len(held.nodes)
        parent = held.nodes[-1] if held.nodes else self._root
        key = tuple(tokens[i * self.page_size : (i + 1) * self.page_size])
        new = None
        if (node := parent.children.get(key)) is None:
            node = new = parent.children[key] = _Node(parent, key, held.pages[i], None)
        else:
            self._free.append(held.pages[i])
            held.pages[i] = node.page
        self._use(node)
        held.nodes.append(node)
        if held.sliding[i] is not None:
            if node.sliding is None:
                node.sliding = held.sliding[i]
            else:
                self._free_sliding.append(held.sliding[i])
            held.sliding[i] = self._look(node)
        return new

    def _use(self, node: _Node) -> None:
        node.users += 1
        self._idle.pop(node, None)

    def _look(self, node: _Node) -> int:
        node.window_users += 1
        self._idle_sliding.pop(node, None)
        return node.sliding

    def _leave(self, held: Held, i: int) -> None:
        """Page i of the sequence has left its window."""
        page, held.sliding[i] = held.sliding[i], None
        if i >= len(held.nodes):
            self._free_sliding.append(page)
            return
        node = held.nodes[i]
        node.window_users -= 1
        if not node.window_users:
            if node.in_tree:
                self._idle_sliding[node] = None
            else:
                self._free_sliding.append(page)
                node.sliding = None

    def _evict(self) -> bool:
        if not self._idle:
            return False
        node, _ = self._idle.popitem(last=False)
        del node.parent.children[node.tokens]
        node.in_tree = False
        self._free.append(node.page)
        if self._idle_sliding.pop(node, self) is None:
            self._free_sliding.append(node.sliding)
            node.sliding = None
        return True

    def _evict_sliding(self) -> bool:
        if not self._idle_sliding:
            return False
        node, _ = self._idle_sliding.popitem(last=False)
        self._free_sliding.append(node.sliding)
        node.sliding = None
        return True
