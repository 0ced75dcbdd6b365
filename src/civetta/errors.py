"""The exception tree; every error a user can cause has one clear sentence and a stable code.

CivettaError
├── UsageError                 a flag, value, combination or config key is wrong      (exit 2)
├── CheckpointError            something about model files                            (exit 1)
│   ├── CheckpointNotFound     the path or one of its parts is not there
│   ├── CheckpointMalformed    bytes that are not what the format says, truncation
│   ├── ArchitectureUnsupported  a well-formed file of another model
│   ├── TensorTypeUnknown      a tensor in a block format we cannot read
│   ├── TensorMissing          the model needs a tensor the files do not have
│   ├── TensorSurplus          the files have a tensor the model does not use
│   └── TensorShapeWrong       present, but not in the shape the config implies
├── TokenizerError             no tokenizer where one is needed, or a broken one
├── RequestError               a request the server refuses                           (HTTP 4xx)
│   ├── RequestInvalid         a field or its value is wrong, names `param`
│   │   └── ImageInvalid       an image that cannot be used, names its index
│   ├── TemplateError          messages that the chat template cannot render
│   ├── ContextOverflow        prompt does not fit the context
│   ├── ModelNotFound          another model id than the one served
│   ├── Unauthorized           the API key is missing or wrong                        (HTTP 401)
│   ├── BodyTooLarge           more bytes than --max-request-bytes                    (HTTP 413)
│   ├── HeadersTooLarge        more bytes than --max-header-bytes                     (HTTP 431)
│   ├── HeaderTimeout          a request that does not arrive                         (HTTP 408)
│   ├── BodyTimeout            a body that does not arrive                            (HTTP 408)
│   ├── OriginRefused          a web page that --cors-origin does not name            (HTTP 403)
│   ├── RouteNotFound          a path the server does not have                        (HTTP 404)
│   ├── ResponseNotFound       a response that is not kept                            (HTTP 404)
│   └── MethodNotAllowed       a path the server has, with another method             (HTTP 405)
├── EngineBusy                 the queue is full                                      (HTTP 429)
│   ├── NoSlotFree             every session is taken, asked of /slots                (HTTP 503)
│   └── TooManyRequests        more open requests than --max-connections              (HTTP 503)
├── EngineClosed               shutting down or not ready                             (HTTP 503)
├── RequestAborted             somebody ended the request by its id                   (HTTP 499)
├── RequestTimeout             --request-timeout-ms ran out                           (HTTP 504)
├── ListenError                the server cannot listen on its address                (exit 1)
├── OutputFailed               a result cannot be written: full disk, closed stdout    (exit 1)
├── CacheUnusable              the folder of --cache-disk cannot be used               (exit 1)
├── StoreUnusable              the folder of --store cannot be used                   (exit 1)
├── DeviceError                the device is absent, lost or too small
├── ReadFailed                 a read of model data failed while serving              (HTTP 500)
├── LogitsInvalid              the model computed NaN or infinity                     (HTTP 500)
├── ConstraintFailed           a reply's grammar cannot be followed any further       (HTTP 400)
├── OutputBackpressure         a client reads its reply too slowly                    (HTTP 500)
└── RequestFailed              a request met a fault of civetta itself                (HTTP 500)

Each class has `code` (stable, for machines), `exit_code` (for commands) and `http_status`.
A message says what happened, names the thing, and says what to do about it.
"""

from __future__ import annotations

from typing import Self


class CivettaError(Exception):
    """Root of every error that is shown to a user as one sentence."""

    code = "error"
    exit_code = 1
    http_status = 500

    @property
    def message(self) -> str:
        """The sentence, without code or traceback."""
        return str(self)


class UsageError(CivettaError):
    """A flag, value, combination of flags or config key that cannot be accepted."""

    code = "usage"
    exit_code = 2
    http_status = 400


class CheckpointError(CivettaError):
    """Model files that cannot be used."""

    code = "checkpoint_invalid"


class CheckpointNotFound(CheckpointError):
    """The model path, a shard, or a sidecar does not exist or cannot be opened."""

    code = "checkpoint_not_found"


class CheckpointMalformed(CheckpointError):
    """Bytes contradict the container format: bad magic, lengths, offsets, truncation, bad JSON."""

    code = "checkpoint_malformed"


class ArchitectureUnsupported(CheckpointError):
    """A well-formed checkpoint of a model that is not `qwen4_exp`."""

    code = "architecture_unsupported"


class TensorTypeUnknown(CheckpointError):
    """A tensor is stored in a type that civetta cannot decode."""

    code = "tensor_type_unknown"


class TensorMissing(CheckpointError):
    """The configuration implies a tensor that no file has."""

    code = "tensor_missing"


class TensorSurplus(CheckpointError):
    """A file has a tensor that the model would not use."""

    code = "tensor_surplus"


class TensorShapeWrong(CheckpointError):
    """A tensor's shape differs from the one the configuration implies."""

    code = "tensor_shape_wrong"


class TokenizerError(CivettaError):
    """A tokenizer is missing where text is needed, or its files are broken."""

    code = "tokenizer_invalid"


class RequestError(CivettaError):
    """A request that is refused; nothing was generated.

    `param` names the field at fault (dotted path), or is None.
    """

    code = "invalid_request"
    http_status = 400
    exit_code = 2

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class RequestInvalid(RequestError):
    """A field or its value is wrong; `param` names it."""


class ImageInvalid(RequestInvalid):
    """An image that cannot be fetched, decoded or fitted; `index` counts a request's from 1."""

    code = "invalid_image"

    def __init__(self, reason: str, *, index: int, param: str | None = None) -> None:
        super().__init__(f"Image {index} cannot be used: {reason}.", param=param)
        self.index = index
        self.reason = reason


class VideoInvalid(RequestInvalid):
    """A video that cannot be decoded or fitted; `index` counts a request's from 1."""

    code = "invalid_video"

    def __init__(self, reason: str, *, index: int, param: str | None = None) -> None:
        super().__init__(f"Video {index} cannot be used: {reason}.", param=param)
        self.index = index
        self.reason = reason


class TemplateError(RequestError):
    """Messages that the chat template cannot render."""

    code = "invalid_messages"


class ContextOverflow(RequestError):
    """The prompt does not fit the context; carries both sizes in tokens."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, context_tokens: int, max_tokens: int | None) -> None:
        asked = prompt_tokens + (max_tokens or 0)
        super().__init__(
            f"This model's maximum context length is {context_tokens} tokens, however you requested"
            f" {asked} tokens ({prompt_tokens} in the messages, {max_tokens or 0} in the completion)."
            " Shorten the messages or start the server with a larger --context.",
            param="messages",
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class ModelNotFound(RequestError):
    """A request names a model id that is not the one served."""

    code = "model_not_found"
    http_status = 404


class Unauthorized(RequestError):
    """The API key is missing or wrong."""

    code = "invalid_api_key"
    http_status = 401


class BodyTooLarge(RequestError):
    """A request body has more bytes than the server accepts."""

    code = "request_too_large"
    http_status = 413


class HeadersTooLarge(RequestError):
    """Request line and headers have more bytes than the server accepts."""

    code = "headers_too_large"
    http_status = 431


class HeaderTimeout(RequestError):
    """A connection that does not bring a whole request line and headers in time."""

    code = "header_timeout"
    http_status = 408


class BodyTimeout(RequestError):
    """A request's body did not arrive in time."""

    code = "body_timeout"
    http_status = 408


class OriginRefused(RequestError):
    """A web page of an origin that may not use the server."""

    code = "origin_refused"
    http_status = 403


class RouteNotFound(RequestError):
    """A path that this server does not have."""

    code = "not_found"
    http_status = 404


class ResponseNotFound(RequestError):
    """A response of /v1/responses that was not kept, or is deleted or past its days."""

    code = "response_not_found"
    http_status = 404


class MethodNotAllowed(RequestError):
    """A path that this server has, for another method."""

    code = "method_not_allowed"
    http_status = 405


class EngineBusy(CivettaError):
    """The queue is full; retry later."""

    code = "queue_full"
    http_status = 429


class TooManyRequests(EngineBusy):
    """More requests are open than the server holds; retry later."""

    code = "too_many_connections"
    http_status = 503


class NoSlotFree(EngineBusy):
    """Every session is taken; said to those who ask /slots for it."""

    code = "no_slot_free"
    http_status = 503


class EngineClosed(CivettaError):
    """The engine is shutting down or not ready yet."""

    code = "not_ready"
    http_status = 503


class RequestAborted(CivettaError):
    """Somebody ended the request by its id; 499 is nginx's status for a request called off."""

    code = "request_aborted"
    http_status = 499


class RequestTimeout(CivettaError):
    """The server's limit on waiting plus generating ran out."""

    code = "request_timeout"
    http_status = 504


class ListenError(CivettaError):
    """The server cannot listen on its address."""

    code = "cannot_listen"


class OutputFailed(CivettaError):
    """A result cannot be written where it should go."""

    code = "output_failed"

    @classmethod
    def at(cls, place: str, error: OSError) -> Self:
        """The error for `place`, a path or stream, that the system told by `error`."""
        return cls(
            f"Cannot write the result to {place}: {error.strerror}; make room or choose another"
            " place."
        )


class CacheUnusable(CivettaError):
    """The folder of the disk cache cannot be opened, or another process uses it."""

    code = "cache_unusable"


class StoreUnusable(CivettaError):
    """The folder of kept responses cannot be opened."""

    code = "store_unusable"


class DeviceError(CivettaError):
    """The device is absent, lost, or too small for what was asked."""

    code = "device_error"
    http_status = 503


class DeviceLost(DeviceError):
    """The device failed while it computed, for good: this process can answer nothing any more."""

    code = "device_lost"
    exit_code = 75  # EX_TEMPFAIL of sysexits.h: starting again may help


class ReadFailed(CivettaError):
    """Reading model data failed while serving; the request fails, the process lives."""

    code = "read_failed"


class LogitsInvalid(CivettaError):
    """The model computed NaN or infinite logits; no token can be chosen from them."""

    code = "logits_invalid"


class ConstraintFailed(CivettaError):
    """A reply's grammar or schema passed its bounds on work while the reply was generated."""

    code = "constraint_failed"
    http_status = 400


class OutputBackpressure(CivettaError):
    """A client left more of its reply unread than the engine keeps for it; the request ended."""

    code = "output_backpressure"


class RequestFailed(CivettaError):
    """A fault of civetta itself ended this request; the process lives and the log has the rest."""

    code = "internal_error"
