"""The jinja2 environment that chat templates run in.

The rule this file keeps: what is not on a list here, a template cannot do. jinja2's immutable sandbox keeps it from
Python's internals; the lists of filters and methods, and the meter that every operation passes, keep it from taking
the machine; and the template's own text is marked as it enters, so that it can be told from a user's at the end.

The template is parsed, its syntax tree rewritten with jinja2's public node classes (texts become marked ones, loops
and comparisons pay the meter), and the result compiled: no generated code of jinja2's is patched.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, MappingProxyType, MethodType
from typing import Any

from jinja2 import TemplateError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, safe_range
from jinja2.utils import Namespace, pass_environment
from jinja2.visitor import NodeTransformer

from meshswarm.head.marked_text import MarkedText, joined, own, own_text
from meshswarm.head.template_meter import STEP, TemplateLimitError, meter

_MAX_INTEGER_BITS = 4096
_MAX_INDENT = 16
_TOO_WIDE = "the model's chat template pads a text to a great width"
_KEPT_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items", "last", "length"),
    *("list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr"),
    *("sort", "title", "trim", "unique", "upper"),
)
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        {
            *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdecimal"),
            *("isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip"),
            *("partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit"),
            *("rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"),
        }
    ),
    dict: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"count", "index"}),
    tuple: frozenset({"count", "index"}),
    LoopContext: frozenset({"changed", "cycle"}),
}
_ITERATING_FILTERS = frozenset(
    {
        *("dictsort", "items", "join", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "select"),
        *("selectattr", "sort", "unique"),
    }
)
_WIDE_FIELD = re.compile(r"\d{3}")
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(?:\*|\d{3}|\d*\.(?:\*|\d{3}))")
_WHITE_SPACE = tuple(character for character in map(chr, range(0x3001)) if character.isspace())


def shown(value: Any) -> str:
    """What `value` looks like in the output. Raises TemplateLimitError for what has no plain look."""
    if isinstance(value, str):
        return value
    # repr writes at most ten characters for one.
    meter().charge_value(value, per_character=10, only_plain=True)
    return str(value)


class _Format:
    """A text's `format` method: fields without attributes or wide padding, the text's own marks kept."""

    def __init__(self, environment: TemplateEnvironment, text: str) -> None:
        self._formatter = SandboxedFormatter(environment)
        self._text = text

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        as_own = own(self._text) == ((0, len(self._text)),)
        pieces: list[str] = []
        next_index = 0
        for literal, field, spec, conversion in string.Formatter().parse(self._text):
            pieces.append(own_text(literal) if as_own else literal)
            if field is None:
                continue
            if field == "":
                field, next_index = str(next_index), next_index + 1
            value, _ = self._formatter.get_field(field, args, kwargs)
            if not spec and not conversion:
                pieces.append(shown(value))
                continue
            if "{" in (spec or "") or _WIDE_FIELD.search(spec or ""):
                raise TemplateLimitError(_TOO_WIDE)
            meter().charge_value(value, per_character=10, only_plain=True)
            pieces.append(format(self._formatter.convert_field(value, conversion), spec or ""))
        return _join(pieces, "")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """One template's environment: it also holds the texts of that template.

    `now` tells the time to templates that ask for it.
    """

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationBlock],
            optimized=False,
            cache_size=0,
            finalize=shown,
        )

        def strftime_now(pattern: str) -> str:
            if len(pattern) > 256:
                raise TemplateLimitError("the model's chat template asks for a date in a very long format")
            return now().strftime(pattern)

        self.concat = _concat  # type: ignore[method-assign]
        self._functions = (safe_range, Namespace, dict, _raise_exception, strftime_now)
        self.globals = {
            "range": safe_range,
            "namespace": Namespace,
            "dict": dict,
            "raise_exception": _raise_exception,
            "strftime_now": strftime_now,
        }
        filters: dict[str, Callable[..., Any]] = {name: self.filters[name] for name in _KEPT_FILTERS}
        filters |= {"indent": _indent, "join": _join_filter, "replace": _replace, "tojson": _tojson}
        filters |= {"safe": shown, "string": shown, " step": _as_it_is, " made": _as_it_is, " concatenated": _concat}
        self.filters = {name: _paid(do, name) for name, do in filters.items()}
        tests: dict[str, Any] = dict(self.tests)
        self.tests = {name: _paid(do, name) for name, do in tests.items()}

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def own_text_name(self, text: str) -> str:
        """The attribute of this environment that holds `text` as the template's own."""
        name = f"text_{len(self.__dict__)}"
        setattr(self, name, own_text(text))
        return name

    def compile_template(self, source: str) -> Any:
        """The template of `source`. Raises TemplateError and whatever a source too strange makes a compiler raise."""
        tree = self.parse(source)
        tree = _Rewriter(self).visit(tree)
        tree.set_lineno(1)
        tree.set_environment(self)
        return self.template_class.from_code(self, self.compile(tree), self.globals)

    # -- what jinja2 asks the environment

    def is_safe_callable(self, obj: Any) -> bool:
        if isinstance(obj, Macro | LoopContext | _Format) or any(obj is function for function in self._functions):
            return True
        if not isinstance(obj, MethodType | BuiltinMethodType):
            return False
        return any(isinstance(obj.__self__, owner) and obj.__name__ in names for owner, names in _METHODS.items())

    def wrap_str_format(self, value: Any) -> Any:
        if isinstance(value, MethodType | BuiltinMethodType) and isinstance(value.__self__, str):
            return _Format(self, value.__self__) if value.__name__ == "format" else None
        return None

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter().charge()
        if not isinstance(__obj, Undefined) and not __self.is_safe_callable(__obj):
            raise SecurityError(f"it calls {getattr(__obj, '__name__', type(__obj).__name__)!r}, which is not allowed")
        if isinstance(owner := getattr(__obj, "__self__", None), str):
            args = _charge_method(owner, __obj.__name__, args, kwargs)
        return _accounted(__context.call(__obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter().charge()
        match operator:
            case "+" if isinstance(left, str) and isinstance(right, str):
                return _join((left, right), "")
            case "*":
                for some, times in ((left, right), (right, left)):
                    if isinstance(some, str | list | tuple) and isinstance(times, int):
                        meter().charge_text(len(some) * max(times, 0))
                    if isinstance(some, str) and isinstance(times, int):
                        meter().charge(STEP * len(own(some)) * max(times, 0))
            case "%" if isinstance(left, str):
                if _WIDE_PERCENT.search(left) or isinstance(right, dict):
                    raise TemplateLimitError(_TOO_WIDE)
                meter().charge_value(right, per_character=10, only_plain=True)
            case "**" if isinstance(left, int) and isinstance(right, int):
                if left.bit_length() * abs(right) > _MAX_INTEGER_BITS:
                    raise TemplateLimitError("the model's chat template computes a huge number")
        return _accounted(super().call_binop(context, operator, left, right))


class _GenerationBlock(Extension):
    """`{% generation %}` marks, for training, what an assistant said; here its body is all there is to it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Rewriter(NodeTransformer):
    """Marks the template's texts and puts the meter into what would not pass it otherwise."""

    def __init__(self, environment: TemplateEnvironment) -> None:
        self._environment = environment

    def _filtered(self, node: nodes.Expr, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def _text(self, text: str) -> nodes.Expr:
        return nodes.EnvironmentAttribute(self._environment.own_text_name(text))

    def _paying(self, body: list[nodes.Node]) -> list[nodes.Node]:
        return [nodes.ExprStmt(self._filtered(nodes.Const(None), " step")), *body]

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return self._text(node.data)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        return self._text(node.value) if isinstance(node.value, str) else node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body = self._paying(node.body)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body = self._paying(node.body)
        return node

    visit_CallBlock = visit_Macro

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node.node = self.visit(node.node)
        if isinstance(node.arg, nodes.Const):
            return node
        node.arg = self.visit(node.arg)
        return self._filtered(node, " step") if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        return self._filtered(node, " step")

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filtered(nodes.List(node.nodes), " concatenated")

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._filtered(node, " made")

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        if node.ctx != "load":
            return node
        self.generic_visit(node)
        return self._filtered(node, " made")


# -- paying


def _accounted(result: Any) -> Any:
    """`result` of an operation, paid for: iterators read out, texts and collections counted, numbers kept in size."""
    if isinstance(result, Iterator) and not isinstance(result, LoopContext):
        result = list(_paid_items(result))
    if isinstance(result, str):
        meter().charge_text(len(result))
    elif isinstance(result, list | tuple | dict):
        meter().charge_value(result)
    elif isinstance(result, int) and result.bit_length() > _MAX_INTEGER_BITS:
        raise TemplateLimitError("the model's chat template computes a huge number")
    return result


def _paid_items(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        meter().charge()
        yield item


def _paid(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The filter or test `name`, which pays."""
    takes_environment = hasattr(function, "jinja_pass_arg")

    @wraps(function)
    def paid(*args: Any, **kwargs: Any) -> Any:
        value = args[1 if takes_environment else 0]
        meter().charge(STEP * len(value) if name in _ITERATING_FILTERS and isinstance(value, str) else STEP)
        return _accounted(function(*args, **kwargs))

    return paid


def _charge_method(
    text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Any, ...]:
    """Pay for what a text's method is about to make. Returns the arguments to call it with."""
    meter().charge_text(len(text))
    texts = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, str)]
    match name:
        case "join" if args:
            args = (list(_paid_items(args[0])),)
            meter().charge_text(sum(len(text) + len(piece) for piece in args[0] if isinstance(piece, str)))
        case "replace" if len(texts) == 2:
            old, new = texts
            count = text.count(old)
            meter().charge_text(len(text) + count * max(0, len(new) - len(old)))
            meter().charge(STEP * count)
        case "split" | "rsplit" if texts and texts[0]:
            meter().charge(STEP * text.count(texts[0]))
        case "split" | "rsplit" | "splitlines":
            meter().charge(STEP * sum(map(text.count, _WHITE_SPACE)))
    return args


# -- functions and filters


def _as_it_is(value: Any) -> Any:
    return value


def _join(pieces: Iterable[str], separator: str) -> MarkedText:
    parts = list(pieces)
    meter().charge_text(sum(map(len, parts)) + len(separator) * max(0, len(parts) - 1))
    meter().charge(STEP * (sum(len(own(part)) for part in parts) + len(own(separator)) * len(parts)))
    return joined(parts, separator)


def _concat(pieces: Iterable[Any]) -> MarkedText:
    return _join([shown(piece) for piece in pieces], "")


@pass_environment
def _join_filter(
    environment: TemplateEnvironment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return _join([shown(item) for item in _paid_items(value)], shown(d))


def _replace(value: Any, old: str, new: str, count: int = -1) -> str:
    """As jinja2's, with marks."""
    text, old, new = shown(value), shown(old), shown(new)
    _charge_method(text, "replace", (old, new))
    return text.replace(old, new, count)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """As jinja2's, with marks."""
    margin = width if isinstance(width, str) else " " * min(width, _MAX_INDENT + 1)
    if len(margin) > _MAX_INDENT:
        raise TemplateLimitError("the model's chat template indents a text very far")
    text = _concat((value, "\n"))
    _charge_method(text, "splitlines", ())
    lines = text.splitlines()
    indented = [
        line if (not first if index == 0 else not (line or blank)) else _join((margin, line), "")
        for index, line in enumerate(lines)
    ]
    return _join(indented, "\n")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face's: plain JSON, without HTML's escapes."""
    if (indent or 0) > _MAX_INDENT or any(len(separator) > _MAX_INDENT for separator in separators or ()):
        raise TemplateLimitError("the model's chat template indents a text very far")
    n_values, depth = meter().charge_value(value, per_character=6)
    meter().charge(n_values * (depth + 1) * _MAX_INDENT)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
