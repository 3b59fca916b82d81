"""Which group sizes `laminar` may choose from."""

from __future__ import annotations

from typing import Literal, get_args

Menu = Literal["any", "pow2", "even"]
MENUS: tuple[Menu, ...] = get_args(Menu)


def menu_sizes(menu: Menu, ranks: int, node_size: int) -> tuple[int, ...]:
    """Group sizes, ascending. Above a node only whole nodes; the whole domain always.

    `any`: every size within a node. `pow2`: powers of two. `even`: one rank and even sizes within a node.
    """
    within = range(1, min(ranks, node_size) + 1)
    if menu == "pow2":
        found = {1 << n for n in range(ranks.bit_length())}
        found = {k for k in found if k <= node_size or k % node_size == 0}
    else:
        found = {k for k in within if menu == "any" or k == 1 or k % 2 == 0}
        found.update(range(2 * node_size, ranks + 1, node_size))
        if ranks >= node_size:
            found.add(node_size)
    return tuple(sorted(found | {ranks}))
