"""Settings of the HTTP server and of the log; the others are in `options.py`."""

from __future__ import annotations

from dataclasses import dataclass

from civetta.setting import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How the HTTP server listens and what it accepts."""

    host: str = setting(
        "127.0.0.1",
        "-i --host HOST",
        "Address to listen on.",
        pattern=r"[0-9A-Za-z._:%-]+",
        expects="an address or a host name",
        env=("HOST",),
    )
    port: int = setting(
        8080,
        "-p --port PORT",
        "Port to listen on; 0 takes a free one.",
        low=0,
        high=65535,
        env=("PORT",),
    )
    served_model_name: str | None = setting(
        None, "--served-model-name ID", "Model id for clients; left out, the model's own name."
    )
    api_key: tuple[str, ...] = setting(
        (),
        "--api-key KEY",
        "Key that requests have to bring; health checks stay open. May be given several times.",
        pattern="[!-~]+",
        expects="printable ASCII without spaces",
        many=True,
    )
    api_key_file: str | None = setting(
        None,
        "--api-key-file FILE",
        "File with further keys, one a line; empty lines and lines that begin with # are skipped.",
        expects="a path",
    )
    cors_origin: tuple[str, ...] = setting(
        (),
        "--cors-origin ORIGIN",
        "Origin whose web pages may use the API, such as https://chat.example; * is every one. May"
        " be given several times; left out, none but the server's own.",
        pattern=r"\*|null|[a-z][a-z0-9+.-]*://[!-~]*[^/]",
        expects="an origin such as https://chat.example:8443, without a path, or *",
        many=True,
    )
    trace: str | None = setting(
        None,
        "--trace FILE",
        "Append a JSON line for each event of a request: times and counts, never its text.",
        expects="a path",
    )
    max_header_bytes: int = setting(
        32_768,
        "--max-header-bytes BYTES",
        "Largest request line and headers together; larger ones are answered with 431.",
        low=1024,
        high=1 << 20,
    )
    max_request_bytes: int = setting(
        8_388_608,
        "--max-request-bytes BYTES",
        "Largest request body; a larger one is answered with 413.",
        low=1,
    )
    max_connections: int = setting(
        64, "--max-connections N", "Requests open at once; one more is answered with 503.", low=1
    )
    drain_timeout: float = setting(
        30.0,
        "--drain-timeout S",
        "After SIGTERM: seconds that running replies have to end, before they are cut off.",
        low=0,
        high=86_400,
    )
    allow_image_urls: bool = setting(
        False,
        "--allow-image-urls",
        "Fetch images that requests name by https address, from public addresses only.",
    )
    unknown_fields: str = setting(
        "error",
        "--unknown-fields MODE",
        "What unknown request fields do: error refuses, warn names them in a reply header.",
        choices=("error", "warn"),
    )
    store: str | None = setting(
        None,
        "--store DIR",
        "Keep responses of /v1/responses in this folder, for previous_response_id; left out, none"
        " is kept.",
        expects="a folder",
    )
    store_days: int = setting(
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

    log_level: str | None = setting(
        None,
        "--log-level LEVEL",
        "Least important messages to print.",
        choices=("error", "warn", "info", "debug"),
    )
    verbose: int = setting(0, "-v --verbose", "Debug messages and timing; -vv: tracebacks too.")
    debug: bool = setting(False, "--debug", "The same as -vv.")

    @property
    def level(self) -> str | None:
        """What --log-level or -v asks for; None when neither was given."""
        return "debug" if self.verbose or self.debug else self.log_level
