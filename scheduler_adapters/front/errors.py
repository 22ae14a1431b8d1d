"""The error that clients of the HTTP API get."""

from __future__ import annotations

from typing import Any

from scheduler_adapters.errors import AdapterError


class OpenAIError(AdapterError, ValueError):
    """An error in OpenAI's form: an HTTP status, a message, and the parameter that is at fault.

    `param` may be a path inside a parameter, such as `messages[1].content[0].type`.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}
