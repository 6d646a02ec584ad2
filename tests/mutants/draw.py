"""Draws mutants of Python files with a seed. cosmic-ray supplies the mutations.

Only cosmic-ray's operators are used, on a source string. Its session database would apply each
mutation in the checkout itself, and would run one test command for all files.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator

# Operators by name. The others fail at once on any type, or change nothing.
OPERATORS = (
    "AddNot",
    "ExceptionReplacer",
    "NumberReplacer",
    "ReplaceAndWithOr",
    "ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_FloorDiv|FloorDiv_Mul|Mul_Add|Div_Mul|Mod_Sub|LShift_RShift|RShift_LShift|BitAnd_BitOr|BitOr_BitAnd)",
    "ReplaceBreakWithContinue",
    "ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is)",
    "ReplaceComparisonOperator_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Lt_GtE|GtE_Lt|Gt_LtE|LtE_Gt)",
    "ReplaceContinueWithBreak",
    "ReplaceFalseWithTrue",
    "ReplaceOrWithAnd",
    "ReplaceTrueWithFalse",
    "ReplaceUnaryOperator_Delete_(Invert|Not|USub)",
    "ZeroIterationForLoop",
)
LOGS = {"log", "logger", "logging", "warnings"}
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")

Position = tuple[int, int]  # line from 1, column from 0
Span = tuple[Position, Position]
Change = tuple[str, int]  # operator, and number of its occurrence in the file


@dataclass(frozen=True)
class Mutant:
    """One changed file.

    Attributes:
        file: Path of the file in the repository.
        line: First changed line, from 1.
        place: Function or class of the change.
        old: The changed lines before.
        new: The changed lines after.
        text: The whole file after the change.
    """

    file: str
    line: int
    place: str
    old: str
    new: str
    text: str


def operators() -> dict[str, Operator]:
    """Returns cosmic-ray's operators whose whole name matches one of `OPERATORS`."""
    names = [name.removeprefix("core/") for name in cosmic_ray.plugins.operator_names()]
    chosen = [name for name in names if any(re.fullmatch(p, name) for p in OPERATORS)]
    return {name: cosmic_ray.plugins.get_operator(f"core/{name}")() for name in sorted(chosen)}


def draw(root: Path, files: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Draws mutants of files: places without repeats, then one change of each place.

    Places are ordered by a hash of the seed and of their own line. So a file that moves, or a
    change elsewhere, leaves the other mutants of a seed as they were.

    Args:
        root: The repository.
        files: Paths of its files.
        count: Number of mutants.
        seed: Seed of the draw.
    """
    places: dict[str, tuple[str, list[Change]]] = {}
    chosen = operators()
    texts = {file: (root / file).read_text(encoding="utf-8") for file in files}
    for file, text in texts.items():
        lines = text.splitlines()
        for (line, column), changes in _places(text, chosen):
            code = lines[line - 1]
            about = f"{seed} {code.strip()} {column - len(code) + len(code.lstrip())}"
            key = hashlib.sha256(about.encode()).hexdigest()
            while key in places:  # an equal line
                key = hashlib.sha256(key.encode()).hexdigest()
            places[key] = file, changes
    mutants: list[Mutant] = []
    for key in sorted(places):
        file, changes = places[key]
        operator, occurrence = random.Random(key).choice(changes)
        try:
            text = mutate_code(texts[file], chosen[operator], occurrence)
        except AttributeError:  # cosmic-ray replaces no exception with a dot, as `json.X`
            continue
        if text is None or not _differs(texts[file], text):
            continue
        mutants.append(_mutant(file, texts[file], text))
        if len(mutants) == count:
            break
    return mutants


def _mutant(file: str, before: str, after: str) -> Mutant:
    """Returns a mutant with the lines that differ between two texts of a file."""
    lines = before.splitlines(), after.splitlines()
    codes = difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes()
    changed = [code for code in codes if code[0] != "equal"]
    first, last = changed[0], changed[-1]
    old = " ".join(line.strip() for line in lines[0][first[1] : last[2]])
    new = " ".join(line.strip() for line in lines[1][first[3] : last[4]])
    line = first[1] + 1
    return Mutant(file, line, _place(before, line), old, new, after)


def _places(
    text: str, chosen: dict[str, Operator]
) -> Iterator[tuple[Position, list[tuple[str, int]]]]:
    """Yields each place that a mutation can change, with its operators and their occurrences."""
    nodes = list(ast_nodes(get_ast(text)))
    spans = list(excluded_spans(ast.parse(text)))
    found: dict[Position, list[Change]] = {}
    for name, operator in chosen.items():
        occurrence = 0
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                if not any(low <= start < high for low, high in spans):
                    found.setdefault(start, []).append((name, occurrence))
                occurrence += 1
    yield from sorted(found.items())


def excluded_spans(tree: ast.Module) -> Iterator[Span]:
    """Yields the parts of a file in which a mutation changes nothing that a test should see.

    - annotations and what stands under `if TYPE_CHECKING:`
    - decorators and their arguments
    - log messages and warnings
    - `__repr__` and `__str__`
    - f-strings in `raise` statements
    - assertions, which hold anyway
    - constants in capitals with a number, and numbers as defaults of parameters and fields
    - indices of a `shape`: 0 and -1 are the same axis of a vector
    - `strict=` of `zip`, which asserts equal lengths
    """
    for node in ast.walk(tree):
        match node:
            case ast.arg(annotation=ast.expr() as annotation):
                yield _span(annotation)
            case ast.AnnAssign(annotation=annotation, target=target, value=value):
                yield _span(annotation)
                if value is not None and _is_setting(target, value):
                    yield _span(value)
            case ast.Assign(targets=[target], value=value) if _is_setting(target, value):
                yield _span(value)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Assert():
                yield _span(node)
            case ast.Raise(exc=ast.expr() as error):
                yield from (_span(e) for e in ast.walk(error) if isinstance(e, ast.JoinedStr))
            case ast.Subscript(value=ast.Attribute(attr="shape"), slice=index):
                yield _span(index)
            case ast.keyword(arg="strict", value=value):
                yield _span(value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name))) if name in LOGS:
                yield _span(node)
            case ast.ClassDef(decorator_list=decorators, body=body):
                yield from map(_span, decorators)
                for field in body:
                    if isinstance(field, ast.AnnAssign) and _is_number(field.value):
                        yield _span(field)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from map(_span, node.decorator_list)
                if node.returns is not None:
                    yield _span(node.returns)
                for default in (*node.args.defaults, *node.args.kw_defaults):
                    if default is not None and _is_number(default):
                        yield _span(default)
                if node.name in ("__repr__", "__str__"):
                    yield _span(node)


def _is_setting(target: ast.expr, value: ast.expr) -> bool:
    """Returns whether an assignment gives a constant in capitals a number."""
    named = isinstance(target, ast.Name) and CONSTANT.fullmatch(target.id)
    return bool(named) and _is_number(value)


def _is_number(value: ast.expr | None) -> bool:
    """Returns whether an expression is made of numbers only, such as `64 << 10` or -1."""
    parts = () if value is None else tuple(ast.walk(value))
    kinds = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    return bool(parts) and all(
        isinstance(p, kinds) and (not isinstance(p, ast.Constant) or type(p.value) in (int, float))
        for p in parts
    )


def _span(node: ast.expr | ast.stmt) -> Span:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _differs(before: str, after: str) -> bool:
    """Returns whether a changed text is valid Python with another meaning."""
    try:
        return ast.dump(ast.parse(before)) != ast.dump(ast.parse(after))
    except SyntaxError:
        return False


def _place(text: str, line: int) -> str:
    """Returns the innermost function or class around a line, such as `PrefixCache.match`."""
    names: list[str] = []
    body: Sequence[ast.stmt] = ast.parse(text).body
    while True:
        around = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.lineno <= line <= (node.end_lineno or 0)
        ]
        if not around:
            return ".".join(names) or "module"
        names.append(around[0].name)
        body = around[0].body
