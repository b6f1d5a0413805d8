from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from snowskin.engine.batching import (
    Chunk,
    DecodeBatch,
    DecodeLimits,
    PrefillProgress,
    Submission,
    plan_prefill_pass,
)
from snowskin.terms.ids import RequestId


def _job(name: str, prompt_tokens: int, done_tokens: int = 0) -> PrefillProgress:
    return PrefillProgress(RequestId(name), prompt_tokens, done_tokens)


def _chunk(name: str, start: int, end: int, *, last: bool) -> Chunk:
    return Chunk(RequestId(name), start, end, last)


def test_a_long_prompt_is_cut_at_the_last_block_boundary_within_the_budget() -> None:
    plan = plan_prefill_pass([_job("a", 100)], token_budget=40, block_tokens=16)

    assert plan == (_chunk("a", 0, 32, last=False),)


def test_a_chunk_that_starts_off_a_boundary_still_ends_on_one() -> None:
    plan = plan_prefill_pass([_job("a", 100, 21)], token_budget=20, block_tokens=16)

    assert plan == (_chunk("a", 21, 32, last=False),)


def test_short_prompts_share_a_pass_and_the_rest_of_the_budget_starts_the_next() -> None:
    jobs = [_job("a", 10), _job("b", 9, 4), _job("c", 100), _job("d", 3)]

    plan = plan_prefill_pass(jobs, token_budget=48, block_tokens=16)

    assert plan == (
        _chunk("a", 0, 10, last=True),
        _chunk("b", 4, 9, last=True),
        _chunk("c", 0, 32, last=False),
    )


def test_a_job_that_cannot_reach_a_boundary_lets_a_shorter_one_use_what_is_left() -> None:
    jobs = [_job("a", 12), _job("b", 100), _job("c", 3)]

    plan = plan_prefill_pass(jobs, token_budget=16, block_tokens=16)

    assert plan == (_chunk("a", 0, 12, last=True), _chunk("c", 0, 3, last=True))


def test_no_jobs_give_an_empty_pass() -> None:
    assert plan_prefill_pass([], token_budget=16, block_tokens=16) == ()


@st.composite
def _workloads(draw: st.DrawFn) -> tuple[list[PrefillProgress], int, int]:
    block_tokens = draw(st.integers(1, 33))
    token_budget = draw(st.integers(block_tokens, 200))
    prompts = draw(st.lists(st.integers(1, 300), max_size=8))
    jobs = [
        _job(f"r{index}", prompt, draw(st.integers(0, prompt - 1)))
        for index, prompt in enumerate(prompts)
    ]
    return jobs, token_budget, block_tokens


@given(_workloads())
def test_every_pass_keeps_its_bounds_and_all_prompts_end(
    workload: tuple[list[PrefillProgress], int, int],
) -> None:
    jobs, token_budget, block_tokens = workload
    computed = {job.request: [job.done_tokens] for job in jobs}
    while jobs:
        plan = plan_prefill_pass(jobs, token_budget=token_budget, block_tokens=block_tokens)

        assert plan[0].request == jobs[0].request, "the oldest job gains in every pass"
        assert sum(chunk.tokens for chunk in plan) <= token_budget
        order = [job.request for job in jobs]
        positions = [order.index(chunk.request) for chunk in plan]
        assert positions == sorted(set(positions))
        by_request = {chunk.request: chunk for chunk in plan}
        left: list[PrefillProgress] = []
        for job in jobs:
            chunk = by_request.get(job.request)
            if chunk is None:
                left.append(job)
                continue
            assert chunk.start_token == job.done_tokens < chunk.end_token <= job.prompt_tokens
            assert chunk.last == (chunk.end_token == job.prompt_tokens)
            assert chunk.last or chunk.end_token % block_tokens == 0
            computed[job.request].append(chunk.end_token)
            if not chunk.last:
                left.append(_job(job.request, job.prompt_tokens, chunk.end_token))
        jobs = left
    for steps in computed.values():
        assert steps == sorted(set(steps))


@given(_workloads(), st.lists(st.integers(1, 300), max_size=4))
def test_what_a_job_gets_does_not_depend_on_those_behind_it(
    workload: tuple[list[PrefillProgress], int, int], later: list[int]
) -> None:
    jobs, token_budget, block_tokens = workload
    more = jobs + [_job(f"later{index}", prompt) for index, prompt in enumerate(later)]

    alone = plan_prefill_pass(jobs, token_budget=token_budget, block_tokens=block_tokens)
    shared = plan_prefill_pass(more, token_budget=token_budget, block_tokens=block_tokens)

    assert shared[: len(alone)] == alone


def _batch(*, sequences: int = 2, budget: int = 100, queue: int = 8) -> DecodeBatch:
    return DecodeBatch(DecodeLimits(sequences, budget, queue))


def _submit(batch: DecodeBatch, name: str, prompt: int = 10, limit: int = 10) -> Submission:
    return batch.submit(RequestId(name), prompt_tokens=prompt, output_limit_tokens=limit)


def test_a_sequence_passes_from_waiting_over_loading_to_running_and_leaves() -> None:
    batch = _batch()
    assert _submit(batch, "a") is Submission.QUEUED
    assert batch.waiting == ("a",)
    assert batch.admit() == ("a",)
    assert (batch.loading, batch.reserved_tokens) == (("a",), 20)
    batch.join(RequestId("a"))
    assert (batch.loading, batch.running) == ((), ("a",))
    assert batch.leave(RequestId("a"))
    assert (len(batch), batch.reserved_tokens) == (0, 0)
    assert not batch.leave(RequestId("a"))


def test_a_large_sequence_at_the_head_is_not_overtaken() -> None:
    batch = _batch(sequences=8)
    _submit(batch, "a", 50)
    _submit(batch, "large", 80)
    _submit(batch, "small", 1, 1)

    assert batch.admit() == ("a",)
    batch.leave(RequestId("a"))
    assert batch.admit() == ("large", "small")


def test_a_sequence_larger_than_the_whole_budget_is_refused_at_once() -> None:
    batch = _batch(budget=100)

    assert _submit(batch, "exact", 90, 10) is Submission.QUEUED
    assert _submit(batch, "large", 91, 10) is Submission.NEVER_FITS


def test_a_full_queue_refuses_but_a_free_place_is_given_even_without_a_queue() -> None:
    batch = _batch(sequences=1, queue=0)

    assert _submit(batch, "a") is Submission.QUEUED
    assert _submit(batch, "b") is Submission.QUEUE_FULL
    batch.admit()
    assert _submit(batch, "b") is Submission.QUEUE_FULL
    batch.leave(RequestId("a"))
    assert _submit(batch, "b") is Submission.QUEUED


class DecodeBatchLaws(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.limits = DecodeLimits(sequence_limit=3, kv_token_budget=60, queue_limit=4)
        self.batch = DecodeBatch(self.limits)
        self.submitted: list[RequestId] = []
        self.admitted: list[RequestId] = []
        self.left: set[RequestId] = set()

    @rule(prompt=st.integers(1, 50), limit=st.integers(1, 30))
    def submit(self, prompt: int, limit: int) -> None:
        request = RequestId(f"r{len(self.submitted)}")
        outcome = self.batch.submit(request, prompt_tokens=prompt, output_limit_tokens=limit)
        assert (outcome is Submission.NEVER_FITS) == (prompt + limit > 60)
        if outcome is Submission.QUEUED:
            self.submitted.append(request)
        else:
            assert request not in self.batch

    @rule()
    def admit(self) -> None:
        self.admitted += self.batch.admit()
        if not self.batch.loading and not self.batch.running:
            assert not self.batch.waiting, "an empty batch admits whatever waits"

    @precondition(lambda self: self.batch.loading)
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        self.batch.join(data.draw(st.sampled_from(self.batch.loading)))

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.submitted))
        assert self.batch.leave(request) == (request not in self.left)
        self.left.add(request)

    @invariant()
    def bounds_hold_and_nobody_is_lost(self) -> None:
        self.batch.check()
        assert len(self.batch.waiting) <= self.limits.queue_limit
        assert len(self.batch) == len(self.submitted) - len(self.left)

    @invariant()
    def admission_keeps_the_order_of_arrival(self) -> None:
        order = [self.submitted.index(request) for request in self.admitted]
        assert order == sorted(order)


TestDecodeBatchLaws = DecodeBatchLaws.TestCase
