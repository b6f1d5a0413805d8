"""Who is let in: the paper's admission rules (arXiv 2407.00079 §7). ``ADMISSIONS`` lists them.

- none: everybody, within ``max_in_flight``.
- baseline: TTFT is checked at arrival, the decode load only once prefill is done; a request that
  is turned away then has wasted its prefill.
- early: TTFT and the *present* load of its decode node, both at arrival (§7.3).
- predicted: TTFT, and the pool's load predicted for the time when prefill will end (§7.4).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from snowskin.conductor.decode_choice import DecodePool, DecodeView
from snowskin.conductor.forecast import Forecast, PoolLoad
from snowskin.cost.costs import DecodeCost
from snowskin.terms.commands import RejectCause


class AdmissionQuestion(msgspec.Struct, frozen=True, gc=False):
    """What an admission rule is asked about one request and its chosen nodes."""

    now_s: float
    prompt_tokens: int
    output_limit_tokens: int
    ttft_s: float
    """Predicted for the chosen prefill node."""
    ttft_slo_s: float
    tbt_slo_s: float
    decode_now: DecodeView
    """The chosen decode node, with those requests alone whose KV it has."""
    pool: DecodePool
    """Every decode node that is up, for its limits."""
    cost: DecodeCost
    forecast: Forecast
    decode_s: float
    """The uniform decode time t_d."""

    @property
    def reserve_tokens(self) -> int:
        """What the decode node sets aside on its device when the request joins."""
        return self.prompt_tokens + self.output_limit_tokens


class Refusal(msgspec.Struct, frozen=True):
    """Why a request is turned away, and in how many seconds there should be room."""

    cause: RejectCause
    reason: str
    room_in_s: float


Rule = Callable[[AdmissionQuestion], Refusal | None]


class Admission(msgspec.Struct, frozen=True):
    """A check at arrival, and another once prefill is done; None lets everybody pass."""

    at_arrival: Rule | None
    after_prefill: Rule | None = None


def check_ttft(question: AdmissionQuestion) -> Refusal | None:
    """Refuse whose first token would come too late; the queue shrinks by a second a second."""
    late_s = question.ttft_s - question.ttft_slo_s
    if late_s <= 0:
        return None
    reason = f"predicted TTFT {question.ttft_s:.2f} s exceeds {question.ttft_slo_s:g} s"
    return Refusal(RejectCause.TTFT, reason, late_s)


def check_present_load(question: AdmissionQuestion) -> Refusal | None:
    """Refuse if the decode node could not take the request as it is loaded now.

    There should be room once the next of the pool's requests has finished.
    """
    node = question.decode_now
    tbt_s = node.with_request(question.prompt_tokens, question.cost).tbt_s
    if tbt_s > question.tbt_slo_s:
        cause = RejectCause.TBT
        reason = f"TBT {tbt_s:.3f} s on {node.node} would exceed {question.tbt_slo_s:g} s"
    elif not node.has_room(question.reserve_tokens):
        cause = RejectCause.DECODE_FULL
        reason = f"{node.node} has no room for {question.reserve_tokens} tokens more"
    else:
        return None
    room_in_s = question.forecast.next_leave_s(question.now_s, question.decode_s)
    return Refusal(cause, reason, room_in_s)


def check_ttft_and_present_load(question: AdmissionQuestion) -> Refusal | None:
    """Early rejection."""
    return check_ttft(question) or check_present_load(question)


def check_ttft_and_predicted_load(question: AdmissionQuestion) -> Refusal | None:
    """Early rejection by prediction: the mean load over the pool when prefill will end."""
    refusal = check_ttft(question)
    if refusal is not None:
        return refusal
    forecast, decode_s = question.forecast, question.decode_s
    ends_s = question.now_s + question.ttft_s
    load = forecast.load_at(ends_s, now_s=question.now_s, decode_s=decode_s)
    if _fits_pool(question, load):
        return None
    tbt_s = _mean_tbt_s(question, load)
    if tbt_s > question.tbt_slo_s:
        cause = RejectCause.TBT
        reason = f"predicted mean TBT {tbt_s:.3f} s exceeds {question.tbt_slo_s:g} s"
    else:
        cause = RejectCause.DECODE_FULL
        reason = f"the decode pool is predicted full, with {load.sequences} sequences"
    room_in_s = forecast.seconds_until(
        lambda later: _fits_pool(question, later),
        from_s=ends_s,
        now_s=question.now_s,
        decode_s=decode_s,
    )
    return Refusal(cause, reason, room_in_s)


ADMISSIONS: dict[str, Admission] = {
    "none": Admission(None),
    "baseline": Admission(check_ttft, after_prefill=check_present_load),
    "early": Admission(check_ttft_and_present_load),
    "predicted": Admission(check_ttft_and_predicted_load),
}
"""Every admission rule, by the name that the command line uses."""


def _mean_tbt_s(question: AdmissionQuestion, load: PoolLoad) -> float:
    nodes = len(question.pool.nodes)
    step_s = question.cost.step_s(
        (load.sequences + 1) / nodes, (load.context_tokens + question.prompt_tokens) / nodes
    )
    return step_s * sum(question.pool.corrections) / nodes


def _fits_pool(question: AdmissionQuestion, load: PoolLoad) -> bool:
    return (
        _mean_tbt_s(question, load) <= question.tbt_slo_s
        and load.sequences < sum(question.pool.sequence_limits)
        and load.reserved_tokens + question.reserve_tokens <= sum(question.pool.device_tokens)
    )
