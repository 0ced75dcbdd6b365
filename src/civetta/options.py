"""Every setting of civetta: one frozen dataclass a topic, one definition a setting.

A field carries its flag, help and range; from that come the command-line option
(`cli/options.py`), the environment variable (`CIVETTA_` and the field's name in capitals), the key
of the TOML file (the field's name under `[topic]`) and the documentation. `config.py` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from civetta.server_options import LogOptions, ServerOptions
from civetta.setting import Setting, setting

__all__ = [
    "EFFORTS",
    "PREFILL_BATCH_CPU",
    "PREFILL_BATCH_GPU",
    "TOPICS",
    "CacheOptions",
    "DraftingOptions",
    "EngineOptions",
    "LogOptions",
    "ModelOptions",
    "ReasoningOptions",
    "SamplingOptions",
    "ServerOptions",
    "Settings",
    "VisionOptions",
    "all_settings",
    "settings_of",
]

SEED_MAX = 2**64 - 1
BYTES_MAX = 2**50
PREFILL_BATCH_GPU, PREFILL_BATCH_CPU = 4096, 2048  # docs/measurements/prefill-batch.md
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model, where it runs, in what precision."""

    model: str | None = setting(
        None,
        "-m --model PATH",
        "GGUF file, first shard of a split one, or Hugging Face folder; left out, the embedded"
        " model.",
        expects="a path",
    )
    context: int = setting(
        0, "-c --context N", "Tokens a session can hold; 0 is the model's own length.", low=0
    )
    device: str = setting(
        "auto",
        "--device DEVICE",
        "Where to compute: auto, cpu, cuda or cuda:N.",
        pattern=r"auto|cpu|cuda(:\d{1,3})?",
        expects="auto, cpu, cuda or cuda:N",
    )
    dtype: str = setting(
        "auto",
        "--dtype TYPE",
        "Precision of activations; auto is f32 on a CPU and f16, which a GPU alone has, on a GPU.",
        choices=("auto", "f32", "f16", "bf16"),
    )
    threads: int = setting(
        0, "--threads N", "CPU threads for compute; 0 is one a core.", low=0, high=1024
    )
    weights: str = setting(
        "auto",
        "--weights KIND",
        "How a CPU keeps weights: mapped, as pages of their file that the system may drop and read"
        " again; copied, in memory of the process; auto copies those of 256 MiB at most.",
        choices=("auto", "mapped", "copied"),
    )
    ngram_placement: str = setting(
        "auto",
        "--ngram-placement PLACE",
        "Where the n-gram table is kept; auto is the fastest memory with room for it.",
        choices=("auto", "disk", "ram", "gpu"),
    )
    ngram_reader: str = setting(
        "auto",
        "--ngram-reader KIND",
        "How a table on disk is read: io_uring, a pool of threads, or Python's threads.",
        choices=("auto", "uring", "pool", "python"),
    )
    ngram_cache_mib: int = setting(
        128,
        "--ngram-cache-mib MIB",
        "Rows of a table on disk that are kept in memory; 0 keeps none.",
        low=0,
        high=1 << 20,
    )
    ngram_prefetch: str = setting(
        "on",
        "--ngram-prefetch MODE",
        "Read rows of the table before they are needed; never changes a reply.",
        choices=("on", "off"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionOptions:
    """How images are read."""

    mmproj: str | None = setting(
        None,
        "--mmproj PATH",
        "Vision sidecar (GGUF); left out, the one beside a GGUF model is taken; none does without.",
        expects="a path, or none",
    )
    image_min_tokens: int = setting(
        0,
        "--image-min-tokens N",
        "Tokens an image has at least, by enlarging it; 0 is the model's own bound.",
        low=0,
        high=16_384,
    )
    image_max_tokens: int = setting(
        0,
        "--image-max-tokens N",
        "Tokens an image has at most, by shrinking it; 0 is the model's own bound.",
        low=0,
        high=65_536,
    )
    image_cache_mib: int = setting(
        256,
        "--image-cache-mib MIB",
        "RAM for what the vision tower made of images, so that none is encoded twice.",
        low=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Defaults for turning logits into tokens; None leaves a value to the model's preset."""

    max_tokens: int = setting(
        -1,
        "-n --max-tokens N",
        "Tokens of a reply, reasoning included; -1 is until it ends or the context is full.",
        low=-1,
        excluded=(0,),
        expects="a whole number of at least 1, or -1 for no limit",
    )
    temperature: float | None = setting(
        None, "--temperature X", "Randomness; 0 takes the likeliest token always.", low=0, high=2
    )
    top_p: float | None = setting(
        None, "--top-p X", "Keep the likeliest tokens that together reach X.", low=0, high=1
    )
    top_k: int | None = setting(
        None, "--top-k N", "Keep the N likeliest tokens; 0 keeps all.", low=0
    )
    min_p: float | None = setting(
        None, "--min-p X", "Drop tokens less likely than X times the likeliest.", low=0, high=1
    )
    min_keep: int | None = setting(
        None, "--min-keep N", "Number of tokens that survive every filter.", low=1
    )
    seed: int | None = setting(
        None,
        "--seed N",
        "Makes replies repeatable; left out, each reply has its own.",
        low=0,
        high=SEED_MAX,
    )
    repeat_penalty: float | None = setting(
        None,
        "--repeat-penalty X",
        "Lowers the score of tokens within the repeat window; 1 is off.",
        low=0.01,
        high=10,
    )
    repeat_last_n: int | None = setting(
        None, "--repeat-last-n N", "Tokens in the repeat window; 0 is off, -1 is all.", low=-1
    )
    frequency_penalty: float | None = setting(
        None, "--frequency-penalty X", "Lowers a token's score at each use.", low=-2, high=2
    )
    presence_penalty: float | None = setting(
        None, "--presence-penalty X", "Lowers a token's score once it was used.", low=-2, high=2
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningOptions:
    """Defaults for thinking; auto is the chat template's own default."""

    think: str = setting(
        "auto", "--think MODE", "Reason before answering.", choices=("auto", "on", "off")
    )
    reasoning_effort: str = setting(
        "auto",
        "--reasoning-effort LEVEL",
        "How much to reason; goes with thinking on.",
        choices=("auto", *EFFORTS),
    )
    preserve_thinking: str = setting(
        "auto",
        "--preserve-thinking MODE",
        "Keep the reasoning of earlier turns in the prompt.",
        choices=("auto", "on", "off"),
    )
    thinking_budget: int = setting(
        -1,
        "--thinking-budget N",
        "Tokens of a thought; one that is longer is closed and answered. -1 is no limit.",
        low=-1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How requests share the engine."""

    sessions: int = setting(
        4,
        "-j --sessions N",
        "Requests that run at the same time.",
        low=1,
        high=256,
    )
    prefill_batch: int = setting(
        0,
        "--prefill-batch N",
        f"Prompt tokens computed in one go, never changes a reply; 0 is {PREFILL_BATCH_GPU} on a GPU"
        f" and {PREFILL_BATCH_CPU} on a CPU.",
        low=0,
        high=8192,
        excluded=tuple(range(1, 64)),
        expects="a whole number from 64 to 8192, or 0 for the device's best",
    )
    prefill_chunk: int = setting(
        512,
        "--prefill-chunk N",
        "Prompt tokens computed between the tokens of replies under way.",
        low=64,
        high=8192,
    )
    max_pending: int = setting(
        16, "--max-pending N", "Requests that may wait; one more is answered with 429.", low=0
    )
    request_timeout_ms: int = setting(
        0, "--request-timeout-ms MS", "Limit on waiting plus generating; 0 is none.", low=0
    )
    stall_timeout_ms: int = setting(
        60_000,
        "--stall-timeout-ms MS",
        "A step longer than this is logged as a stall, and health checks fail; 0 is never.",
        low=0,
    )
    max_output_bytes: int = setting(
        1_048_576,
        "--max-output-bytes BYTES",
        "Text that a request may generate before it ends with reason length.",
        low=1,
    )

    def batch_on(self, device: str) -> int:
        """Prompt tokens computed in one go on a device such as "cpu" or "cuda:0"."""
        best = PREFILL_BATCH_CPU if device == "cpu" else PREFILL_BATCH_GPU
        return self.prefill_batch or best


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """How much is kept for requests that begin like earlier ones; never changes a reply."""

    cache: str = setting(
        "on",
        "--cache MODE",
        "Keep states of prompts and replies for later requests.",
        choices=("on", "off"),
    )
    cache_ram_bytes: int = setting(
        0,
        "--cache-ram-bytes BYTES",
        "Memory for kept states; 0 is half of what is free, at most 32 GiB.",
        low=0,
        high=BYTES_MAX,
    )
    cache_disk: str | None = setting(
        None,
        "--cache-disk DIR",
        "Folder for states that outlive the process; left out, none do.",
        expects="a path",
    )
    cache_disk_bytes: int = setting(
        8 << 30,
        "--cache-disk-bytes BYTES",
        "Most that the folder may take.",
        low=1 << 20,
        high=BYTES_MAX,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingOptions:
    """Drafting ahead, which changes the speed of replies and nothing else."""

    speculative: str = setting(
        "off",
        "--speculative MODE",
        "Draft tokens and verify several at once, which never changes a reply: mtp drafts with the"
        " model's own head and by lookup, lookup in the text alone, off not at all.",
        choices=("mtp", "lookup", "off"),
    )
    mtp_model: str | None = setting(
        None,
        "--mtp-model PATH",
        "Draft head (MTP sidecar) of the model; left out, the one in its files or beside them.",
        expects="a path",
    )
    mtp_norm: str = setting(
        "wide",
        "--mtp-norm KIND",
        "How the head norms its input: wide over all streams together, stream by stream for files"
        " made that way; a wrong choice only costs accepted drafts.",
        choices=("wide", "stream"),
    )
    draft_tokens: int = setting(
        7,
        "-d --draft-tokens N",
        "Drafts of a reply verified at once, at most; the length adapts below it.",
        low=1,
        high=7,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All topics, resolved and checked; built by `config.load_settings`."""

    model: ModelOptions = field(default_factory=ModelOptions)
    vision: VisionOptions = field(default_factory=VisionOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    reasoning: ReasoningOptions = field(default_factory=ReasoningOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    drafting: DraftingOptions = field(default_factory=DraftingOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    log: LogOptions = field(default_factory=LogOptions)


TOPICS: dict[str, type[Any]] = {
    "model": ModelOptions,
    "vision": VisionOptions,
    "sampling": SamplingOptions,
    "reasoning": ReasoningOptions,
    "engine": EngineOptions,
    "cache": CacheOptions,
    "drafting": DraftingOptions,
    "server": ServerOptions,
    "log": LogOptions,
}


def settings_of(topic: str) -> tuple[Setting, ...]:
    """The settings of one topic, in the order of its dataclass."""
    found = []
    for item in fields(TOPICS[topic]):
        more = dict(item.metadata)
        *flags, last = more.pop("flags")
        metavar = "" if last.startswith("-") else last
        found.append(
            Setting(
                topic=topic,
                name=item.name,
                kind="str" if more.get("many") else str(item.type).removesuffix(" | None"),
                default=item.default,
                flags=tuple(flags) if metavar else (*flags, last),
                metavar=metavar,
                **more,
            )
        )
    return tuple(found)


def all_settings() -> dict[str, Setting]:
    """Every setting by its name; names are unique across topics."""
    return {item.name: item for topic in TOPICS for item in settings_of(topic)}
