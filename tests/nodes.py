"""Finds an expression of a function by its kind and what it is about, and replaces it."""

import ast
from dataclasses import dataclass

OPERATORS = {
    "/": ast.Div, "*": ast.Mult, "**": ast.Pow, ">": ast.Gt, "<": ast.Lt, "<=": ast.LtE,
    "==": ast.Eq,
}  # fmt: skip


@dataclass(frozen=True)
class Node:
    """An expression in a function.

    Kinds: a ``call``, by the last part of the name that is called, or with ``argument`` one of its
    arguments; the value of a ``keyword``; what an ``operator`` computes or compares, by its sign;
    what a ``return`` gives; what a ``loop`` goes through.
    """

    kind: str
    about: str = ""
    number: int | None = None  # counted from 1, if the function has several of them
    argument: int | None = None  # of a call, counted from 1

    def __str__(self) -> str:
        words = [self.kind, self.about, *([f"number {self.number}"] if self.number else [])]
        return " ".join(word for word in words if word)


def replaced(source: str, function: str, node: Node, becomes: str) -> str:
    """Return a source in which a node of a function has become an expression.

    In that ``_`` is what it was. LookupError: there is no such function or node, or several.
    """
    tree = ast.parse(source)
    old = _found(_function(tree, function), function, node)
    new = _Exchange(lambda one: isinstance(one, ast.Name) and one.id == "_", old).visit(
        ast.parse(becomes, mode="eval").body
    )
    return ast.unparse(_Exchange(lambda one: one is old, new).visit(tree))


class _Exchange(ast.NodeTransformer):
    """Puts one expression in the place of others."""

    def __init__(self, is_old, new) -> None:
        self.is_old, self.new = is_old, new

    def visit(self, node):
        return self.new if self.is_old(node) else self.generic_visit(node)


def _function(tree: ast.Module, name: str) -> ast.AST:
    found: ast.AST = tree
    for part in name.split("."):
        inside = [one for one in found.body if getattr(one, "name", None) == part]
        if len(inside) != 1:
            raise LookupError(f"there are {len(inside)} of {name}")
        found = inside[0]
    return found


def _found(function: ast.AST, name: str, node: Node) -> ast.expr:
    found = sorted(_candidates(function, node.kind, node.about), key=lambda pair: pair[0])
    number = node.number or 1
    if len(found) < number or (node.number is None and len(found) > 1):
        raise LookupError(f"{name} has {len(found)} of: {node}")
    expression = found[number - 1][1]
    if node.argument is None:
        return expression
    if len(expression.args) < node.argument:
        raise LookupError(f"{name}: {node} has {len(expression.args)} arguments")
    return expression.args[node.argument - 1]


def _candidates(function: ast.AST, kind: str, about: str):
    """Yield all expressions of a kind, each with the place where its name or sign stands."""
    for one in ast.walk(function):
        match kind, one:
            case "call", ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name) as called):
                if name == about:
                    yield _end(called), one
            case "keyword", ast.keyword(arg=name, value=value):
                if name == about:
                    yield _end(value), value
            case "operator", ast.BinOp(left=left, op=op) | ast.Compare(left=left, ops=[op]):
                if isinstance(op, OPERATORS[about]):
                    yield _end(left), one
            case "return", ast.Return(value=ast.expr() as value):
                yield _end(value), value
            case "loop", ast.For(iter=through):
                yield _end(through), through


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset
