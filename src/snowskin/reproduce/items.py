"""Every table and figure that we reproduce, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from snowskin.reproduce import (
    beyond,
    costs,
    gains,
    hit_rates,
    lead,
    overload,
    pools,
    relative_gains,
    schedulers,
    sweeps,
)
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


def _capacity_item(name: str, workload: str, *, work_s: float) -> Item:
    title = f"capacity within SLO, {workload}"
    return Item(name, title, gains.of_workload(name, workload), work_s)


ITEMS: dict[str, Item] = {
    item.name: item
    for item in (
        Item("fast-table1", "when reuse of a prefix pays", costs.reuse_threshold),
        Item("fast-table2", "the workloads", hit_rates.workloads_described),
        _capacity_item("fast-fig1", "conversation", work_s=90),
        Item("fast-fig5", "TTFT by scheduler", schedulers.fast_schedulers, work_s=100),
        _capacity_item("fast-fig6", "tool-agent", work_s=250),
        _capacity_item("fast-fig7", "synthetic", work_s=90),
        Item("fast-fig8", "prefill GPU time", pools.prefill_time, work_s=50),
        Item("fast-fig9", "hit rate by capacity", hit_rates.hits_by_capacity, work_s=10),
        Item("fast-fig10", "global or local cache", pools.global_cache, work_s=60),
        Item("fast-fig11", "replicas of hot blocks", pools.replicas, work_s=30),
        Item("fast-fig12", "time to move KV", costs.transfer_times),
        Item("fast-fig13", "bandwidth between nodes", sweeps.bandwidth_sweep, work_s=40),
        Item("fast-fig14", "latency of one request", costs.latency_breakdown),
        Item("fast-fig15", "split of prefill and decode", sweeps.split_sweep, work_s=20),
        Item("arxiv-table1", "hit ratio by policy", hit_rates.hits_by_policy, work_s=10),
        Item("arxiv-table3", "rejections under overload", overload.rejections, work_s=120),
        Item("arxiv-fig7", "time that storing KV adds to prefill", costs.store_time),
        Item("arxiv-fig8", "TTFT by scheduler", schedulers.arxiv_schedulers, work_s=250),
        Item("arxiv-fig9-10", "load over time", overload.oscillation, work_s=30),
        Item("arxiv-fig11", "capacity on datasets", relative_gains.dataset_gain, work_s=40),
        Item("arxiv-fig12", "long contexts", relative_gains.long_context_gain, work_s=20),
        Item("arxiv-fig13", "replay against vLLM", gains.replay_gain, work_s=120),
        Item("beyond-eviction", "eviction against Belady", beyond.eviction_bound, work_s=15),
        Item("beyond-schedule", "schedulers against a bound", beyond.schedule_bound, work_s=40),
        Item("beyond-threshold", "balancing threshold", beyond.threshold_sensitivity, work_s=30),
        Item("beyond-overload", "admission by overload", beyond.overload_sweep, work_s=60),
        Item("beyond-lead", "what the lead owes to", lead.lead_over_coupled, work_s=60),
    )
}
"""In the papers' order, and then what goes beyond them."""


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
