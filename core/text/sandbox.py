"""Jinja for chat templates, bounded in time and memory.

A chat template comes with a model file, so it is a stranger's program. It runs in jinja2's immutable sandbox (no
private attributes, no change of values), as transformers sets it up, and each render has a `Budget`:

- Every block of statements, every call, filter and operator asks it, and it ends the render that has computed for too
  long. So loops and recursion stop. Time is the thread's own on a processor: a busy machine fails no good template.
  Generated code asks because `_Compiler` writes the question into it; no other thread or signal is needed.
- Text and lists are paid for by size, before they are made where the result can be much larger than what goes in
  (`'a' * 10**9`, widths, replace, join, formats), and after they are made where it cannot.
- No value may weigh more than `MAX_VALUE` characters and elements, counted as written out: lists that hold each other
  twice over are small in memory and endless as text. So any single operation on values is short as well.
"""
from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_VALUE = 1 << 23     # characters and elements in one value; a million tokens have about half as many characters
MAX_TOTAL = 1 << 28     # the same over one render
MAX_ITEMS = 1 << 18     # elements in one list
MAX_BITS = 1 << 12      # in an integer
MAX_INDENT = 64         # spaces per level of JSON

# Formats that pad to more than 999 characters, or to a width that an argument gives.
_WIDE = {"%": re.compile(r"%[^%a-zA-Z]*(\d{4}|\*)"), "{": re.compile(r"\{[^{}:]*:[^{}]*(\d{4}|\{)")}
_DROPPED_FILTERS = ("urlize", "wordwrap", "xmlattr", "pprint", "striptags")
_UNBOUNDED_METHODS = ("translate", "maketrans", "to_bytes", "striptags")
# Methods of strings that take time as the product of both lengths, in steps of some 64 characters.
_QUADRATIC_METHODS = ("rfind", "rindex", "rpartition", "rsplit", "strip", "lstrip", "rstrip", "trim")


class LimitError(Exception):
    """A template asks for more time or memory than a render may have."""


class Refusal(jinja2.TemplateError):
    """The template itself refuses the conversation (`raise_exception`)."""


class Budget:
    """What one render has left. seconds: of computing in the thread that makes it."""

    def __init__(self, seconds: float):
        self.seconds, self.left = seconds, MAX_TOTAL
        self._wall_end, self._end = time.monotonic() + seconds, time.thread_time() + seconds
        # Containers by identity, kept alive so that it stays their own. In the sandbox they never change.
        self._weights: dict[int, tuple[Any, int]] = {}

    def pay(self, size: int = 1) -> None:
        self.left -= size
        if size > MAX_VALUE:
            raise LimitError(f"it makes a value of more than {MAX_VALUE} characters and elements")
        if self.left < 0:
            raise LimitError(f"it makes more than {MAX_TOTAL} characters and elements")
        # The wall clock, many times cheaper to read, is never behind the thread's.
        if time.monotonic() > self._wall_end and time.thread_time() > self._end:
            raise LimitError(f"it takes more than {self.seconds:g} seconds")

    def weigh(self, value: Any) -> int:
        """Characters and elements in the value as it would be written out."""
        if isinstance(value, str | bytes):
            return 1 + len(value)
        if not (members := _members(value)):
            return 1
        if (seen := self._weights.get(id(value))) is not None:
            return seen[1]
        # Children first, without recursion: a nested value may be deeper than Python's stack.
        pending = [value]
        while pending:
            parent = pending[-1]
            members = _members(parent)
            if len(members) > MAX_ITEMS:
                raise LimitError(f"it makes a list of more than {MAX_ITEMS} elements")
            missing = [m for m in members if id(m) not in self._weights and _members(m)]
            if missing:
                self.pay(len(missing))
                pending.extend(missing)
                continue
            weight = 1 + sum(self._weights[id(m)][1] if id(m) in self._weights else _size(m) for m in members)
            if weight > MAX_VALUE:
                raise LimitError(f"it makes a value of more than {MAX_VALUE} characters and elements")
            self._weights[id(parent)] = (parent, weight)
            pending.pop()
        return self._weights[id(value)][1]

    def made(self, value: Any) -> Any:
        """Pay for a value that the template has just made."""
        if isinstance(value, str | bytes):
            self.pay(len(value))
        elif isinstance(value, list | tuple | dict):
            self.pay(len(value))
            self.weigh(value)
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise LimitError(f"it makes an integer of more than {MAX_BITS} bits")
        return value


def _members(value: Any) -> list | tuple:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, KeysView | ValuesView | set | frozenset):
        return list(value)
    return ()


def _size(value: Any) -> int:
    return 1 + len(value) if isinstance(value, str | bytes) else 1


class _Compiler(CodeGenerator):
    """Writes questions to the budget into the generated code."""

    def blockvisit(self, nodes_: Iterable[nodes.Node], frame: Frame) -> None:
        body = list(nodes_)
        text = sum(len(part.data) for node in body if isinstance(node, nodes.Output)
                   for part in node.nodes if isinstance(part, nodes.TemplateData))
        self.writeline(f"environment.budget.pay({1 + text})")
        super().blockvisit(body, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _made(self, visit: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.budget.made(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._made(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._made(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._made(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it only shows its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """Shows nothing of its contents: they may change, so they have no weight."""

    def __repr__(self) -> str:
        return "<namespace>"


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are compiled and rendered in; thread-safe. Use inside `limit`."""

    code_generator_class = _Compiler
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=self._shown,
                         extensions=[_Generation, jinja2.ext.loopcontrols])
        self._budget: ContextVar[Budget] = ContextVar("budget")
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "namespace": _Namespace}
        kept = {name: function for name, function in self.filters.items() if name not in _DROPPED_FILTERS}
        self.filters = {name: self._bounded(name, function) for name, function in kept.items()}
        self.filters["tojson"] = self._tojson

    @property
    def budget(self) -> Budget:
        return self._budget.get()

    @contextmanager
    def limit(self, seconds: float) -> Iterator[Budget]:
        """Everything inside, in this thread or task, shares one budget."""
        token = self._budget.set(budget := Budget(seconds))
        try:
            yield budget
        finally:
            self._budget.reset(token)

    def concat(self, parts: tuple) -> str:
        self.budget.pay(sum(map(self.budget.weigh, parts)))
        return "".join(map(str, parts))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNBOUNDED_METHODS and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for a, b in ((left, right), (right, left)):
                if isinstance(a, str | bytes | list | tuple) and isinstance(b, int):
                    self.budget.pay(len(a) * max(b, 0))
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_BITS:
                raise LimitError(f"it makes an integer of more than {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str | bytes):
            self._pay_format(left, right, "%")
        return self.budget.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        budget, owner = __self.budget, getattr(__obj, "__self__", None)
        budget.pay()
        if isinstance(owner, str | bytes):
            args = __self._pay_method(owner, __obj.__name__, args)
        return budget.made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def bounded(*args: Any, **kwargs: Any) -> str:
            self._pay_format(value.__self__, (args, kwargs), "{")
            return wrapped(*args, **kwargs)

        return bounded

    def _shown(self, value: Any) -> Any:
        self.budget.pay(self.budget.weigh(value))
        return value

    def _pay_format(self, template: str | bytes, values: Any, sign: str) -> None:
        template = template.decode("latin-1") if isinstance(template, bytes) else template
        plain = template.replace(sign * 2, "")
        if _WIDE[sign].search(plain):
            raise LimitError("it formats with a width of more than three digits or from an argument")
        values = list(values) if isinstance(values, tuple) else values
        self.budget.pay(len(template) + template.count(sign) * (self.budget.weigh(values) + 1000))

    def _pay_method(self, text: Any, name: str, args: tuple) -> tuple:
        """Pay for methods of strings that make or take much more than the string is long."""
        if name in ("center", "ljust", "rjust", "zfill", "expandtabs") and args and isinstance(args[0], int):
            self.budget.pay(abs(args[0]) * (1 + text.count("\t") if name == "expandtabs" else 1))
        elif name == "replace" and len(args) > 1:
            self._pay_replace(text, args[0], args[1])
        elif name in _QUADRATIC_METHODS and args:
            self.budget.pay(len(text) * _size(args[0]) // 64)
        elif name == "join" and len(args) == 1:
            items = self._listed(args[0])
            self.budget.pay(sum(map(_size, items)) + len(items) * len(text))
            args = (items,)
        return args

    def _pay_replace(self, text: Any, old: Any, new: Any) -> None:
        if type(text) is type(old) is type(new) or isinstance(text, str) and isinstance(old, str):
            self.budget.pay(len(text) + text.count(old) * _size(new))

    def _listed(self, values: Iterable) -> list:
        """A list of what may be a generator, which pays for each of its elements."""
        out = []
        for value in values:
            self.budget.pay()
            out.append(value)
        return out

    def _bounded(self, name: str, function: Callable) -> Callable:
        """A filter that pays: for what it is about to make where that can be much, and for what it has made."""
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.budget.pay()
            value = args[skip] if len(args) > skip else None
            if name in ("center", "indent", "batch", "slice"):
                self._pay_layout(name, value, [*args[skip + 1:], *kwargs.values()])
            elif name == "trim":
                self._pay_method(str(value), name, (*args[skip + 1:], *kwargs.values()))
            elif name == "replace":
                old, new = [*args[skip + 1:], *kwargs.values(), "", ""][:2]
                self._pay_replace(str(value), str(old), str(new))
            elif name == "join":
                items = self._listed(value)
                glue = [*args[skip + 1:], *kwargs.values(), ""][0]
                self.budget.pay(sum(map(self.budget.weigh, items)) + len(items) * _size(glue))
                args = (*args[:skip], items, *args[skip + 1:])
            elif name == "format":
                self._pay_format(str(value), [*args[skip + 1:], *kwargs.values()], "%")
            elif name == "sum" and any(isinstance(a, list | tuple) for a in [*args[skip + 1:], *kwargs.values()]):
                raise LimitError("it adds up lists, which takes quadratic time")
            return self.budget.made(function(*args, **kwargs))

        return bounded

    def _pay_layout(self, name: str, value: Any, options: list) -> None:
        width = max([len(o) if isinstance(o, str) else abs(o) for o in options if isinstance(o, int | str)], default=4)
        self.budget.pay(width * (1 + str(value).count("\n") if name == "indent" else 1))

    def _tojson(self, value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
                separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
        """JSON as transformers writes it: characters as they are, nothing escaped for HTML."""
        if indent is not None and (len(indent) if isinstance(indent, str) else indent) > MAX_INDENT:
            raise LimitError(f"it indents JSON by more than {MAX_INDENT}")
        self.budget.pay(self.budget.weigh(value))
        return self.budget.made(json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                                           sort_keys=sort_keys))


def _raise_exception(message: Any) -> None:
    raise Refusal(str(message)[:2000])


def _strftime_now(format: str) -> str:
    if len(format) > 1000:
        raise LimitError("it formats the date with more than 1000 characters")
    return datetime.now().strftime(format)


