import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from snowskin.engine.sampling import SamplingState, UnusableLogits, sample
from snowskin.terms.ids import RequestId
from snowskin.terms.request import GenerationRequest, SampledToken, Sampling
from tests.engine import tiny

Outcome = SampledToken | UnusableLogits


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tiny.build("llama", tmp_path_factory.mktemp("models"))
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def _logits(rows: int, vocab: int = tiny.VOCAB_SIZE, *, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def _one(logits: torch.Tensor, state: SamplingState) -> SampledToken:
    (outcome,) = sample(logits[None], [state])
    assert isinstance(outcome, SampledToken)
    return outcome


def _greedy(**options: Any) -> Sampling:
    return Sampling(temperature=0.0, **options)


def _drawn(sampling: Sampling, logits: torch.Tensor, count: int = 200) -> set[int]:
    state = SamplingState(sampling)
    return {_one(logits, state).token for _ in range(count)}


# The same tokens as transformers


GENERATE_CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1e-6},
    {"temperature": 30.0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 5000},
    {"top_p": 0.0},
    {"top_p": 0.4},
    {"top_p": 0.95},
    {"top_p": 0.999999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"temperature": 1.7, "top_k": 50, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 5000, "top_p": 0.5, "min_p": 0.01},
    {
        "temperature": 1.3,
        "top_k": 100,
        "top_p": 0.97,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
    },
]


@pytest.mark.parametrize("options", GENERATE_CASES, ids=str)
@pytest.mark.parametrize("seed", [0, 11, 2**40 + 5])
def test_a_seed_gives_the_tokens_of_transformers_generate(
    model: Any, options: dict[str, Any], seed: int
) -> None:
    prompt = tiny.prompt_tokens(20, seed=seed)
    tokens, logits = _generate(model, prompt, seed=seed, new_tokens=32, **options)

    state = SamplingState(Sampling(seed=seed, **options), prompt_tokens=prompt)

    assert [_one(row, state).token for row in logits] == tokens


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4}])
def test_greedy_gives_the_tokens_of_transformers_generate(
    model: Any, options: dict[str, Any]
) -> None:
    prompt = tiny.prompt_tokens(20)
    tokens, logits = _generate(model, prompt, seed=0, new_tokens=32, do_sample=False, **options)

    state = SamplingState(_greedy(**options), prompt_tokens=prompt)

    assert [_one(row, state).token for row in logits] == tokens
    assert state.draws_done == 0


def test_stop_tokens_are_masked_as_transformers_masks_them(model: Any) -> None:
    prompt, stops = tiny.prompt_tokens(20), list(range(0, 331, 2))
    tokens, logits = _generate(
        model, prompt, seed=3, new_tokens=24, eos_token_id=stops, min_new_tokens=8
    )

    state = SamplingState(
        Sampling(seed=3), prompt_tokens=prompt, stop_tokens=(*stops, 9999), min_output_tokens=8
    )

    assert [_one(row, state).token for row in logits] == tokens
    assert all(token % 2 for token in tokens[:8])


def _generate(
    model: Any, prompt: list[int], *, seed: int, new_tokens: int, **options: Any
) -> tuple[list[int], torch.Tensor]:
    """The tokens that transformers draws, and the raw logits that it draws them from."""
    torch.manual_seed(seed)
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
        **{"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0} | options,
    )
    return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits)


@pytest.mark.parametrize("vocab", [331, 336, 1000, 1024])
def test_logits_full_of_ties_are_cut_as_transformers_cuts_them(vocab: int) -> None:
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    warpers = LogitsProcessorList(
        [TopKLogitsWarper(200), TopPLogitsWarper(0.8), MinPLogitsWarper(0.01)]
    )
    for seed in range(40):
        logits = _logits(1, vocab, seed=seed).round()
        torch.manual_seed(seed)
        weights = warpers(torch.zeros(1, 0, dtype=torch.long), logits).softmax(-1)
        expected = [torch.multinomial(weights, 1).item() for _ in range(4)]

        state = SamplingState(Sampling(seed=seed, top_k=200, top_p=0.8, min_p=0.01))

        assert [_one(logits[0], state).token for _ in range(4)] == expected


# The generator


@pytest.mark.parametrize("vocab", [1, 5, 15, 16, 17, 331, 1000, 1031, 32_768, 50_257])
def test_a_sequence_moved_to_another_node_draws_as_if_it_had_stayed(vocab: int) -> None:
    logits = _logits(12, vocab)
    sampling = Sampling(seed=7, temperature=1.5, presence_penalty=0.5)
    stayed = SamplingState(sampling)
    tokens = [_one(row, stayed).token for row in logits]
    for moved_after in (1, 2, 7):
        moved = SamplingState(sampling, output_tokens=tokens[:moved_after])
        assert moved.draws_done == moved_after
        assert [_one(row, moved).token for row in logits[moved_after:]] == tokens[moved_after:]
        assert (moved.draws_done, moved.output_count) == (12, 12)


def test_thread_count_does_not_change_a_draw() -> None:
    logits = _logits(6, 50_257)
    moved = {"output_tokens": [1, 2]}
    outcomes = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        states = [SamplingState(Sampling(seed=row, top_p=0.9), **moved) for row in range(6)]
        outcomes.append([sample(logits, states) for _ in range(3)])
        assert [state.draws_done for state in states] == [5] * 6
    torch.set_num_threads(1)
    assert outcomes[0] == outcomes[1]


def test_a_draw_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    sample(_logits(1), [SamplingState(Sampling(seed=1))])
    assert torch.equal(before, torch.get_rng_state())


def test_tokens_come_out_as_often_as_their_probabilities_say() -> None:
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    state = SamplingState(Sampling(seed=0))
    counts = [0, 0, 0]
    for _ in range(3000):
        counts[_one(logits, state).token] += 1
    for count, probability in zip(counts, (0.6, 0.3, 0.1), strict=True):
        assert abs(count / 3000 - probability) < 0.04


# Rows do not touch each other


_SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-31, 0.5, 1.0, 1.8]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    top_k=st.sampled_from([None, 1, 7, 40, 1000]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    presence_penalty=st.sampled_from([0.0, 0.0, -2.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    logit_bias=st.dictionaries(st.integers(0, 40), st.floats(-100, 100), max_size=3),
    top_logprobs=st.sampled_from([None, 0, 1, 5]),
)


@st.composite
def _rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    tokens = st.lists(st.integers(0, 40), max_size=5)
    return [
        {
            "sampling": draw(_SAMPLINGS),
            "prompt_tokens": draw(tokens),
            "output_tokens": draw(tokens),
            "stop_tokens": draw(tokens),
            "min_output_tokens": draw(st.integers(0, 7)),
        }
        for _ in range(draw(st.integers(1, 5)))
    ]


@settings(max_examples=150, deadline=None)
@given(
    rows=_rows(),
    vocab=st.integers(41, 70),
    seed=st.integers(0, 1000),
    rounded=st.booleans(),
    broken=st.sets(st.integers(0, 4)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_row_gets_in_a_batch_exactly_what_it_gets_alone(
    rows: list[dict[str, Any]],
    vocab: int,
    seed: int,
    rounded: bool,
    broken: set[int],
    dtype: torch.dtype,
) -> None:
    together = [SamplingState(**row) for row in rows]
    alone = [SamplingState(**row) for row in rows]
    for step in range(3):
        logits = _logits(len(rows), vocab, seed=seed + step).to(dtype)
        if rounded:
            logits = logits.round()
        for row in broken:
            if row < len(rows) and step == 1:
                logits[row, row * 7] = (math.nan, math.inf)[row % 2]
        untouched = logits.clone()

        outcomes = sample(logits, together)

        singly = [sample(logits[row : row + 1], [alone[row]])[0] for row in range(len(rows))]
        assert list(outcomes) == singly
        assert torch.equal(logits.nan_to_num(), untouched.nan_to_num())
        for row, outcome in enumerate(outcomes):
            failed = step == 1 and row in broken
            assert isinstance(outcome, UnusableLogits) == failed
    for one, other in zip(together, alone, strict=True):
        assert (one.draws_done, one.output_count) == (other.draws_done, other.output_count)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros(0, 8), []) == ()


# What each parameter does


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.tensor([0.0, 2.0, 2.0, 1.0])
    assert _one(logits, SamplingState(_greedy())).token == 1


def test_a_bias_can_force_and_forbid_a_token() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0])
    assert _one(logits, SamplingState(_greedy(logit_bias={0: 100.0}))).token == 0
    assert _one(logits, SamplingState(_greedy(logit_bias={1: -100.0}))).token == 2


def test_a_bias_comes_before_the_repetition_penalty() -> None:
    logits = torch.tensor([-1.0, 0.4])
    sampling = _greedy(logit_bias={0: 2.0}, repetition_penalty=2.0)
    # Biased first: 1 / 2 = 0.5 beats 0.4; penalised first: -1 * 2 + 2 = 0 would not.
    assert _one(logits, SamplingState(sampling, prompt_tokens=[0])).token == 0


def test_openai_penalties_count_the_output_and_not_the_prompt() -> None:
    logits = torch.tensor([1.0, 0.9, 0.0])
    sampling = _greedy(frequency_penalty=0.3, presence_penalty=0.5)

    fresh = SamplingState(sampling, prompt_tokens=[0, 0, 0])
    repeated = SamplingState(sampling, output_tokens=[0])

    assert _one(logits, fresh).token == 0
    assert _one(logits, repeated).token == 1


def test_a_frequency_penalty_grows_with_every_use_and_a_presence_penalty_does_not() -> None:
    logits = torch.tensor([1.0, 0.0])
    by_frequency = SamplingState(_greedy(frequency_penalty=0.4))
    by_presence = SamplingState(_greedy(presence_penalty=0.9))

    assert [_one(logits, by_frequency).token for _ in range(6)] == [0, 0, 0, 1, 0, 1]
    assert [_one(logits, by_presence).token for _ in range(6)] == [0] * 6


def test_the_repetition_penalty_covers_prompt_and_output() -> None:
    logits = torch.tensor([1.0, 0.9, 0.6])
    state = SamplingState(_greedy(repetition_penalty=2.0), prompt_tokens=[0, 999])

    assert [_one(logits, state).token for _ in range(2)] == [1, 2]


def test_stop_tokens_come_only_after_the_minimum() -> None:
    logits = torch.tensor([0.0, 5.0, 1.0])
    state = SamplingState(_greedy(), stop_tokens=(1,), min_output_tokens=2)

    assert [_one(logits, state).token for _ in range(3)] == [2, 2, 1]


def test_cuts_leave_only_what_they_say() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()

    assert _drawn(Sampling(seed=0), logits) == {0, 1, 2, 3}
    assert _drawn(Sampling(seed=0, top_k=2), logits) == {0, 1}
    assert _drawn(Sampling(seed=0, top_p=0.6), logits) == {0, 1}
    assert _drawn(Sampling(seed=0, top_p=0.0), logits) == {0}
    assert _drawn(Sampling(seed=0, min_p=0.2), logits) == {0, 1, 2}
    # Top-p works on what top-k left: 0.5 of 0.8 alone exceeds 0.6.
    assert _drawn(Sampling(seed=0, top_k=2, top_p=0.6), logits) == {0}


# Log-probabilities


def test_logprobs_are_of_the_models_own_logits() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    sampling = Sampling(seed=0, temperature=0.1, top_k=1, logit_bias={2: 50.0}, top_logprobs=2)

    found = _one(logits, SamplingState(sampling))

    assert found.token == 2
    assert found.logprob == pytest.approx(math.log(0.2))
    assert [entry.token for entry in found.top] == [0, 1]
    assert [entry.logprob for entry in found.top] == pytest.approx([math.log(0.5), math.log(0.3)])


def test_logprobs_come_as_many_as_asked_and_as_there_are() -> None:
    logits = torch.tensor([0.0, 1.0, -math.inf])

    def ask(count: int | None) -> SampledToken:
        return _one(logits, SamplingState(_greedy(top_logprobs=count)))

    assert ask(None) == SampledToken(1)
    assert ask(0).logprob is not None
    assert ask(0).top == ()
    assert [entry.token for entry in ask(20).top] == [1, 0]


# Failures


@pytest.mark.parametrize("sampling", [_greedy(), Sampling(seed=0), Sampling(seed=0, top_p=0.5)])
@pytest.mark.parametrize(
    "bad", [[math.nan, 1.0, 2.0], [0.0, math.inf, 1.0], [-math.inf] * 3], ids=str
)
def test_a_row_of_unusable_logits_fails_alone(sampling: Sampling, bad: list[float]) -> None:
    logits = torch.tensor([bad, [0.0, 9e9, 0.0]])
    states = [SamplingState(sampling), SamplingState(sampling)]

    failed, fine = sample(logits, states)

    assert isinstance(failed, UnusableLogits)
    assert fine == SampledToken(1)
    assert [state.output_count for state in states] == [0, 1]


def test_a_row_whose_every_token_is_masked_fails() -> None:
    state = SamplingState(_greedy(), stop_tokens=(0, 1), min_output_tokens=1)
    (outcome,) = sample(torch.zeros(1, 2), [state])
    assert isinstance(outcome, UnusableLogits)


def test_a_row_that_overflows_at_its_temperature_fails_instead_of_drawing_anything() -> None:
    state = SamplingState(Sampling(seed=0, temperature=1e-29))
    (outcome,) = sample(torch.tensor([[1e20, 0.0]]), [state])
    assert isinstance(outcome, UnusableLogits)


def test_a_request_makes_its_state() -> None:
    request = GenerationRequest(
        request=RequestId("r"),
        tokens=(0, 1),
        keys=(),
        output_limit_tokens=8,
        sampling=_greedy(repetition_penalty=2.0),
        stop_tokens=(3,),
        min_output_tokens=3,
    )
    logits = torch.tensor([1.0, 0.9, 0.8, 0.7])

    state = SamplingState.of_request(request, [2])

    assert (state.output_count, state.draws_done) == (1, 0)
    assert [_one(logits, state).token for _ in range(3)] == [0, 0, 3]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=-1.0, seed=0),
        Sampling(temperature=1.0, seed=None),
        Sampling(top_p=1.1, seed=0),
        Sampling(top_k=0, seed=0),
        Sampling(min_p=-0.1, seed=0),
        Sampling(repetition_penalty=0.0, seed=0),
        Sampling(logit_bias={0: math.nan}, seed=0),
    ],
)
def test_values_that_the_api_must_refuse_are_asserted(sampling: Sampling) -> None:
    with pytest.raises(AssertionError):
        SamplingState(sampling)
