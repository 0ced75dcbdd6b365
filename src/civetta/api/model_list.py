"""The model that is served, told in the words of each kind of client: one answer has them all.

OpenAI's clients read `data`, Anthropic's read the same entries by other fields, and Codex reads
`models`, its own catalogue, in which a field that is missing voids the whole answer.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from civetta.engine.protocol import ModelInfo

TOOL_OUTPUT_BYTES = 10_000
"""What Codex keeps of the output of one tool call."""
# Codex begins its prompt with what the catalogue says; an empty text would leave the model alone.
CODEX_INSTRUCTIONS = (
    "You are a coding agent in the Codex command line, working with a user on the files of one"
    " folder. Read what you need with the shell before you change anything. Make the smallest"
    " change that does the task, in the style of the code around it, and run the tests that cover"
    " it. Ask before you delete or overwrite what you did not make. When you are done, say in a few"
    " sentences what you changed and what you could not check."
)
_EFFORTS = {
    "low": "Short thoughts, fastest answers",
    "medium": "Longer thoughts",
    "xhigh": "Thinks as long as it needs",
}


def model_list(model_id: str, info: ModelInfo) -> dict[str, Any]:
    """The body of GET /v1/models."""
    return {
        "object": "list",
        "data": [model_entry(model_id, info)],
        "models": [codex_entry(model_id, info)],
        "first_id": model_id,
        "last_id": model_id,
        "has_more": False,
    }


def model_entry(model_id: str, info: ModelInfo) -> dict[str, Any]:
    """One model for clients of OpenAI and Anthropic."""
    inputs = [*_inputs(info), *(["video"] if _takes_videos(info) else [])]
    return {
        "id": model_id,
        "object": "model",
        "type": "model",
        "display_name": model_id,
        "created": info.created_s,
        "created_at": datetime.fromtimestamp(info.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "owned_by": "civetta",
        "context_length": info.context_tokens,
        "max_model_len": info.context_tokens,
        "max_input_tokens": info.context_tokens,
        "modalities": inputs,
        "architecture": {"input_modalities": inputs, "output_modalities": ["text"]},
        "meta": {
            "n_ctx": info.context_tokens,
            "n_vocab": info.vocab_size,
            "n_params": info.parameters,
            "format": info.format,
            "device": info.device,
            "dtype": info.dtype,
        },
    }


def codex_entry(model_id: str, info: ModelInfo) -> dict[str, Any]:
    """One model for Codex, with every field that any of its versions needs."""
    return {
        "slug": model_id,
        "display_name": model_id,
        "description": f"{model_id}, served by civetta",
        "default_reasoning_level": "xhigh",
        "supported_reasoning_levels": [
            {"effort": effort, "description": text} for effort, text in _EFFORTS.items()
        ],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "availability_nux": None,
        "upgrade": None,
        "base_instructions": CODEX_INSTRUCTIONS,
        "supports_reasoning_summaries": True,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,
        "truncation_policy": {"mode": "bytes", "limit": TOOL_OUTPUT_BYTES},
        "supports_parallel_tool_calls": True,
        "context_window": info.context_tokens,
        "experimental_supported_tools": [],
        "input_modalities": _inputs(info),
    }


def _takes_videos(info: ModelInfo) -> bool:
    return info.images is not None and info.images.video_token_id is not None


# Codex knows these two words; any other would void its catalogue.
def _inputs(info: ModelInfo) -> list[str]:
    return ["text"] if info.images is None else ["text", "image"]
