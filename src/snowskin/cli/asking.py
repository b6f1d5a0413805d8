"""Ask a running server's own routes, with errors that a user can act on."""

from __future__ import annotations

import json

from snowskin.terms.errors import InvalidInput, SnowskinError

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 10.0


def ask(address: str, api_key: str | None) -> bytes:
    """The body that a server answers with.

    Raises:
        InvalidInput: it refuses; with its own words.
        SnowskinError: it does not answer.
    """
    # Here, since every command imports this module, and this takes longer than all the rest of it.
    import http.client
    import urllib.error
    import urllib.request

    try:
        request = urllib.request.Request(address)
        if api_key:
            # Headers take Latin-1; the bytes of the key are what the API compares.
            request.add_header("Authorization", f"Bearer {api_key}".encode().decode("latin-1"))
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            body: bytes = response.read()
            return body
    except urllib.error.HTTPError as error:
        raise InvalidInput(_message(error.read()) or f"{address}: {error}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        # An error of HTTP quotes whatever came in its place.
        foreign = isinstance(error, http.client.HTTPException) and not isinstance(error, OSError)
        why = "it does not speak HTTP" if foreign else getattr(error, "reason", error)
        raise SnowskinError(
            f"no answer from {address} ({why}); is the server up? "
            "Name it with --url http://HOST:PORT"
        ) from error


def _message(body: bytes) -> str | None:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None
