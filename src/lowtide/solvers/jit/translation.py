"""Functions over numbers as LLVM functions: statement by statement, what Python would do.

A variable is of the kind that it is first given, and stays of that kind.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from llvmlite import ir

from lowtide.solvers.jit.expressions import Block, Expressions, Named, Value
from lowtide.solvers.jit.kinds import BOOL, INT, Callee, Column, Scope, Table


class Translation(Expressions):
    """Writes one function: its variables into its first block, what it does into the others."""

    def __init__(self, callee: Callee, scope: Scope) -> None:
        self.variables = ir.IRBuilder(callee.llvm.append_basic_block())
        super().__init__(callee.llvm, scope)
        self.signature = callee.signature
        self.loops: list[tuple[Block, Block]] = []  # where `continue` and `break` go, the innermost last

    def write(self, source: ast.FunctionDef) -> None:
        """The whole function.

        Raises:
            NotCompilable: something in it is not in the part of Python that can be compiled.
        """
        first = self.builder.block
        arguments = iter(self.function.args)
        for name, kind in self.signature.parameters.items():
            if isinstance(kind, Table):
                self.names[name] = Named(kind, next(arguments))
            elif isinstance(kind, Column):
                self.names[name] = Named(kind, next(arguments), next(arguments))
            else:
                self.assign_name(source, name, self.received(next(arguments), kind))
        self.statements(source.body)
        if not self.builder.block.is_terminated:
            if self.signature.results:
                self.builder.unreachable()  # mypy has seen to it that every way out returns
            else:
                self.builder.ret_void()
        self.variables.branch(first)

    # Statements --------------------------------------------------------------------------------------

    def statements(self, nodes: Sequence[ast.stmt]) -> None:
        for node in nodes:
            if self.builder.block.is_terminated:
                raise self.refusal(node, "is never reached")
            self.statement(node)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
                pass
            case ast.Expr(value=ast.Call() as call):
                self.called(call)
            case ast.Assign(targets=[target], value=value):
                self.assign(target, value)
            case ast.AugAssign():
                self.augment(node)
            case ast.If():
                self.choose(node)
            case ast.While(test=test, body=body, orelse=[]):
                self.repeat_while(test, body)
            case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=[_, *_], keywords=[]), orelse=[]):
                self.repeat_for(node)
            case ast.Break() | ast.Continue():
                self.builder.branch(self.loops[-1][isinstance(node, ast.Break)])
            case ast.Return():
                self.give_back(node)
            case _:
                raise self.refusal(node, f"{type(node).__name__} like this is not known")

    def give_back(self, node: ast.Return) -> None:
        if node.value is None:
            self.builder.ret_void()
            return
        given = self.several(node.value) if len(self.signature.results) > 1 else [self.value(node.value)]
        wanted = self.signature.results
        if len(given) != len(wanted):
            raise self.refusal(node, f"returns {len(given)} values, and {len(wanted)} are annotated")
        numbers = [self.converted(node, value, kind) for value, kind in zip(given, wanted, strict=True)]
        passed = [self.converted(node, value, INT) if value.type == BOOL else value for value in numbers]
        if len(passed) == 1:
            self.builder.ret(passed[0])
        else:
            self.builder.ret(self.packed(passed))

    def packed(self, values: Sequence[Value]) -> Value:
        made = ir.Constant(ir.LiteralStructType([value.type for value in values]), ir.Undefined)
        for place, value in enumerate(values):
            made = self.builder.insert_value(made, value, place)
        return made

    def several(self, node: ast.expr) -> list[Value]:
        """The values of a tuple, or what a call returns."""
        match node:
            case ast.Tuple(elts=parts):
                return [self.value(part) for part in parts]
            case ast.Call():
                return self.called(node)
        raise self.refusal(node, "is not several values")

    # Variables and columns ---------------------------------------------------------------------------

    def assign(self, target: ast.expr, node: ast.expr) -> None:
        if not isinstance(target, ast.Tuple):
            self.assign_one(target, self.value(node))
            return
        values = self.several(node)
        if len(values) != len(target.elts):
            raise self.refusal(node, f"is {len(values)} values, and {len(target.elts)} are assigned")
        for part, value in zip(target.elts, values, strict=True):
            self.assign_one(part, value)

    def assign_one(self, target: ast.expr, value: Value) -> None:
        match target:
            case ast.Name(id=name):
                self.assign_name(target, name, value)
            case ast.Subscript():
                kind, place = self.element(target)
                self.builder.store(self.converted(target, value, kind), place)
            case _:
                raise self.refusal(target, "cannot be assigned to")

    def assign_name(self, node: ast.AST, name: str, value: Value) -> None:
        if name not in self.names:
            self.names[name] = Named(value.type, self.variables.alloca(value.type))
        named = self.names[name]
        if isinstance(named.kind, Column | Table):
            raise self.refusal(node, f"{name} is no number")
        self.builder.store(self.converted(node, value, named.kind), named.place)

    def augment(self, node: ast.AugAssign) -> None:
        """As Python does: what is there is read before the other side is computed."""
        if isinstance(node.target, ast.Name):
            before = self.variable(node.target)
            self.assign_name(node, node.target.id, self.added(node, before))
        elif isinstance(node.target, ast.Subscript):
            kind, place = self.element(node.target)
            after = self.added(node, self.builder.load(place))
            self.builder.store(self.converted(node, after, kind), place)
        else:
            raise self.refusal(node, "cannot be assigned to")

    def added(self, node: ast.AugAssign, before: Value) -> Value:
        return self.arithmetic(node, node.op, before, self.value(node.value))

    # Branches and loops ------------------------------------------------------------------------------

    def choose(self, node: ast.If) -> None:
        yes, no, after = self.block(), self.block(), self.block()
        self.branch(node.test, yes, no)
        for block, statements in ((yes, node.body), (no, node.orelse)):
            self.builder.position_at_end(block)
            self.statements(statements)
            self.go_on(after)
        self.builder.position_at_end(after)

    def go_on(self, block: Block) -> None:
        """Continue there, unless something else has been decided."""
        if not self.builder.block.is_terminated:
            self.builder.branch(block)

    def repeat_while(self, test: ast.expr, body: Sequence[ast.stmt]) -> None:
        again, inside, after = self.block(), self.block(), self.block()
        self.builder.branch(again)
        self.builder.position_at_end(again)
        self.branch(test, inside, after)
        self.repeat(body, inside, again, after)

    def repeat_for(self, node: ast.For) -> None:
        """A counter of its own: the variable keeps the last number, and may be changed without effect."""
        start, stop, step = self.range(node)
        counter = self.variables.alloca(INT)
        test, inside, again, after = self.block(), self.block(), self.block(), self.block()
        self.builder.store(start, counter)
        self.builder.branch(test)
        self.builder.position_at_end(test)
        now = self.builder.load(counter)
        self.builder.cbranch(self.builder.icmp_signed("<" if step > 0 else ">", now, stop), inside, after)
        self.builder.position_at_end(again)
        self.builder.store(self.builder.add(self.builder.load(counter), INT(step)), counter)
        self.builder.branch(test)
        self.builder.position_at_end(inside)
        self.assign_one(node.target, now)
        self.repeat(node.body, self.builder.block, again, after)

    def range(self, node: ast.For) -> tuple[Value, Value, int]:
        assert isinstance(node.iter, ast.Call)
        given = node.iter.args
        bounds = [self.converted(node.iter, self.value(each), INT) for each in given[:2]]
        start = bounds[0] if len(bounds) > 1 else INT(0)
        return start, bounds[-1], self.step(given[2]) if len(given) > 2 else 1

    def step(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(size)) if size > 0:
                return size
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(size))) if size > 0:
                return -size
        raise self.refusal(node, "a step is written as a number, and is not 0")

    def repeat(self, body: Sequence[ast.stmt], inside: Block, again: Block, after: Block) -> None:
        self.builder.position_at_end(inside)
        self.loops.append((again, after))
        self.statements(body)
        self.loops.pop()
        self.go_on(again)
        self.builder.position_at_end(after)
