"""Everything jaxinfer raises on purpose, in one tree.

No imports of ours: every layer may use these. The HTTP status of each class is one dict in
jaxinfer/server/protocol.py, not an attribute here.
"""


class JaxInferError(Exception):
    """Base of all errors that a caller may want to catch.

    Args:
        message: what was expected, what came, and what to do.
        param: the request field at fault, or None.
        code: a short machine-readable word (OpenAI's `error.code`), or None.
    """

    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(JaxInferError):
    """The request can never succeed as it is (HTTP 400)."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt, or prompt and max_tokens, are over what the model or the KV pool holds."""

    code = "context_length_exceeded"


class ModelNotFound(InvalidRequest):
    """No model of that name is served here (HTTP 404)."""

    code = "model_not_found"


class Forbidden(InvalidRequest):
    """Well-formed, but more than the caller's API key may ask for (HTTP 403)."""

    code = "forbidden"


class Conflict(InvalidRequest):
    """Well-formed, but not now: the server is in another state (HTTP 409)."""

    code = "conflict"


class Overloaded(JaxInferError):
    """Refused for lack of room or time; the same request may succeed later (HTTP 429)."""

    def __init__(self, message: str, *, retry_after_s: float, code: str = "overloaded"):
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class Unavailable(JaxInferError):
    """Loading, draining or broken; not the request's fault (HTTP 503)."""

    def __init__(self, message: str, *, retry_after_s: float, code: str = "unavailable"):
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(JaxInferError):
    """The request's own time limit passed (HTTP 504)."""

    code = "deadline_exceeded"


class EngineFailure(JaxInferError):
    """A step failed on the device or in the engine (HTTP 500)."""

    code = "engine_failure"


class NotNumbers(EngineFailure):
    """The logits of a sequence were not numbers: the weights may be damaged."""

    code = "not_numbers"


class PoolLost(EngineFailure):
    """The KV pool's arrays went down with a step: nothing can run until they are made anew."""


class ConfigError(JaxInferError):
    """A flag, a config field or a key of config.json has a value that cannot work.

    serve.py exits with 2; what is wrong in a checkpoint, `build` turns into a CheckpointError.
    """


class NoRoom(ConfigError):
    """Too little memory is free for it now; it may fit when something else has gone."""
