"""One rule of room on a decode node: engine, Conductor and simulator give the same answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from snowskin.conductor.decode_choice import DecodeView
from snowskin.cost.costs import DecodeCost
from snowskin.engine.batching import DecodeBatch as EngineBatch
from snowskin.engine.batching import DecodeLimits, Submission
from snowskin.sim.decode import DecodeBatch as SimulatedBatch
from snowskin.sim.decode import Sequence
from snowskin.terms.ids import NodeId, RequestId

COST = DecodeCost(10e-3, 1e-3, 1e-6)
requests = st.lists(st.tuples(st.integers(1, 60), st.integers(2, 40)), min_size=1, max_size=8)


@given(requests, st.integers(102, 300), st.integers(1, 6))
def test_a_request_joins_where_the_conductor_saw_room_and_waits_where_it_saw_none(
    asked: list[tuple[int, int]], device_tokens: int, sequence_limit: int
) -> None:
    engine = EngineBatch(DecodeLimits(sequence_limit, device_tokens, len(asked)))
    simulated: SimulatedBatch[str] = SimulatedBatch(
        COST, sequence_limit=sequence_limit, token_limit=device_tokens
    )
    context_tokens = reserved_tokens = 0
    for running, (prompt_tokens, limit_tokens) in enumerate(asked):
        reserve_tokens = prompt_tokens + limit_tokens
        view = DecodeView(
            NodeId("d"), running, context_tokens, reserved_tokens, sequence_limit,
            device_tokens, 1.0,
        )  # fmt: skip
        name = RequestId(str(running))
        submitted = engine.submit(
            name, prompt_tokens=prompt_tokens, output_limit_tokens=limit_tokens
        )
        assert submitted is Submission.QUEUED
        simulated.add(
            Sequence(
                str(running),
                prompt_tokens=prompt_tokens,
                step_count=limit_tokens - 1,
                reserved_tokens=reserve_tokens,
            )
        )
        admitted = engine.admit()
        _, joined = simulated.advance(0.0)
        assert bool(admitted) == bool(joined) == view.has_room(reserve_tokens)
        if not admitted:
            break
        context_tokens += prompt_tokens
        reserved_tokens += reserve_tokens
