"""Ways to a peer: their health, their load, and which of them is taken. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from snowskin.terms.ids import NodeId

PATHS_LIMIT = 4096
COOLDOWN_LEAST_S = 0.1
COOLDOWN_MOST_S = 30.0
COOLDOWN_LONE_S = 2.0
"""Where every path to a peer cools down, none does so for longer: a restarted peer is found."""
COOLDOWN_COSTS = 4
"""A path that cost so much time to find dead is left alone for so many times that."""
EWMA_WEIGHT = 0.2
RATE_SAMPLE_LEAST_BYTES = 256 << 10
"""Smaller transfers tell a path's latency, not its rate."""
RATE_UNKNOWN_BYTES_PER_S = 1e9
ESTIMATE_LIFE_S = 60.0
"""A link's rate measured before that is none: whoever avoided a slow link tries it again."""


class Path(msgspec.Struct, frozen=True, cache_hash=True):
    """One way to a peer: from one of our addresses to one of its own.

    Attributes:
        local_host: the address to send from; None leaves that to the kernel's routes.
        tier: 0 where both NICs are the preferred ones of their memory, 1 otherwise; paths of a
            higher tier are used only when none of a lower one can be.
    """

    node: NodeId
    transport: str
    host: str
    port: int
    local_host: str | None = None
    tier: int = 0

    def __str__(self) -> str:
        origin = f"{self.local_host} → " if self.local_host else ""
        return f"{self.transport} {origin}{self.host}:{self.port}"


class Flight:
    """Bytes asked for over a path by one request. Its holder keeps it up to date, and nobody else.

    Attributes:
        landed_bytes: that have arrived.
        is_waiting: the source has nothing ready, so the path is free for others.
    """

    __slots__ = ("asked_bytes", "is_waiting", "landed_bytes", "path")

    def __init__(self, path: Path, asked_bytes: int) -> None:
        self.path = path
        self.asked_bytes = asked_bytes
        self.landed_bytes = 0
        self.is_waiting = False

    @property
    def busy_bytes(self) -> int:
        """How much is on its way now."""
        return 0 if self.is_waiting else max(0, self.asked_bytes - self.landed_bytes)


class PathStat(msgspec.Struct, frozen=True):
    """What we know of a path.

    Attributes:
        landed_bytes: bytes that arrived over it.
        bytes_in_flight: asked for and not yet there, unless the source has yet to write them.
        bytes_per_s, latency_s: moving averages; None before the first sample. Latency is from the
            request to the first byte of the answer, of blocks that were ready.
        retried_bytes: asked for over it, and then asked for over another.
        failures: it was cut, stalled, or could not be had.
        cooldowns: how often it was left alone for a while.
        cooling_s: for how long it still is; 0 where it may be used.
    """

    path: Path
    landed_bytes: int
    bytes_in_flight: int
    bytes_per_s: float | None
    latency_s: float | None
    retried_bytes: int
    failures: int
    cooldowns: int
    cooling_s: float


class LinkEstimate(msgspec.Struct, frozen=True):
    """How busy and how fast the link from one peer to us is, for whoever predicts transfers.

    A pull of ``n`` bytes that began now would take about
    ``latency_s + (bytes_in_flight + n) / bytes_per_s``.

    Attributes:
        node: the peer.
        bytes_in_flight: asked for over all its paths and not yet there, unless it has yet to write
            them.
        bytes_per_s: sum of its usable paths' rates; None without a sample of the last
            ``ESTIMATE_LIFE_S``.
        latency_s: least of its usable paths'; None before the first sample.
        paths, usable_paths: that are known; that do not cool down.
    """

    node: NodeId
    bytes_in_flight: int
    bytes_per_s: float | None
    latency_s: float | None
    paths: int
    usable_paths: int


class _PathState:
    __slots__ = (
        "bytes_per_s",
        "cooldown_s",
        "cooldowns",
        "failed_s",
        "failures",
        "flights",
        "landed_bytes",
        "latency_s",
        "retried_bytes",
        "sampled_s",
    )

    def __init__(self) -> None:
        self.flights: set[Flight] = set()
        self.bytes_per_s: float | None = None
        self.latency_s: float | None = None
        self.sampled_s = 0.0
        """When the rate was last measured."""
        self.landed_bytes = 0
        self.retried_bytes = 0
        self.failures = 0
        self.cooldowns = 0
        self.failed_s = 0.0
        self.cooldown_s = 0.0
        """0 where the last use succeeded."""

    @property
    def bytes_in_flight(self) -> int:
        return sum(flight.busy_bytes for flight in self.flights)

    def cooling_s(self, now_s: float, most_s: float = COOLDOWN_MOST_S) -> float:
        if not self.cooldown_s:
            return 0.0
        return max(0.0, self.failed_s + min(self.cooldown_s, most_s) - now_s)


class PathTable:
    """Health and load of all paths, those of all pulls together.

    A path is in one of two states: usable, or cooling down after a failure, for twice as long
    after each. Bounded: the path that was added first is forgotten when there are too many.
    """

    def __init__(self, limit: int = PATHS_LIMIT) -> None:
        self._limit = limit
        self._states: dict[Path, _PathState] = {}

    def usable(self, paths: Sequence[Path], now_s: float) -> tuple[Path, ...]:
        """Those that may be used now, in the order given, of the lowest tier that has any.

        Where all of them cool down, none has to for longer than ``COOLDOWN_LONE_S``.
        """
        if len(paths) == 1:
            return () if self._cooling_s(paths[0], now_s, COOLDOWN_LONE_S) else tuple(paths)
        for most_s in (COOLDOWN_MOST_S, COOLDOWN_LONE_S):
            warm = [path for path in paths if self._cooling_s(path, now_s, most_s) == 0]
            if warm:
                tier = min(path.tier for path in warm)
                return tuple(path for path in warm if path.tier == tier)
        return ()

    def has_other(self, path: Path, paths: Sequence[Path], now_s: float) -> bool:
        """Whether any of the paths but this one may be used now, of whatever tier."""
        return any(one != path and self._cooling_s(one, now_s) == 0 for one in paths)

    def usable_in_s(self, paths: Sequence[Path], now_s: float) -> float:
        """How long until one of them may be used; 0 where one may be now."""
        return min(self._cooling_s(path, now_s, COOLDOWN_LONE_S) for path in paths)

    def choose(self, paths: Sequence[Path], length_bytes: int, now_s: float) -> Path | None:
        """The path over which so much more would be here first; None where all cool down.

        Of paths that promise the same, the first one given. What was never tried counts as fast
        as the fastest that was, so it is tried.
        """
        usable = self.usable(paths, now_s)
        if not usable:
            return None
        if len(usable) == 1:
            return usable[0]
        states = [self._states.get(path) for path in usable]
        rates = [state.bytes_per_s for state in states if state is not None and state.bytes_per_s]
        best_bytes_per_s = max(rates, default=RATE_UNKNOWN_BYTES_PER_S)

        def expected_s(state: _PathState | None) -> float:
            if state is None:
                return length_bytes / best_bytes_per_s
            rate_bytes_per_s = state.bytes_per_s or best_bytes_per_s
            return (state.bytes_in_flight + length_bytes) / rate_bytes_per_s

        costs_s = [expected_s(state) for state in states]
        return usable[costs_s.index(min(costs_s))]

    def begin(self, path: Path, length_bytes: int) -> Flight:
        """So many bytes are asked for; ``end``, ``cancel`` or ``fail`` must follow."""
        flight = Flight(path, length_bytes)
        self._state(path).flights.add(flight)
        return flight

    def end(
        self,
        flight: Flight,
        now_s: float,
        *,
        active_s: float | None = None,
        latency_s: float | None = None,
    ) -> None:
        """A request is over, and the path did what it should.

        Args:
            active_s: how long bytes flowed, without waiting for the source; None: not known.
            latency_s: until the first byte came, of what was ready; None: not known.
        """
        state = self._settle(flight)
        state.cooldown_s = 0.0
        if active_s is not None and active_s > 0 and flight.landed_bytes >= RATE_SAMPLE_LEAST_BYTES:
            state.bytes_per_s = _blend(state.bytes_per_s, flight.landed_bytes / active_s)
            state.sampled_s = now_s
        if latency_s is not None:
            state.latency_s = _blend(state.latency_s, latency_s)

    def cancel(self, flight: Flight) -> None:
        """A request was given up for reasons that are not the path's."""
        self._settle(flight)

    def fail(self, flight: Flight, now_s: float, *, cost_s: float) -> None:
        """The path was cut, stalled or could not be had: leave it alone for a while.

        Args:
            cost_s: the time that it took to find out.
        """
        state = self._settle(flight)
        state.retried_bytes += flight.asked_bytes - flight.landed_bytes
        state.failures += 1
        state.cooldowns += 1
        wanted_s = max(COOLDOWN_LEAST_S, 2 * state.cooldown_s, COOLDOWN_COSTS * cost_s)
        state.cooldown_s = min(wanted_s, COOLDOWN_MOST_S)
        state.failed_s = now_s

    def path_stat(self, now_s: float) -> tuple[PathStat, ...]:
        """All paths that were ever used, as far as they are remembered."""
        return tuple(
            PathStat(
                path=path,
                landed_bytes=state.landed_bytes,
                bytes_in_flight=state.bytes_in_flight,
                bytes_per_s=state.bytes_per_s,
                latency_s=state.latency_s,
                retried_bytes=state.retried_bytes,
                failures=state.failures,
                cooldowns=state.cooldowns,
                cooling_s=state.cooling_s(now_s),
            )
            for path, state in self._states.items()
        )

    def link_stat(self, now_s: float) -> tuple[LinkEstimate, ...]:
        """One estimate for each peer, in the order in which they were first used."""
        by_node: dict[NodeId, list[_PathState]] = {}
        for path, state in self._states.items():
            by_node.setdefault(path.node, []).append(state)
        return tuple(_summarise(node, states, now_s) for node, states in by_node.items())

    def _cooling_s(self, path: Path, now_s: float, most_s: float = COOLDOWN_MOST_S) -> float:
        state = self._states.get(path)
        return state.cooling_s(now_s, most_s) if state is not None else 0.0

    def _settle(self, flight: Flight) -> _PathState:
        state = self._state(flight.path)
        state.flights.discard(flight)
        state.landed_bytes += flight.landed_bytes
        return state

    def _state(self, path: Path) -> _PathState:
        state = self._states.get(path)
        if state is None:
            if len(self._states) >= self._limit:
                del self._states[next(iter(self._states))]
            state = self._states[path] = _PathState()
        return state


def _blend(average: float | None, sample: float) -> float:
    return sample if average is None else average + EWMA_WEIGHT * (sample - average)


def _summarise(node: NodeId, states: Sequence[_PathState], now_s: float) -> LinkEstimate:
    usable = [state for state in states if state.cooling_s(now_s) == 0]
    fresh = [state for state in usable if now_s - state.sampled_s <= ESTIMATE_LIFE_S]
    rates = [state.bytes_per_s for state in fresh if state.bytes_per_s is not None]
    latencies_s = [state.latency_s for state in usable if state.latency_s is not None]
    return LinkEstimate(
        node=node,
        bytes_in_flight=sum(state.bytes_in_flight for state in states),
        bytes_per_s=sum(rates) if rates else None,
        latency_s=min(latencies_s) if latencies_s else None,
        paths=len(states),
        usable_paths=len(usable),
    )
