import random

import pytest

from north_jax.sampler.pages import Held, Pages

P, WINDOW = 4, 10


def in_use(pages, live):
    """(full, sliding) pages by where they are, each of which must be in one place only."""
    nodes, todo = [], [pages._root]
    while todo:
        children = list(todo.pop().children.values())
        nodes, todo = nodes + children, todo + children
    nodes += [node for held in live for node in held.nodes if not node.in_tree]
    nodes = list(dict.fromkeys(nodes))
    full = pages._free + [node.page for node in nodes]
    full += [page for held in live for page in held.pages[len(held.nodes) :]]
    sliding = pages._free_sliding + [node.sliding for node in nodes if node.sliding is not None]
    sliding += [page for held in live for page in held.sliding[len(held.nodes) :] if page is not None]
    for node in nodes:
        users = [held for held in live if node in held.nodes]
        assert node.users == len(users)
        lookers = [held for held in users if held.sliding[held.nodes.index(node)] is not None]
        assert node.window_users == len(lookers)
        assert (node in pages._idle) == (node.in_tree and not users)
        assert (node in pages._idle_sliding) == (node.in_tree and node.sliding is not None and not lookers)
    return full, sliding


@pytest.mark.parametrize("seed", range(40))
def test_every_page_is_in_one_place_and_no_sequence_lacks_one(seed):
    """Sequences over few different tokens start, grow, end and are forgotten at random."""
    rng = random.Random(seed)
    total, sliding_total = rng.choice([(40, 40), (24, 16), (64, 20)])
    pages = Pages(P, total, sliding_total, WINDOW)
    live: dict[Held, list] = {}  # its tokens, and how many are computed
    contents: dict[tuple[str, int], tuple] = {}  # what was last written to a page
    for _ in range(300):
        act = rng.random()
        if act < 0.25 and len(live) < 4:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 30))]
            shared = pages.shared(tokens)
            held = pages.start(tokens)
            assert shared == len(held.pages) * P < len(tokens)
            live[held] = [tokens, shared]
            for i, page in enumerate(held.pages):  # it finds what belongs to its tokens
                assert contents["full", page] == tuple(tokens[: (i + 1) * P])
            for i in range(held.first, len(held.sliding)):
                assert contents["sliding", held.sliding[i]] == tuple(tokens[: (i + 1) * P])
        elif act < 0.85 and live:
            held = rng.choice(list(live))
            tokens, filled = live[held]
            if filled == len(tokens):
                tokens += [rng.randrange(2) for _ in range(rng.randint(1, 6))]
            end = min(len(tokens), filled + rng.randint(1, 8))
            if not pages.reserve(held, end):
                assert 0 in pages.available
                pages.release(held)
                del live[held]
            else:
                # Whatever a query at `filled` or later sees is there.
                assert held.first * P <= max(0, filled - WINDOW + 1)
                assert None not in held.sliding[held.first :] and set(held.sliding[: held.first]) <= {None}
                for i in range(filled // P, -(-end // P)):
                    contents["full", held.pages[i]] = contents["sliding", held.sliding[i]] = tuple(
                        tokens[: (i + 1) * P]
                    )
                live[held][1] = end
                pages.computed(held, tokens, end)
        elif act < 0.97 and live:
            held = rng.choice(list(live))
            pages.release(held)
            del live[held]
        elif act > 0.985:
            pages.forget()
            for held in live:
                held.shared = False
        full, sliding = in_use(pages, list(live))
        assert sorted(full) == list(range(total))
        assert sorted(sliding) == list(range(sliding_total))
    for held in live:
        pages.release(held)
    assert pages.available == (total, sliding_total)


def grown(pages, tokens):
    held = pages.start(tokens)
    for end in range(len(held.pages) * P, len(tokens) + P, P):
        end = min(end, len(tokens))
        assert pages.reserve(held, end)
        pages.computed(held, tokens, end)
    return held


def test_sliding_layers_hold_the_window_only():
    pages = Pages(P, 100, 4, WINDOW)
    held = Held()
    tokens = list(range(200))
    for end in range(2, 201, 2):
        assert pages.reserve(held, end)
        pages.computed(held, tokens, end)
    assert len(held.pages) == 50
    assert sum(page is not None for page in held.sliding) <= 4


def test_a_prefix_is_followed_to_where_its_window_is_left():
    pages = Pages(P, 100, 8, WINDOW)
    tokens = list(range(40))
    pages.release(grown(pages, tokens))
    assert pages.shared([*tokens, 1]) == 40
    assert pages.shared(tokens) == 36  # one token is left to compute
    other = grown(pages, list(range(100, 112)))  # wants sliding pages: those of the first tokens go
    assert pages.shared([*tokens, 1]) == 40
    pages.release(other)
    pages.release(grown(pages, list(range(100, 140))))
    assert pages.shared([*tokens, 1]) == 0
    assert pages.available == (100, 8)


def test_the_longest_unused_goes_first_and_leaves_its_parents():
    pages = Pages(P, 6, 12, WINDOW)
    first, second = [1] * 12, [2] * 12
    pages.release(grown(pages, first))
    pages.release(grown(pages, second))
    assert pages.shared([*first, 0]) == 12
    held = grown(pages, [3] * 4)
    assert pages.shared([*first, 0]) == 8
    assert pages.shared([*second, 0]) == 12
    pages.release(held)


def test_pages_of_mixed_weights_are_not_shared():
    pages = Pages(P, 20, 20, WINDOW)
    held = grown(pages, [1] * 8)
    pages.forget()
    held.shared = False
    assert pages.reserve(held, 16)
    pages.computed(held, [1] * 16, 16)
    assert pages.shared([1] * 17) == 0
    pages.release(held)
    assert pages.available == (20, 20)
