"""All settings of the API, with the bounds that keep one client from harming the others."""

from __future__ import annotations

import msgspec

from snowskin.measure.records import Slo
from snowskin.terms.errors import InvalidInput


class ApiConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the API; validated when made."""

    api_key: str | None = None
    """Where given, every route but ``/health`` and ``/docs`` wants it as bearer token."""
    max_body_bytes: int = 16 * 1024 * 1024
    """Of one request; 413 beyond."""
    max_pending_body_bytes: int = 256 * 1024 * 1024
    """Of all bodies read but not yet tokenised; 429 beyond."""
    body_timeout_s: float = 30.0
    """In which a body must have come; 408 beyond."""
    max_open_requests: int = 4096
    """HTTP requests for generation that are open at once; 429 beyond."""
    max_choices: int = 128
    """Generations of one HTTP request: prompts times n."""
    completion_output_tokens: int = 16
    """Output limit of a completion that names none (OpenAI's)."""
    chat_output_tokens: int = 4096
    """Output limit of a chat that names none, where the context leaves so much."""
    request_timeout_s: float = 600.0
    """In which a whole request must be answered, to its last byte; it is cancelled beyond."""
    unavailable_retry_s: float = 5.0
    """Retry-After where no node is up, and where the front itself is full."""
    text_threads: int = 2
    """Threads that parse, tokenise and hash."""
    slo: Slo = Slo()
    """By which ``snowskin_effective_requests_total`` counts."""

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise InvalidInput("api_key is empty; give a key, or none at all", parameter="api_key")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int | float) and value <= 0:
                raise InvalidInput(f"{name} is {value}; it must be above 0", parameter=name)
