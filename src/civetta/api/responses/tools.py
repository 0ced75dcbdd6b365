"""The tools of a request: functions, also those in namespaces; hosted tools are passed over.

Clients such as Codex list tools that OpenAI's servers run (web_search, image_generation, ...) or
that have a grammar of their own (custom) beside their functions. Nothing here can run them, so the
model is not told of them; which ones those are is reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from civetta.api.wire import decode
from civetta.chat.message import ToolSpec
from civetta.errors import RequestInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function, flat as the Responses API has it."""

    name: str
    type: str = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    # Hints to a hosted service: when to load a tool, who may call it, what it returns.
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    output_schema: dict[str, Any] | None = None


class NamespaceTool(msgspec.Struct, kw_only=True):
    """A group of tools; the model sees its functions under their own names."""

    name: str
    tools: list[dict[str, Any]]
    type: str = "namespace"
    description: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What the model is offered. `namespaces` has the namespace of each function inside one."""

    specs: tuple[ToolSpec, ...] = ()
    namespaces: Mapping[str, str] = field(default_factory=dict)


def read_tools(
    tools: list[dict[str, Any]] | None, *, drop_unknown: bool
) -> tuple[Tools, list[str]]:
    """The functions among `tools`, and the paths of all that has no effect.

    Raises RequestInvalid for a malformed one, and with code `invalid_tools` for a name used twice.
    """
    reader = _Reader(drop_unknown)
    for index, tool in enumerate(tools or ()):
        reader.read(tool, f"tools[{index}]")
    return Tools(specs=tuple(reader.specs), namespaces=reader.namespaces), reader.unused


class _Reader:
    def __init__(self, drop_unknown: bool) -> None:
        self._drop_unknown = drop_unknown
        self._paths: dict[str, str] = {}
        self.specs: list[ToolSpec] = []
        self.namespaces: dict[str, str] = {}
        self.unused: list[str] = []

    def read(self, tool: dict[str, Any], path: str, namespace: str | None = None) -> None:
        kind = tool.get("type", "function")
        if kind == "function":
            self._add(tool, path, namespace)
        elif kind == "namespace" and namespace is None:
            group, dropped = decode(tool, NamespaceTool, drop_unknown=self._drop_unknown, path=path)
            self.unused += dropped
            for index, inner in enumerate(group.tools):
                self.read(inner, f"{path}.tools[{index}]", group.name)
        elif isinstance(kind, str):
            self.unused.append(f"{path} ({kind[:40]})")
        else:
            raise RequestInvalid(
                f"The field {path}.type is wrong: give a text.", param=f"{path}.type"
            )

    def _add(self, document: dict[str, Any], path: str, namespace: str | None) -> None:
        tool, dropped = decode(document, FunctionTool, drop_unknown=self._drop_unknown, path=path)
        self.unused += dropped
        if tool.name in self._paths:
            _refuse_twice(tool.name, self._paths[tool.name], path)
        self._paths[tool.name] = path
        if namespace is not None:
            self.namespaces[tool.name] = namespace
        self.specs.append(
            ToolSpec(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters or {},
                strict=tool.strict,
                param=path,
            )
        )


def _refuse_twice(name: str, first: str, second: str) -> NoReturn:
    raise RequestInvalid(
        f"{first} and {second} are both named {name[:64]!r}: functions need different names, also"
        " across namespaces.",
        param=f"{second}.name",
        code="invalid_tools",
    )
