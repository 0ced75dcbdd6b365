"""The JSON of replies as types, for /openapi.json; tests hold every reply against them.

Nothing is built from them: encoders write plain dicts, which is what a stream of tokens affords.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong: a sentence, a stable code, and the field at fault if there is one."""

    message: str
    type: str
    param: str | None
    code: str
    n_prompt_tokens: int | UnsetType = UNSET
    n_ctx: int | UnsetType = UNSET


class Error(msgspec.Struct, kw_only=True):
    """Every error, whatever its status."""

    error: ErrorDetail


class Health(msgspec.Struct, kw_only=True):
    """ok, loading model, device lost, or stalled with the seconds that a step takes already."""

    status: str
    stalled_s: float | UnsetType = UNSET


class Ready(msgspec.Struct, kw_only=True):
    """ready with the model's id, or loading model."""

    status: str
    model: str | UnsetType = UNSET


class Architecture(msgspec.Struct, kw_only=True):
    """What goes in and what comes out."""

    input_modalities: list[str]
    output_modalities: list[str]


class ModelMeta(msgspec.Struct, kw_only=True):
    """Facts of the loaded model."""

    n_ctx: int
    n_vocab: int
    n_params: int
    format: str
    device: str
    dtype: str


class Model(msgspec.Struct, kw_only=True):
    """The model that is served; its window under every name that clients look for."""

    id: str
    object: Literal["model"]
    type: Literal["model"]
    display_name: str
    created: int
    created_at: str
    owned_by: str
    context_length: int
    max_model_len: int
    max_input_tokens: int
    modalities: list[str]
    architecture: Architecture
    meta: ModelMeta


class ModelList(msgspec.Struct, kw_only=True):
    """A list of one; `models` has it again as Codex's catalogue does."""

    object: Literal["list"]
    data: list[Model]
    models: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: Literal[False]


class NextToken(msgspec.Struct, kw_only=True):
    """How far a reply is; n_remain -1 is until the context is full."""

    n_decoded: int
    n_remain: int


class Slot(msgspec.Struct, kw_only=True):
    """One session. What follows `state` is there while it works."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    prompt: Literal[""]
    state: str
    id_task: int | UnsetType = UNSET
    request_id: str | UnsetType = UNSET
    n_prompt_tokens: int | UnsetType = UNSET
    n_prompt_tokens_cache: int | UnsetType = UNSET
    n_prompt_tokens_processed: int | UnsetType = UNSET
    next_token: list[NextToken] | UnsetType = UNSET


class SettingsDefaults(msgspec.Struct, kw_only=True):
    """The context, and the sampling of a request that asks for none."""

    n_ctx: int
    params: dict[str, Any]


class Modalities(msgspec.Struct, kw_only=True):
    """What the model reads besides text."""

    vision: bool
    audio: bool


class Props(msgspec.Struct, kw_only=True):
    """How the server is set up. An empty template is the built-in one."""

    default_generation_settings: SettingsDefaults
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: Modalities
    n_ctx: int
    build_info: str


class Aborted(msgspec.Struct, kw_only=True):
    """A request that was ended."""

    id: str
    object: Literal["request"]
    aborted: bool


class PromptDetails(msgspec.Struct, kw_only=True):
    """Prompt tokens that needed no work."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, kw_only=True):
    """Tokens of the thought."""

    reasoning_tokens: int


class UsageReply(msgspec.Struct, kw_only=True):
    """Tokens of prompt and reply."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    cached_tokens: int
    draft_tokens: int | UnsetType = UNSET
    draft_tokens_accepted: int | UnsetType = UNSET


class Timings(msgspec.Struct, kw_only=True):
    """llama.cpp's timings: milliseconds, tokens a second; and where cached tokens came from."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    cache_source: Literal["none", "ram", "disk"]
    cache_miss_reason: str | UnsetType = UNSET
    cache_miss_token: int | UnsetType | None = UNSET
    shared_prefix_wait_ms: float | UnsetType = UNSET
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET
    draft_n_by_depth: list[int] | UnsetType = UNSET
    draft_n_accepted_by_depth: list[int] | UnsetType = UNSET


class CalledFunction(msgspec.Struct, kw_only=True):
    """Name, and arguments as JSON text."""

    name: str
    arguments: str


class Call(msgspec.Struct, kw_only=True):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Answer(msgspec.Struct, kw_only=True):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One reply."""

    index: int
    message: Answer
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A buffered chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    timings: Timings


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One continuation."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class Completion(msgspec.Struct, kw_only=True):
    """A buffered completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply
    timings: Timings


class LlamaCompletion(msgspec.Struct, kw_only=True):
    """llama.cpp's buffered completion."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    timings: Timings
    completion_probabilities: list[dict[str, Any]] | UnsetType = UNSET
