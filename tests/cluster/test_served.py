"""What the cluster remembers of what it served: bounded, and without a word of it."""

from __future__ import annotations

from snowskin.cluster import served as module
from snowskin.cluster.flight import Flight
from snowskin.cluster.served import PAGE_REQUESTS, REMEMBERED_REQUESTS, Served
from snowskin.terms.ids import RequestId
from snowskin.terms.keys import KeySpace, prompt_keys
from snowskin.terms.request import GenerationRequest, SampledToken, Sampling

SPACE = KeySpace(model="m", revision="r", dtype="fp32", block_tokens=4)


def flight(tokens: list[int], *, arrived_s: float = 0.0, output_tokens: int = 1) -> Flight:
    """A request that has had so many tokens."""
    request = GenerationRequest(
        request=RequestId("r"),
        tokens=tuple(tokens),
        keys=prompt_keys(SPACE, tokens),
        output_limit_tokens=100,
        sampling=Sampling(),
        stop_tokens=(),
    )
    made = Flight(request, block_tokens=4, now_s=arrived_s, finish=lambda *_: None)
    for token in range(output_tokens):
        made.add_token(SampledToken(token=token), None, now_s=arrived_s)
    return made


def test_equal_prefixes_have_equal_names_that_only_the_salt_gives() -> None:
    served, other = (Served(salt=salt, started_s=5.0) for salt in (b"a" * 16, b"b" * 16))
    prompts = [list(range(10)), [*range(8), 99, 98, 97, 96], [1, 1, 1]]
    for index, prompt in enumerate(prompts):
        for memory in (served, other):
            memory.note(flight(prompt, arrived_s=6.0 + index, output_tokens=3))
    first, second, third = served.after(0)
    assert (first.number, first.arrival_s, first.prompt_tokens, first.output_tokens) == (
        1,
        1.0,
        10,
        3,
    )
    assert first.blocks == second.blocks[:2]
    assert len({*first.blocks, *second.blocks}) == 3
    assert third.blocks == ()
    assert not {*second.blocks} & {*other.after(0)[1].blocks}
    assert all(0 <= name < 2**63 for name in second.blocks)


def test_a_request_without_a_token_is_not_remembered() -> None:
    served = Served(salt=b"a", started_s=0.0)
    served.note(flight([1], output_tokens=0))
    assert served.after(0) == ()


def test_pages_go_on_where_the_last_ended_and_the_oldest_are_forgotten() -> None:
    served = Served(salt=b"a", started_s=0.0)
    some = flight([1, 2])
    for _ in range(REMEMBERED_REQUESTS + 7):
        served.note(some)
    numbers: list[int] = []
    while page := served.after(numbers[-1] if numbers else 0):
        assert len(page) <= PAGE_REQUESTS
        numbers += [request.number for request in page]
    assert numbers == list(range(8, REMEMBERED_REQUESTS + 8))
    assert served.after(10**18) == ()


def test_long_prompts_count_by_their_blocks() -> None:
    served = Served(salt=b"a", started_s=0.0)
    blocks = 60_000
    long = flight([7] * (4 * blocks))
    for _ in range(10):
        served.note(long)
    kept = module.REMEMBERED_BLOCKS // blocks
    assert [request.number for request in served.after(0)] == [11 - kept]
    assert len(served.after(10 - kept)) == 1, "a page ends with the request that fills it"
