"""The oracle of the analytic decode batch: the same rules, played one step at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from snowskin.cost.costs import DecodeCost
from snowskin.sim.decode import ON_TIME_S


@dataclass
class Arrival:
    at_s: float
    prompt_tokens: int
    step_count: int
    reserved_tokens: int


@dataclass
class Stay:
    joined_s: float = -1.0
    finished_s: float = -1.0
    intervals_s: list[float] = field(default_factory=list)


def play_by_steps(
    arrivals: list[Arrival], cost: DecodeCost, *, sequence_limit: int, token_limit: int
) -> list[Stay]:
    """When each arrival (in order of time) joins and finishes, and how long its steps took."""
    stays = [Stay() for _ in arrivals]
    left = [arrival.step_count for arrival in arrivals]
    context = [arrival.prompt_tokens + 1 for arrival in arrivals]
    running: list[int] = []
    next_arrival = 0
    waiting: list[int] = []
    now_s = 0.0
    while next_arrival < len(arrivals) or waiting or running:
        if not running and not waiting:
            now_s = max(now_s, arrivals[next_arrival].at_s)
        while next_arrival < len(arrivals) and arrivals[next_arrival].at_s <= now_s + ON_TIME_S:
            waiting.append(next_arrival)
            next_arrival += 1
        while waiting and len(running) < sequence_limit:
            reserved = sum(arrivals[index].reserved_tokens for index in running)
            if reserved + arrivals[waiting[0]].reserved_tokens > token_limit:
                break
            index = waiting.pop(0)
            stays[index].joined_s = now_s
            running.append(index)
        step_s = cost.step_s(len(running), sum(context[index] for index in running))
        now_s += step_s
        for index in list(running):
            stays[index].intervals_s.append(step_s)
            left[index] -= 1
            context[index] += 1
            if not left[index]:
                stays[index].finished_s = now_s
                running.remove(index)
    return stays
