"""Every setting of civetta: one frozen dataclass a topic, one definition a setting.

A field carries its flag, help and range; from that come the command-line option
(`cli/options.py`), the environment variable (`CIVETTA_` and the field's name in capitals), the key
of the TOML file (the field's name under `[topic]`) and the documentation. `config.py` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T")
SEED_MAX = 2**64 - 1
INT_MAX = 2**31 - 1
BYTES_MAX = 2**50
PREFILL_BATCH_GPU, PREFILL_BATCH_CPU = 4096, 2048  # docs/measurements/prefill-batch.md
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field: how it is spelled, explained and checked. `low` and `high` are inclusive.

    `kind` is int, float, str or bool, from the field's annotation. Without a metavar an int counts
    how often its flag appears.
    """

    topic: str
    name: str
    kind: str
    default: Any
    flags: tuple[str, ...]
    metavar: str
    help: str
    low: float | None = None
    high: float | None = None
    excluded: tuple[int, ...] = ()  # values between low and high that mean nothing
    choices: tuple[str, ...] = ()
    pattern: str = ""  # for str: what the whole value has to match
    expects: str = ""  # the cure in words, where the range or the choices do not say it
    env: tuple[str, ...] = ()  # further environment names, weaker than the CIVETTA_ one
    many: bool = False  # a tuple of such values: flag repeated, environment split at spaces

    @property
    def env_names(self) -> tuple[str, ...]:
        """Environment variables that set it, strongest first."""
        return (f"CIVETTA_{self.name.upper()}", *self.env)

    @property
    def wanted(self) -> str:
        """What a value has to be, in words that follow "give"."""
        if self.expects:
            return self.expects
        if self.kind == "bool":
            return "true or false"
        if self.choices:
            return f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
        noun = {"int": "a whole number", "float": "a number"}.get(self.kind, "a text")
        if self.low is None:
            return noun
        if self.high is None or self.high == INT_MAX:
            return f"{noun} of at least {self.low:g}"
        high = f"{self.high:g}" if self.kind == "float" else str(self.high)
        return f"{noun} from {self.low:g} to {high}"


def _setting(default: T, flags: str, help: str, **more: Any) -> T:  # noqa: A002
    value: T = field(default=default, metadata={"flags": flags.split(), "help": help, **more})
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model, where it runs, in what precision."""

    model: str | None = _setting(
        None,
        "-m --model PATH",
        "GGUF file, first shard of a split one, or Hugging Face folder; left out, the embedded"
        " model.",
        expects="a path",
    )
    context: int = _setting(
        0, "-c --context N", "Tokens a session can hold; 0 is the model's own length.", low=0
    )
    device: str = _setting(
        "auto",
        "--device DEVICE",
        "Where to compute: auto, cpu, cuda or cuda:N.",
        pattern=r"auto|cpu|cuda(:\d{1,3})?",
        expects="auto, cpu, cuda or cuda:N",
    )
    dtype: str = _setting(
        "auto",
        "--dtype TYPE",
        "Precision of activations; auto is f32 on a CPU and bf16 on a GPU.",
        choices=("auto", "f32", "bf16"),
    )
    threads: int = _setting(
        0, "--threads N", "CPU threads for compute; 0 is one a core.", low=0, high=1024
    )
    ngram_placement: str = _setting(
        "auto",
        "--ngram-placement PLACE",
        "Where the n-gram table is kept; auto is the fastest memory with room for it.",
        choices=("auto", "disk", "ram", "gpu"),
    )
    ngram_reader: str = _setting(
        "auto",
        "--ngram-reader KIND",
        "How a table on disk is read: io_uring, a pool of threads, or Python's threads.",
        choices=("auto", "uring", "pool", "python"),
    )
    ngram_cache_mib: int = _setting(
        128,
        "--ngram-cache-mib MIB",
        "Rows of a table on disk that are kept in memory; 0 keeps none.",
        low=0,
        high=1 << 20,
    )
    ngram_prefetch: str = _setting(
        "on",
        "--ngram-prefetch MODE",
        "Read rows of the table before they are needed; never changes a reply.",
        choices=("on", "off"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionOptions:
    """How images are read."""

    mmproj: str | None = _setting(
        None,
        "--mmproj PATH",
        "Vision sidecar (GGUF); left out, the one beside a GGUF model is taken; none does without.",
        expects="a path, or none",
    )
    image_min_tokens: int = _setting(
        0,
        "--image-min-tokens N",
        "Tokens an image has at least, by enlarging it; 0 is the model's own bound.",
        low=0,
        high=16_384,
    )
    image_max_tokens: int = _setting(
        0,
        "--image-max-tokens N",
        "Tokens an image has at most, by shrinking it; 0 is the model's own bound.",
        low=0,
        high=65_536,
    )
    image_cache_mib: int = _setting(
        256,
        "--image-cache-mib MIB",
        "RAM for what the vision tower made of images, so that none is encoded twice.",
        low=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Defaults for turning logits into tokens; None leaves a value to the model's preset."""

    max_tokens: int = _setting(
        -1,
        "-n --max-tokens N",
        "Tokens of a reply, reasoning included; -1 is until it ends or the context is full.",
        low=-1,
        excluded=(0,),
        expects="a whole number of at least 1, or -1 for no limit",
    )
    temperature: float | None = _setting(
        None, "--temperature X", "Randomness; 0 takes the likeliest token always.", low=0, high=2
    )
    top_p: float | None = _setting(
        None, "--top-p X", "Keep the likeliest tokens that together reach X.", low=0, high=1
    )
    top_k: int | None = _setting(
        None, "--top-k N", "Keep the N likeliest tokens; 0 keeps all.", low=0
    )
    min_p: float | None = _setting(
        None, "--min-p X", "Drop tokens less likely than X times the likeliest.", low=0, high=1
    )
    min_keep: int | None = _setting(
        None, "--min-keep N", "Number of tokens that survive every filter.", low=1
    )
    seed: int | None = _setting(
        None,
        "--seed N",
        "Makes replies repeatable; left out, each reply has its own.",
        low=0,
        high=SEED_MAX,
    )
    repeat_penalty: float | None = _setting(
        None,
        "--repeat-penalty X",
        "Lowers the score of tokens within the repeat window; 1 is off.",
        low=0.01,
        high=10,
    )
    repeat_last_n: int | None = _setting(
        None, "--repeat-last-n N", "Tokens in the repeat window; 0 is off, -1 is all.", low=-1
    )
    frequency_penalty: float | None = _setting(
        None, "--frequency-penalty X", "Lowers a token's score at each use.", low=-2, high=2
    )
    presence_penalty: float | None = _setting(
        None, "--presence-penalty X", "Lowers a token's score once it was used.", low=-2, high=2
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningOptions:
    """Defaults for thinking; auto is the chat template's own default."""

    think: str = _setting(
        "auto", "--think MODE", "Reason before answering.", choices=("auto", "on", "off")
    )
    reasoning_effort: str = _setting(
        "auto",
        "--reasoning-effort LEVEL",
        "How much to reason; goes with thinking on.",
        choices=("auto", *EFFORTS),
    )
    preserve_thinking: str = _setting(
        "auto",
        "--preserve-thinking MODE",
        "Keep the reasoning of earlier turns in the prompt.",
        choices=("auto", "on", "off"),
    )
    thinking_budget: int = _setting(
        -1,
        "--thinking-budget N",
        "Tokens of a thought; one that is longer is closed and answered. -1 is no limit.",
        low=-1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How requests share the engine."""

    sessions: int = _setting(
        4,
        "-j --sessions N",
        "Requests that run at the same time.",
        low=1,
        high=256,
    )
    prefill_batch: int = _setting(
        0,
        "--prefill-batch N",
        f"Prompt tokens computed in one go, never changes a reply; 0 is {PREFILL_BATCH_GPU} on a GPU"
        f" and {PREFILL_BATCH_CPU} on a CPU.",
        low=0,
        high=8192,
        excluded=tuple(range(1, 64)),
        expects="a whole number from 64 to 8192, or 0 for the device's best",
    )
    prefill_chunk: int = _setting(
        512,
        "--prefill-chunk N",
        "Prompt tokens computed between the tokens of replies under way.",
        low=64,
        high=8192,
    )
    max_pending: int = _setting(
        16, "--max-pending N", "Requests that may wait; one more is answered with 429.", low=0
    )
    request_timeout_ms: int = _setting(
        0, "--request-timeout-ms MS", "Limit on waiting plus generating; 0 is none.", low=0
    )
    stall_timeout_ms: int = _setting(
        60_000,
        "--stall-timeout-ms MS",
        "A step longer than this is logged as a stall, and health checks fail; 0 is never.",
        low=0,
    )
    max_output_bytes: int = _setting(
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

    cache: str = _setting(
        "on",
        "--cache MODE",
        "Keep states of prompts and replies for later requests.",
        choices=("on", "off"),
    )
    cache_ram_bytes: int = _setting(
        0,
        "--cache-ram-bytes BYTES",
        "Memory for kept states; 0 is half of what is free, at most 32 GiB.",
        low=0,
        high=BYTES_MAX,
    )
    cache_disk: str | None = _setting(
        None,
        "--cache-disk DIR",
        "Folder for states that outlive the process; left out, none do.",
        expects="a path",
    )
    cache_disk_bytes: int = _setting(
        8 << 30,
        "--cache-disk-bytes BYTES",
        "Most that the folder may take.",
        low=1 << 20,
        high=BYTES_MAX,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingOptions:
    """Drafting ahead, which changes the speed of replies and nothing else."""

    speculative: str = _setting(
        "off",
        "--speculative MODE",
        "Draft tokens and verify several at once, which never changes a reply: mtp drafts with the"
        " model's own head and by lookup, lookup in the text alone, off not at all.",
        choices=("mtp", "lookup", "off"),
    )
    mtp_model: str | None = _setting(
        None,
        "--mtp-model PATH",
        "Draft head (MTP sidecar) of the model; left out, the one in its files or beside them.",
        expects="a path",
    )
    mtp_norm: str = _setting(
        "wide",
        "--mtp-norm KIND",
        "How the head norms its input: wide over all streams together, stream by stream for files"
        " made that way; a wrong choice only costs accepted drafts.",
        choices=("wide", "stream"),
    )
    draft_tokens: int = _setting(
        7,
        "-d --draft-tokens N",
        "Drafts of a reply verified at once, at most; the length adapts below it.",
        low=1,
        high=7,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How the HTTP server listens and what it accepts."""

    host: str = _setting(
        "127.0.0.1",
        "-i --host HOST",
        "Address to listen on.",
        pattern=r"[0-9A-Za-z._:%-]+",
        expects="an address or a host name",
        env=("HOST",),
    )
    port: int = _setting(
        8080,
        "-p --port PORT",
        "Port to listen on; 0 takes a free one.",
        low=0,
        high=65535,
        env=("PORT",),
    )
    served_model_name: str | None = _setting(
        None, "--served-model-name ID", "Model id for clients; left out, the model's own name."
    )
    api_key: tuple[str, ...] = _setting(
        (),
        "--api-key KEY",
        "Key that requests have to bring; health checks stay open. May be given several times.",
        pattern="[!-~]+",
        expects="printable ASCII without spaces",
        many=True,
    )
    api_key_file: str | None = _setting(
        None,
        "--api-key-file FILE",
        "File with further keys, one a line; empty lines and lines that begin with # are skipped.",
        expects="a path",
    )
    cors_origin: tuple[str, ...] = _setting(
        (),
        "--cors-origin ORIGIN",
        "Origin whose web pages may use the API, such as https://chat.example; * is every one. May"
        " be given several times; left out, none but the server's own.",
        pattern=r"\*|null|[a-z][a-z0-9+.-]*://[!-~]*[^/]",
        expects="an origin such as https://chat.example:8443, without a path, or *",
        many=True,
    )
    trace: str | None = _setting(
        None,
        "--trace FILE",
        "Append a JSON line for each event of a request: times and counts, never its text.",
        expects="a path",
    )
    max_header_bytes: int = _setting(
        32_768,
        "--max-header-bytes BYTES",
        "Largest request line and headers together; larger ones are answered with 431.",
        low=1024,
        high=1 << 20,
    )
    max_request_bytes: int = _setting(
        8_388_608,
        "--max-request-bytes BYTES",
        "Largest request body; a larger one is answered with 413.",
        low=1,
    )
    max_connections: int = _setting(
        64, "--max-connections N", "Requests open at once; one more is answered with 503.", low=1
    )
    drain_timeout: float = _setting(
        30.0,
        "--drain-timeout S",
        "After SIGTERM: seconds that running replies have to end, before they are cut off.",
        low=0,
        high=86_400,
    )
    allow_image_urls: bool = _setting(
        False,
        "--allow-image-urls",
        "Fetch images that requests name by https address, from public addresses only.",
    )
    unknown_fields: str = _setting(
        "error",
        "--unknown-fields MODE",
        "What unknown request fields do: error refuses, warn names them in a reply header.",
        choices=("error", "warn"),
    )
    store: str | None = _setting(
        None,
        "--store DIR",
        "Keep responses of /v1/responses in this folder, for previous_response_id; left out, none"
        " is kept.",
        expects="a folder",
    )
    store_days: int = _setting(
        30,
        "--store-days N",
        "Days that a response is kept; 0 keeps it until it is deleted.",
        low=0,
        high=36_500,
    )

    @property
    def drop_unknown(self) -> bool:
        """Whether unknown request fields are dropped and named, instead of refused."""
        return self.unknown_fields == "warn"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """How much goes to stderr. log_level None is the command's own level."""

    log_level: str | None = _setting(
        None,
        "--log-level LEVEL",
        "Least important messages to print.",
        choices=("error", "warn", "info", "debug"),
    )
    verbose: int = _setting(0, "-v --verbose", "Debug messages and timing; -vv: tracebacks too.")
    debug: bool = _setting(False, "--debug", "The same as -vv.")

    @property
    def level(self) -> str | None:
        """What --log-level or -v asks for; None when neither was given."""
        return "debug" if self.verbose or self.debug else self.log_level


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
