"""Every error hotrack raises on purpose.

Each carries what a client needs (HTTP status, OpenAI ``type`` and ``code``, ``Retry-After``) so that the
renderer has no cases, and a message that says what was asked, what was found and what to do.

    HotrackError
      ConfigError               wrong options or YAML; the process does not start
        GraphPoolUnavailableError
      CheckpointError           missing, damaged or unsupported model files
      RequestError              the client's mistake (4xx)
        ModelNotFoundError, ContextLengthError, PayloadTooLargeError, UnauthorizedError, ForbiddenError
      UnavailableError          ours, and temporary (429 / 503 / 504); carries retry_after_s
        QueueFullError, ModelAsleepError, ModelStartingError, WakeFailedError, DrainingError,
        InsufficientMemoryError, DeadlineExceededError, MemberFailedError, BadGatewayError
      EngineDeadError           a rank or the engine process is gone
      TransitionError           sleep or wake did not happen; the state is the one before
        SleepError, WakeError, ChecksumError
"""

from typing import ClassVar


class HotrackError(Exception):
    """Base class; ``code`` is the stable machine-readable name, ``status`` the HTTP status, ``exit_code``
    that of a process which ends because of it.
    """

    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    type: ClassVar[str] = "internal_error"
    code: str = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code


class ConfigError(HotrackError):
    """An option is unknown, malformed or contradicts another one."""

    exit_code = 2
    type = "config_error"
    code = "config_error"


class GraphPoolUnavailableError(ConfigError):
    """This machine cannot unmap the memory of captured graphs; whoever wants to may run without that."""

    code = "graph_pool_unavailable"


class CheckpointError(HotrackError):
    """Model files are missing, damaged, hostile or of an unsupported kind."""

    exit_code = 3
    type = "checkpoint_error"
    code = "checkpoint_error"


class RequestError(HotrackError):
    """The request cannot be served as written; retrying the same request will not help."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class ModelNotFoundError(RequestError):
    status = 404
    code = "model_not_found"


class ContextLengthError(RequestError):
    code = "context_length_exceeded"


class PayloadTooLargeError(RequestError):
    status = 413
    code = "payload_too_large"


class UnauthorizedError(RequestError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ForbiddenError(RequestError):
    status = 403
    type = "permission_error"
    code = "forbidden"


class UnavailableError(HotrackError):
    """The request is fine; the service cannot take it now. ``retry_after_s`` is an honest estimate."""

    status = 503
    type = "service_unavailable"
    code = "service_unavailable"


class QueueFullError(UnavailableError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class ModelAsleepError(UnavailableError):
    code = "model_asleep"


class ModelStartingError(UnavailableError):
    code = "model_starting"


class WakeFailedError(UnavailableError):
    code = "wake_failed"


class DrainingError(UnavailableError):
    code = "draining"


class DrainTimeoutError(UnavailableError):
    """A stream was ended because its member had to give the device back and the drain deadline passed."""

    code = "drain_timeout"


class InsufficientMemoryError(UnavailableError):
    code = "insufficient_memory"


class DeadlineExceededError(UnavailableError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class MemberFailedError(UnavailableError):
    code = "member_failed"


class BadGatewayError(UnavailableError):
    """A member answered with something that is not a proper HTTP response, or stopped half way."""

    status = 502
    type = "upstream_error"
    code = "bad_gateway"


class EngineDeadError(HotrackError):
    status = 503
    type = "service_unavailable"
    code = "engine_dead"


class TransitionError(HotrackError):
    """A sleep or wake was rolled back; memory and state are as before the call."""

    status = 500
    type = "transition_error"
    code = "transition_failed"


class SleepError(TransitionError):
    code = "sleep_failed"


class WakeError(TransitionError):
    code = "wake_failed"


class ChecksumError(WakeError):
    """The bytes that came back are not the bytes that went to sleep."""

    code = "checksum_mismatch"


def error_from_code(code: str, message: str) -> HotrackError:
    """The error another process raised, from what it sent: the class whose ``code`` this is, else
    ``HotrackError``.
    """
    pending: list[type[HotrackError]] = [HotrackError]
    while pending:
        cls = pending.pop(0)
        if cls.code == code:
            return cls(message)
        pending.extend(cls.__subclasses__())
    return HotrackError(message, code=code)
