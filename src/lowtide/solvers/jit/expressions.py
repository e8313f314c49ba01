"""Expressions over numbers as LLVM instructions.

Each means what it means in Python, as long as whole numbers fit into 64 bits, what is indexed is there, no
index is negative, and nothing is divided by zero: nobody checks that. What does not mean the same is refused.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from llvmlite import ir

from lowtide.solvers.jit.kinds import BOOL, INT, REAL, Callee, Column, Kind, Scope, Table

Value: TypeAlias = Any  # an LLVM value; its type is INT, REAL or BOOL
Block: TypeAlias = Any  # an LLVM block

_COMPARED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_WHOLE = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.LShift: "shl", ast.RShift: "ashr"}
_REAL = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}


class NotCompilable(TypeError):
    """What stands there is not in the part of Python that can be compiled."""


@dataclass(frozen=True)
class Named:
    """What a name stands for: a number's place on the stack, or where a column or record begins."""

    kind: Kind
    place: Value
    length: Value = None


class Expressions:
    """Writes the instructions of one function, where its builder stands."""

    def __init__(self, function: Any, scope: Scope) -> None:
        self.function = function
        self.scope = scope
        self.names: dict[str, Named] = {}
        self.builder = ir.IRBuilder(function.append_basic_block())

    def block(self) -> Block:
        """A new block of instructions, to be filled."""
        return self.function.append_basic_block()

    def refusal(self, node: ast.AST, why: str) -> NotCompilable:
        line = getattr(node, "lineno", 0)
        return NotCompilable(f"{self.function.name}, line {line}: {ast.unparse(node)}: {why}")

    # Numbers -----------------------------------------------------------------------------------------

    def value(self, node: ast.expr) -> Value:
        """The number that an expression stands for."""
        match node:
            case ast.Constant():
                return self.constant(node, node.value)
            case ast.Name():
                return self.variable(node)
            case ast.Subscript():
                return self.builder.load(self.element(node)[1])
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.negative(node, self.value(operand))
            case ast.BinOp(left=left, op=op, right=right):
                return self.arithmetic(node, op, self.value(left), self.value(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self.compared(node, op, self.value(left), self.value(right))
            case ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                return self.chosen(node, node, lambda: BOOL(1), lambda: BOOL(0), strict=True)
            case ast.IfExp(test=test, body=yes, orelse=no):
                return self.chosen(node, test, lambda: self.value(yes), lambda: self.value(no))
            case ast.Call():
                found = self.called(node)
                if len(found) == 1:
                    return found[0]
                raise self.refusal(node, f"stands for {len(found)} values, not for one")
        raise self.refusal(node, f"{type(node).__name__} is not known")

    def constant(self, node: ast.expr, number: object) -> Value:
        for python, kind in ((bool, BOOL), (int, INT), (float, REAL)):
            if isinstance(number, python):
                return kind(number)
        raise self.refusal(node, "is no number")

    def variable(self, node: ast.Name) -> Value:
        named = self.names.get(node.id)
        if named is None:
            return self.constant(node, self.scope.globals.get(node.id))
        if isinstance(named.kind, Column | Table):
            raise self.refusal(node, "is no number")
        return self.builder.load(named.place)

    def converted(self, node: ast.AST, value: Value, kind: Kind) -> Value:
        """The same number as another kind: true as 1, a whole number as a real one."""
        if value.type == kind:
            return value
        if value.type == BOOL:
            value = self.builder.zext(value, INT)
        if kind == REAL and value.type == INT:
            return self.builder.sitofp(value, REAL)
        if kind == value.type:
            return value
        raise self.refusal(node, f"is {value.type} where {kind} is needed")

    def alike(self, node: ast.AST, left: Value, right: Value) -> tuple[Value, Value]:
        kind = REAL if REAL in (left.type, right.type) else INT
        return self.converted(node, left, kind), self.converted(node, right, kind)

    # Arithmetic --------------------------------------------------------------------------------------

    def negative(self, node: ast.AST, value: Value) -> Value:
        if value.type == REAL:
            return self.builder.fneg(value)
        return self.builder.neg(self.converted(node, value, INT))

    def arithmetic(self, node: ast.AST, op: ast.operator, left: Value, right: Value) -> Value:
        """Whole numbers stay whole. To divide them by one another is refused: Python would be more exact."""
        left, right = self.alike(node, left, right)
        if left.type == INT and isinstance(op, ast.FloorDiv | ast.Mod):
            return self.floored(op, left, right)
        known = _REAL if left.type == REAL else _WHOLE
        if type(op) not in known:
            raise self.refusal(node, f"{type(op).__name__} of {left.type} is not known")
        return getattr(self.builder, known[type(op)])(left, right)

    def floored(self, op: ast.operator, left: Value, right: Value) -> Value:
        """Python rounds down, LLVM towards zero: one off where the remainder's sign is not the divisor's."""
        build = self.builder
        quotient, remainder = build.sdiv(left, right), build.srem(left, right)
        differs = build.icmp_signed("<", build.xor(remainder, right), INT(0))
        is_off = build.and_(differs, build.icmp_signed("!=", remainder, INT(0)))
        if isinstance(op, ast.FloorDiv):
            return build.select(is_off, build.sub(quotient, INT(1)), quotient)
        return build.select(is_off, build.add(remainder, right), remainder)

    def compared(self, node: ast.AST, op: ast.cmpop, left: Value, right: Value) -> Value:
        if type(op) not in _COMPARED:
            raise self.refusal(node, f"{type(op).__name__} is not known")
        if REAL in (left.type, right.type) and left.type != right.type:
            raise self.refusal(node, "compares a whole number with a real one, in which Python is more exact")
        sign = _COMPARED[type(op)]
        left, right = self.alike(node, left, right)
        if left.type == INT:
            return self.builder.icmp_signed(sign, left, right)
        compare = self.builder.fcmp_unordered if sign == "!=" else self.builder.fcmp_ordered
        return compare(sign, left, right)

    # Conditions --------------------------------------------------------------------------------------

    def branch(self, node: ast.expr, yes: Block, no: Block, *, strict: bool = False) -> None:
        """Go on in one block or the other; with `strict` what is asked is true or false, and no number."""
        match node:
            case ast.BoolOp(op=op, values=[*first, last]):
                for each in first:
                    more = self.block()
                    is_and = isinstance(op, ast.And)
                    self.branch(each, more if is_and else yes, no if is_and else more, strict=strict)
                    self.builder.position_at_end(more)
                self.branch(last, yes, no, strict=strict)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self.branch(operand, no, yes)
            case _:
                value = self.value(node)
                if strict and value.type != BOOL:
                    raise self.refusal(node, "is a number, and the whole would be one in Python")
                self.builder.cbranch(self.truth(value), yes, no)

    def truth(self, value: Value) -> Value:
        if value.type == BOOL:
            return value
        if value.type == INT:
            return self.builder.icmp_signed("!=", value, INT(0))
        return self.builder.fcmp_unordered("!=", value, REAL(0.0))

    def chosen(
        self,
        node: ast.expr,
        test: ast.expr,
        yes: Callable[[], Value],
        no: Callable[[], Value],
        *,
        strict: bool = False,
    ) -> Value:
        """One of two values, of which only that one is computed."""
        starts, after = (self.block(), self.block()), self.block()
        self.branch(test, *starts, strict=strict)
        ends: list[tuple[Value, Block]] = []
        for start, compute in zip(starts, (yes, no), strict=True):
            self.builder.position_at_end(start)
            ends.append((compute(), self.builder.block))
            self.builder.branch(after)
        self.builder.position_at_end(after)
        found = self.builder.phi(ends[0][0].type)
        for value, block in ends:
            if value.type != found.type:
                raise self.refusal(node, "is sometimes of one kind and sometimes of another")
            found.add_incoming(value, block)
        return found

    # Columns and records -----------------------------------------------------------------------------

    def stored(self, node: ast.expr) -> Named:
        """The column or record that an expression stands for."""
        if isinstance(node, ast.Name) and node.id in self.names:
            return self.names[node.id]
        if isinstance(node, ast.Attribute):
            record = self.stored(node.value)
            if isinstance(record.kind, Table) and node.attr in record.kind.fields:
                return self.field(record, node.attr)
        raise self.refusal(node, "is neither a column nor a record")

    def field(self, record: Named, name: str) -> Named:
        kind, place = record.kind.fields[name], record.kind.place(name)
        address, length = (self.entry(record, 2 * place + more) for more in (0, 1))
        number = kind.number if isinstance(kind, Column) else INT
        return Named(kind, self.builder.inttoptr(address, number.as_pointer()), length)

    def entry(self, record: Named, index: int) -> Value:
        """A number of a record's table, which nothing changes while compiled functions run."""
        found = self.builder.load(self.builder.gep(record.place, [INT(index)]))
        found.set_metadata("invariant.load", self.function.module.add_metadata([]))
        return found

    def element(self, node: ast.Subscript) -> tuple[Kind, Value]:
        """The kind of a column's numbers, and where the one is that is meant."""
        column, index = self.stored(node.value), self.value(node.slice)
        if not isinstance(column.kind, Column) or index.type != INT:
            raise self.refusal(node, "is no element of a column at a whole number")
        return column.kind.number, self.builder.gep(column.place, [index])

    # Calls -------------------------------------------------------------------------------------------

    def called(self, node: ast.Call) -> list[Value]:
        """What a call returns: nothing, a number or several."""
        match node:
            case ast.Call(func=ast.Name(id="len"), args=[column], keywords=[]):
                return [self.length(column)]
            case ast.Call(func=ast.Name(id="int" | "float" as name), args=[number], keywords=[]):
                return [self.converted(node, self.value(number), INT if name == "int" else REAL)]
            case ast.Call(func=ast.Name(id="min" | "max" as name), args=[_, _, *_], keywords=[]):
                return [self.extreme(node, ast.Lt() if name == "min" else ast.Gt())]
            case ast.Call(func=ast.Name(id=name), keywords=[]) if callee := self.scope.callee(name):
                return self.results(node, callee)
        raise self.refusal(node, "such a call is not known")

    def length(self, node: ast.expr) -> Value:
        column = self.stored(node)
        if not isinstance(column.kind, Column):
            raise self.refusal(node, "is no column")
        return column.length

    def extreme(self, node: ast.Call, better: ast.cmpop) -> Value:
        """The first of the least, or of the greatest."""
        best, *others = (self.value(each) for each in node.args)
        for other in others:
            if other.type != best.type:
                raise self.refusal(node, "which kind of number it is depends on which is chosen")
            best = self.builder.select(self.compared(node, better, other, best), other, best)
        return best

    def results(self, node: ast.Call, callee: Callee) -> list[Value]:
        signature = callee.signature
        if len(node.args) != len(signature.parameters):
            raise self.refusal(node, f"takes {len(signature.parameters)} arguments")
        given = zip(node.args, signature.parameters.values(), strict=True)
        arguments = [part for each, kind in given for part in self.handed(each, kind)]
        found = self.builder.call(callee.llvm, arguments)
        if len(signature.results) == 1:
            return [self.received(found, signature.results[0])]
        parts = (self.builder.extract_value(found, place) for place in range(len(signature.results)))
        return [self.received(part, kind) for part, kind in zip(parts, signature.results, strict=True)]

    def handed(self, node: ast.expr, kind: Kind) -> list[Value]:
        """An argument as LLVM passes it."""
        if not isinstance(kind, Column | Table):
            number = self.converted(node, self.value(node), kind)
            return [self.converted(node, number, INT) if kind == BOOL else number]
        found = self.stored(node)
        if found.kind != kind:
            raise self.refusal(node, "is another column or record than is needed")
        return [found.place, found.length] if isinstance(kind, Column) else [found.place]

    def received(self, value: Value, kind: Kind) -> Value:
        """The opposite: what was true or false is that again."""
        return self.truth(value) if kind == BOOL else value
