"""Every table and figure that we reproduce, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from snowskin.reproduce import costs
from snowskin.reproduce.report import Result
from snowskin.reproduce.workloads import Scale
from snowskin.terms.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Item:
    """One table or figure."""

    name: str
    title: str
    compute: Callable[[Scale], Result]
    work_s: float = 0.0
    """About how long it takes at full scale, on one core: the longest are begun first."""


ITEMS: dict[str, Item] = {
    item.name: item
    for item in (
        Item("fast-table1", "when reuse of a prefix pays", costs.reuse_threshold),
        Item("fast-fig12", "time to move KV", costs.transfer_times),
        Item("fast-fig14", "latency of one request", costs.latency_breakdown),
        Item("arxiv-fig7", "time that storing KV adds to prefill", costs.store_time),
    )
}
"""In the papers' order."""


def items_named(names: list[str]) -> list[Item]:
    """The items of these names, each once, in the papers' order.

    Raises:
        InvalidInput: there is no such item; names those there are.
    """
    for name in names:
        if name not in ITEMS:
            raise InvalidInput(
                f"there is no item {name!r}; there are {', '.join(ITEMS)}", parameter="item"
            )
    return [item for name, item in ITEMS.items() if name in names]
