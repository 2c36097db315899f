"""A model's chat template: a program in Jinja that came with the model, so it runs in a sandbox.

It gives what transformers' ``apply_chat_template`` gives, which the tests compare. transformers itself takes seconds to
import, and a gateway needs nothing else of it.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NoReturn

from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2 import Template
    from jinja2.parser import Parser
    from jinja2.runtime import Macro

DEFAULT: Final = "default"
"""Of several named templates the one for chats without tools or documents."""
WITH_TOOLS: Final = "tool_use"
"""The one for chats with tools; where there is none, the default one."""


class ChatTemplate:
    """One model's template. Safe to use from several threads."""

    def __init__(self, source: str | Mapping[str, str], specials: Mapping[str, str]) -> None:
        """``source``: the template, or several by name. ``specials``: what it may name besides, such as
        ``bos_token``."""
        self._source = source
        self._specials = dict(specials)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> str:
        """The prompt of these messages, with the opening of the answer. ``tools``: what the model may call. Raises
        whatever the template does, the first time what is wrong with its text, and ValueError without messages or where
        none of several is the default."""
        if not messages:
            raise ValueError("a chat has at least one message")
        given = [dict(message) for message in messages]
        template = self._with_tools if tools else self._plain
        return template.render(
            **self._specials, messages=given, tools=list(tools) or None, documents=None, add_generation_prompt=True
        )

    @cached_property
    def takes_tools(self) -> bool:
        """Whether it does anything with tools. Raises what is wrong with its text."""
        tree = self._environment.parse(self._text(WITH_TOOLS))
        return "tools" in meta.find_undeclared_variables(tree)

    def says(self, text: str) -> bool:
        """Whether the template for chats with tools has this text."""
        return text in self._text(WITH_TOOLS)

    @cached_property
    def _environment(self) -> ImmutableSandboxedEnvironment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": _now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        return environment

    @cached_property
    def _plain(self) -> Template:
        return self._environment.from_string(self._text(DEFAULT))

    @cached_property
    def _with_tools(self) -> Template:
        return self._environment.from_string(self._text(WITH_TOOLS))

    def _text(self, name: str) -> str:
        if isinstance(self._source, str):
            return self._source
        text = self._source.get(name, self._source.get(DEFAULT))
        if text is None:
            raise ValueError(f"of the model's templates none is called {DEFAULT!r}: {sorted(self._source)}")
        return text


class _Generation(Extension):
    """``{% generation %}`` marks what a model has said, for those who train it; here it stands for what is inside."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # As a block that is called: what is set inside is not seen behind it.
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """``dict`` with what templates need of it, and no way to the type itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace that takes no names which could be Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that a template may have an attribute `self`
        given = dict(*rest, **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template can't set {name!r}: names must not begin with an underscore")


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without HTML's escapes, which Jinja's own has."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
