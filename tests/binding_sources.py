"""What the bindings require, read from their sources: the messages that each op can raise.

    python tests/binding_sources.py --write     # stores them, when a check has come or gone

What the code puts into a message at run time is ``{}`` here. Names that a helper gets from its
caller are followed, so each call of ``require_matrix(x, "x")`` is a message of its own.

They are stored in binding_messages.json, so that a check that is taken out is missed: there the ops
of a family, such as ``gemm_configs`` beside ``gemm``, are one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from project import ROOT

ANYTHING = "{}"
STORED = ROOT / "tests" / "binding_messages.json"
FORMS = re.compile("_configs$")  # of an op
LITERALS = re.compile(r'\s*("(?:[^"\\]|\\.)*"\s*)+')


@dataclass(frozen=True)
class Function:
    name: str
    parameters: tuple[str, ...]
    body: str


def sources() -> str:
    paths = sorted((ROOT / "torch-ext" / "bindings").iterdir())
    text = "\n".join(path.read_text() for path in paths if path.suffix in (".cpp", ".h"))
    return re.sub(r"//[^\n]*|#[^\n]*", "", text)


def closing(text: str, begin: int) -> int:
    """Behind the bracket that closes the one at `begin`."""
    depth, i = 0, begin
    while True:
        if text[i] == '"':
            i = re.compile(r'"(?:[^"\\]|\\.)*"').match(text, i).end()
            continue
        depth += (text[i] in "([{") - (text[i] in ")]}")
        i += 1
        if depth == 0:
            return i


def split(arguments: str) -> list[str]:
    """At the commas that are in no brackets."""
    parts, begin, i = [], 0, 0
    while i < len(arguments):
        if arguments[i] in '"([{':
            quote = arguments[i] == '"'
            text = re.compile(r'"(?:[^"\\]|\\.)*"')
            i = text.match(arguments, i).end() if quote else closing(arguments, i)
            continue
        if arguments[i] == ",":
            parts.append(arguments[begin:i].strip())
            begin = i + 1
        i += 1
    return [*parts, arguments[begin:].strip()] if arguments.strip() else []


@cache
def functions() -> dict[str, list[Function]]:
    """By name. Ops of one binding file may have helpers of the same name as another's."""
    text, found = sources(), {}
    for match in re.finditer(r"\b(\w+)\(", text):
        end = closing(text, match.end() - 1)
        follows = re.match(r"\s*(?:const\s*)?\{", text[end:])
        if follows is None or match[1] in ("if", "for", "while", "switch"):
            continue
        if not re.search(r"[\w>&*]\s+$|[&*>]$", text[: match.start()][-40:]):
            continue  # a constructor's call, a lambda
        parameters = split(text[match.end() : end - 1])
        names = tuple(part.partition("=")[0].split()[-1].strip("&*") for part in parameters)
        body = text[end + follows.end() - 1 : closing(text, end + follows.end() - 1)]
        found.setdefault(match[1], []).append(Function(match[1], names, body))
    return found


def value_of(argument: str, known: dict[str, str]) -> str:
    """What an argument is in a message; itself, if it is more than that."""
    if argument == NOTHING or argument.startswith('{"'):
        return argument
    if LITERALS.fullmatch(argument):
        return "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', argument))
    return known.get(argument, ANYTHING)


def calls_in(body: str, known: set[str]) -> Iterator[tuple[str, list[str]]]:
    """Calls of `known` functions in their order, those by a choice of two as well."""
    either = re.compile(r"\([^()?]*\? (\w+) : (\w+)\)\(")
    for match in either.finditer(body):
        arguments = split(body[match.end() : closing(body, match.end() - 1) - 1])
        yield from ((name, arguments) for name in match.groups() if name in known)
    for match in re.finditer(r"\b(\w+)\(", body):
        if match[1] in known:
            yield match[1], split(body[match.end() : closing(body, match.end() - 1) - 1])


EXPERT_NAMES = ("w", "scale", "bias")  # the fields of ExpertNames
NOTHING = "std::nullopt"
CHECKS = re.compile("(require|describe|parse)_|check_quantization")  # what checks is called so


def without_branch(body: str, optional: str) -> str:
    """Less what happens where an optional argument is there."""
    found = re.search(rf"if \({optional}\) {{", body)
    return body if found is None else body[: found.start()] + body[closing(body, found.end() - 1) :]


def messages_of(name: str, arguments: tuple[str, ...] = ()) -> set[str]:
    """All that a function can raise because of its arguments.

    Args:
        arguments: what its caller gives it, as far as known.
    """
    (function,) = functions()[name]
    known: dict[str, str] = {}
    body = function.body
    for parameter, value in zip(function.parameters, arguments, strict=False):
        known[parameter] = value
        if value == NOTHING:
            body = without_branch(body, parameter)
        if value.startswith('{"'):
            fields = zip(EXPERT_NAMES, split(value[1:-1]), strict=True)
            known |= {f"{parameter}.{field}": value_of(text, {}) for field, text in fields}
    followed = {"require", "fail", *(name for name in functions() if CHECKS.match(name))}
    found: set[str] = set()
    for called, given in calls_in(body, followed):
        if called in ("require", "fail"):
            parts = given[1:] if called == "require" else given
            found.add("".join(value_of(part, known) for part in parts))
        else:
            found |= messages_of(called, tuple(value_of(part, known) for part in given))
    return found


def matches(message: str, raised: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in message.split(ANYTHING))
    return re.fullmatch(pattern, raised) is not None


def ops() -> set[str]:
    """As torch_binding.cpp defines them."""
    text = (ROOT / "torch-ext" / "torch_binding.cpp").read_text()
    return set(re.findall(r'ops\.def\(\s*"(\w+)\(', text))


def current() -> dict[str, list[str]]:
    """What is to be stored: by family."""
    found: dict[str, set[str]] = {}
    for op in ops():
        found.setdefault(FORMS.sub("", op), set()).update(messages_of(op))
    return {family: sorted(messages) for family, messages in sorted(found.items())}


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    STORED.write_text(json.dumps(current(), indent=1) + "\n")
