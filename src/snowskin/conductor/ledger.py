"""The ledger: which request counts for what, on which node, until when.

It decides nothing. Every entry that a request makes is taken out again by ``leave``, once, so that
loads never drift; ``check_laws`` recounts them.
"""

from __future__ import annotations

from snowskin.conductor.config import ConductorConfig
from snowskin.conductor.fleet import Fleet
from snowskin.conductor.forecast import Forecast
from snowskin.conductor.prediction import DecodeTime
from snowskin.conductor.state import Flight, OpenFetch, Stage
from snowskin.cost.profile import Profile
from snowskin.store.directory import Directory
from snowskin.terms.commands import Command, Decision, EndLease, Fetch, GrantLease, PrefillCandidate
from snowskin.terms.ids import NodeId, RequestId


class Ledger:
    """Requests in flight, with all that follows from them for nodes, links and the forecast."""

    def __init__(self, config: ConductorConfig, profile: Profile, directory: Directory) -> None:
        self._config = config
        self._profile = profile
        self._directory = directory
        self.fleet = Fleet(config, profile)
        self.forecast = Forecast()
        self.decode_time = DecodeTime(first_guess_s=config.decode_s, weight=config.decode_weight)
        self.flights: dict[RequestId, Flight] = {}

    def enter(
        self, flight: Flight, chosen: PrefillCandidate, decision: Decision, *, now_s: float
    ) -> tuple[Fetch | None, tuple[Command, ...]]:
        """Count a request in on its nodes; ``flight.decode`` and all else is set from here on.

        Returns:
            The fetch that prefill begins with, if any, and the lease that it needs.
        """
        arrived = flight.arrived
        self.flights[arrived.request] = flight
        flight.prefill = chosen.node
        flight.decision = decision
        flight.stage = Stage.QUEUED
        flight.landed = False
        flight.placements += 1
        flight.work_s = chosen.prefill_s
        flight.reused_tokens = chosen.reused_blocks * self._config.block_tokens
        self.fleet.prefill[chosen.node].enqueue(chosen.prefill_s)
        self.fleet.decode[flight.decode].place(arrived)
        self._forecast_at(flight, now_s + chosen.ttft_s)
        if chosen.fetch_from is None:
            return None, ()
        return self._open_fetch(flight, chosen, chosen.fetch_from, now_s)

    def leave(self, flight: Flight, *, now_s: float, output_tokens: int = 0) -> tuple[Command, ...]:
        """Take a request out of every table; nodes that are gone took their share along."""
        del self.flights[flight.arrived.request]
        if flight.stage < Stage.PREFILLED:
            self._leave_prefill(flight, now_s)
        decode = self.fleet.decode.get(flight.decode)
        if decode is not None:
            decode.leave(flight.arrived, landed=flight.landed, output_tokens=output_tokens)
        self.forecast.remove(flight.number, flight.decode_start_s)
        return self.close_fetch(flight, now_s=now_s)

    def start_prefill(self, flight: Flight, reused_tokens: int, *, now_s: float) -> None:
        """Its turn has come, with the prefix that was really found."""
        node = self.fleet.prefill[flight.prefill]
        node.dequeue(flight.work_s)
        flight.stage = Stage.PREFILLING
        # A node that claimed to reuse more than there is would get a negative prediction.
        flight.reused_tokens = min(reused_tokens, flight.arrived.prompt_tokens - 1)
        flight.work_s = self._raw_prefill_s(flight) * node.compute.ratio
        node.start(flight.work_s, now_s)

    def finish_prefill(self, flight: Flight, prefill_s: float, *, now_s: float) -> None:
        """Its first token is out, after so long a prefill."""
        self._leave_prefill(flight, now_s)
        flight.stage = Stage.PREFILLED
        node = self.fleet.prefill[flight.prefill]
        node.observe_prefill(real_s=prefill_s, predicted_s=self._raw_prefill_s(flight))
        self._start_decode_at(flight, now_s)

    def land(self, flight: Flight) -> None:
        """Its KV is on its decode node."""
        if not flight.landed:
            flight.landed = True
            self.fleet.decode[flight.decode].land(flight.arrived)

    def start_decode(self, flight: Flight, *, now_s: float) -> None:
        """It joined the running batch."""
        self.land(flight)
        flight.stage = Stage.DECODING
        self._start_decode_at(flight, now_s)

    def close_fetch(self, flight: Flight, *, now_s: float) -> tuple[Command, ...]:
        """Its fetch is over, whatever came of it: the lease ends, and the link is free of it."""
        fetch = flight.fetch
        if fetch is None:
            return ()
        flight.fetch = None
        source = self.fleet.node(fetch.source)
        if source is None:
            return ()
        source.sent(fetch.transfer_bytes)
        end = EndLease(fetch.source, flight.arrived.request)
        self._directory.handle(end, now_s=now_s)
        return (end,)

    def next_leave_s(self, now_s: float) -> float:
        """Predicted seconds until the next request in flight is done."""
        return self.forecast.next_leave_s(now_s, self.decode_time.seconds)

    def _open_fetch(
        self, flight: Flight, chosen: PrefillCandidate, source_name: NodeId, now_s: float
    ) -> tuple[Fetch, tuple[Command, ...]]:
        source = self.fleet.node(source_name)
        if source is None:
            raise AssertionError(f"{source_name} is to be fetched from, but is not up")
        keys = flight.arrived.keys[: chosen.reused_blocks]
        blocks = self._directory.placed(source_name, keys[chosen.local_blocks :])
        transfer_bytes = len(blocks) * self._profile.kv_bytes(self._config.block_tokens)
        expected_s = self._profile.transfer.seconds(source.busy_bytes + transfer_bytes)
        flight.fetch = OpenFetch(source_name, transfer_bytes, expected_s)
        source.send(transfer_bytes)
        # All of the prefix: leases are on chains from their first block on.
        lease = GrantLease(source_name, flight.arrived.request, keys, self._config.lease_s)
        self._directory.handle(lease, now_s=now_s)
        return Fetch(source_name, blocks), (lease,)

    def _leave_prefill(self, flight: Flight, now_s: float) -> None:
        node = self.fleet.prefill.get(flight.prefill)
        if node is None:
            return
        if flight.stage == Stage.QUEUED:
            node.dequeue(flight.work_s)
        else:
            node.stop(flight.work_s, now_s)

    def _start_decode_at(self, flight: Flight, start_s: float) -> None:
        self.forecast.remove(flight.number, flight.decode_start_s)
        self._forecast_at(flight, start_s)

    def _forecast_at(self, flight: Flight, start_s: float) -> None:
        flight.decode_start_s = start_s
        arrived = flight.arrived
        self.forecast.add(
            flight.number, start_s, arrived.prompt_tokens, arrived.output_limit_tokens
        )

    def _raw_prefill_s(self, flight: Flight) -> float:
        return self._profile.prefill.seconds(flight.arrived.prompt_tokens, flight.reused_tokens)
