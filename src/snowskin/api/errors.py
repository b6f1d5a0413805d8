"""Errors as clients see them: a status and OpenAI's error body."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from snowskin.terms.errors import (
    InvalidInput,
    NodeUnavailable,
    Overloaded,
    RequestFailed,
    SnowskinError,
)


class ApiError(SnowskinError):
    """An answer other than success.

    Args:
        message: for the client's human.
        status: of HTTP.
        code: for the client's program.
        param: the body's field at fault, dotted where nested; None if it is the whole.
        retry_after_s: when another try may succeed; rounded up to whole seconds in the header.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """OpenAI's ``type``, which follows from the status."""
        match self.status:
            case 401:
                return "authentication_error"
            case 429:
                return "rate_limit_error"
            case 503:
                return "service_unavailable_error"
            case status if status >= 500:
                return "server_error"
            case _:
                return "invalid_request_error"

    def body(self) -> dict[str, Any]:
        """The JSON body, also of an error event in a stream."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> Mapping[str, str]:
        """Headers that belong to the error."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def shown(value: object, *, limit: int = 80) -> str:
    """A client's value, short enough to send back."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def as_api_error(error: Exception, *, unavailable_retry_s: float) -> ApiError | None:
    """The answer to an error of the cluster; None where the error is our own mistake."""
    match error:
        case ApiError():
            return error
        case InvalidInput():
            return ApiError(str(error), param=error.parameter)
        case Overloaded():
            return ApiError(
                str(error), status=429, code="overloaded", retry_after_s=error.retry_after_s
            )
        case NodeUnavailable():
            return ApiError(
                str(error), status=503, code="no_node", retry_after_s=unavailable_retry_s
            )
        case RequestFailed():
            return ApiError(str(error), status=500, code="generation_failed")
        case _:
            return None


def internal_error() -> ApiError:
    """The answer to our own mistake; what it was stays in the log."""
    return ApiError(
        "The server failed on this request; its log has the cause.",
        status=500,
        code="internal_error",
    )
