"""One request of the simulated world, and each placement of it on a pair of nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snowskin.measure.records import Ending
from snowskin.sim.decode import DecodeBatch, Sequence
from snowskin.sim.links import Flow
from snowskin.terms.commands import Fetch
from snowskin.terms.ids import BlockKey, RequestId, SlotIndex

if TYPE_CHECKING:
    from snowskin.sim.nodes import DecodeNode, PrefillNode


class Job:
    """A request: what the trace says of it, and what has become of it."""

    __slots__ = (
        "arrived_s",
        "ending",
        "finished_s",
        "first_token_s",
        "keys",
        "output_tokens",
        "placement",
        "prompt_tokens",
        "request",
        "reused_tokens",
        "stay",
    )

    def __init__(
        self,
        request: RequestId,
        arrived_s: float,
        prompt_tokens: int,
        output_tokens: int,
        keys: tuple[BlockKey, ...],
    ) -> None:
        self.request = request
        self.arrived_s = arrived_s
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        """The true length. Nobody but the decode node's own clockwork looks at it."""
        self.keys = keys
        self.placement: Placement | None = None
        self.reused_tokens = 0
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.ending: Ending | None = None
        self.stay: Stay | None = None

    def leave(self, ending: Ending, now_s: float) -> None:
        """The request is over. What only its way needed is let go of: many are kept for reports."""
        assert self.ending is None, f"{self.request} has left already"
        self.ending = ending
        self.finished_s = now_s
        self.keys = ()
        self.placement = None

    def decoded(self, batch: DecodeBatch[Any], sequence: Sequence[Any]) -> None:
        """Its sequence has finished in this batch."""
        assert self.first_token_s is not None
        stalled_s = sequence.stalled_s
        waited_s = sequence.joined_s - self.first_token_s - stalled_s
        self.stay = Stay(batch, sequence.first_step, sequence.end_step, waited_s, stalled_s)


class Stay:
    """A finished request's steps in a batch, from which its intervals can be told."""

    __slots__ = ("batch", "end_step", "first_step", "stalled_s", "waited_s")

    def __init__(
        self,
        batch: DecodeBatch[Any],
        first_step: int,
        end_step: int,
        waited_s: float,
        stalled_s: float,
    ) -> None:
        self.batch = batch
        self.first_step = first_step
        self.end_step = end_step
        self.waited_s = waited_s
        """From the first token to the first step, as far as that step does not count it."""
        self.stalled_s = stalled_s
        """Of the first step's duration, what was over when the sequence was ready to go on."""


class Placement:
    """A job on its prefill and decode node: all that it holds there."""

    __slots__ = (
        "_given_up",
        "computed_s",
        "decode",
        "decode_prefix",
        "decode_slots",
        "fetch",
        "fetch_flow",
        "fetch_slots",
        "fetch_started_s",
        "job",
        "kv_bytes",
        "kv_flow",
        "kv_started_s",
        "prefill",
        "prefill_done",
        "prefill_s",
        "prefill_slots",
        "prefix",
    )

    def __init__(
        self, job: Job, prefill: PrefillNode, decode: DecodeNode, fetch: Fetch | None
    ) -> None:
        self.job = job
        self.prefill = prefill
        self.decode = decode
        self._given_up = False
        self.fetch = fetch
        self.fetch_flow: Flow | None = None
        self.fetch_slots: list[SlotIndex] = []
        self.fetch_started_s = 0.0
        self.prefix = 0
        """Blocks that prefill did not need to compute."""
        self.prefill_slots: list[SlotIndex] = []
        self.prefill_s = 0.0
        self.computed_s = 0.0
        self.prefill_done = False
        self.decode_prefix = 0
        """Blocks that the decode node had already."""
        self.decode_slots: list[SlotIndex] = []
        self.kv_flow: Flow | None = None
        self.kv_bytes = 0
        self.kv_started_s = 0.0

    def is_live(self) -> bool:
        """False once the request has left, or was placed elsewhere: later news is stale."""
        return not self._given_up

    def give_up(self) -> None:
        """From now on nothing of this placement counts."""
        self._given_up = True
