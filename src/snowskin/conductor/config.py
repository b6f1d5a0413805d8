"""The Conductor's settings: one frozen object, validated once."""

from __future__ import annotations

import math

import msgspec

from snowskin.conductor.admission import ADMISSIONS
from snowskin.conductor.prefill_choice import POLICIES
from snowskin.store.directory import DEFAULT_REPLICA_LIMIT
from snowskin.terms.errors import InvalidInput


class ConductorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the Conductor decides.

    Raises:
        InvalidInput: on construction, with the field and the value; the CLI shows it.
    """

    policy: str = "kvcache-centric"
    """How the prefill node is chosen: a name in ``POLICIES``."""
    admission: str = "none"
    """Who is turned away: a name in ``ADMISSIONS``."""
    ttft_slo_s: float = 30.0
    tbt_slo_s: float = 0.1
    block_tokens: int = 32
    kvcache_balancing_threshold: float = 1.25
    """A node whose own prefix is shorter than the best by less than this factor computes locally.

    Our choice (the paper prints none): a fetch for a few blocks more costs bookkeeping at two
    nodes, and gains little."""
    max_in_flight: int = 4096
    """Requests beyond it are turned away, whatever the admission."""
    max_placements: int = 3
    """A request that lost its node so often fails, for it may itself be what kills nodes."""
    hold_s: float = 30.0
    """A request for which no node is up waits so long for one to come back; 0: not at all.

    Our choice: a node is back in seconds, and who would wait longer than the papers' TTFT SLO of
    30 s has no use for the answer."""
    lease_s: float = 60.0
    """How long blocks stay put at the source of a fetch, unless the fetch ends sooner."""
    decode_s: float = 10.0
    """First guess of the uniform decode time t_d (arXiv §7.4), before any request has finished."""
    decode_weight: float = 0.01
    """Least weight of the newest finished request in t_d, 0 (keep the guess) to 1."""
    correction_weight: float = 0.1
    """Weight of the newest observation in each online correction, 0 (none) to 1."""
    correction_bound: float = 8.0
    """No correction goes beyond this factor, up or down."""
    retry_limit_s: float = 60.0
    """No Retry-After is longer, since a prediction that far ahead is worth little."""
    replica_limit: int = DEFAULT_REPLICA_LIMIT

    def __post_init__(self) -> None:
        _one_of("policy", self.policy, tuple(POLICIES))
        _one_of("admission", self.admission, tuple(ADMISSIONS))
        for name in ("block_tokens", "max_in_flight", "max_placements", "replica_limit"):
            _at_least(name, getattr(self, name), 1)
        for name in ("kvcache_balancing_threshold", "correction_bound", "retry_limit_s"):
            _at_least(name, getattr(self, name), 1.0)
        for name in ("ttft_slo_s", "tbt_slo_s", "lease_s", "decode_s"):
            value = getattr(self, name)
            if not value > 0 or math.isnan(value):
                raise InvalidInput(f"{name} must be greater than 0, not {value!r}", parameter=name)
        _at_least("hold_s", self.hold_s, 0.0)
        for name in ("correction_weight", "decode_weight"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise InvalidInput(f"{name} must lie in 0–1, not {value!r}", parameter=name)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidInput(
            f"{name} must be one of {', '.join(known)}, not {value!r}", parameter=name
        )


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise InvalidInput(f"{name} must be at least {least:g}, not {value!r}", parameter=name)
