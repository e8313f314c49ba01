"""How long does `auto` plan on graphs of 1,000 to 20,000 ops?

    python -m benchmarks.planner.speed [--most-ops 20000] [-o planner_speed.json]

The graphs are unrolled LSTMs and GPT-like stacks with made-up but plausible sizes and times. Planning is done
once before anything is timed, so that loops are compiled; first_plan.py tells how long that takes.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lowtide.ir.graph import Graph, Op, Origin, Phase, Ref, Role, Tensor, Value
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import simulate
from lowtide.ir.validate import validate
from lowtide.solvers.jit import is_compiling
from lowtide.solvers.registry import solve
from lowtide.text.documents import write_text

HALF = "50%"
LOWEST = "min"


class Tape:
    """A training step being written: ops forward, then for each its backward, in reverse."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.undone: list[tuple[tuple[int, ...], int, tuple[int, ...], float]] = []

    def value(self, count: int, role: Role = Role.INTERMEDIATE) -> int:
        self.values.append(Value(len(self.values), count, role, f"v{len(self.values)}"))
        return len(self.values) - 1

    def op(self, reads: Sequence[int], creates: Sequence[int], seconds: float, phase: Phase) -> None:
        self.ops.append(
            Op(
                id=len(self.ops),
                target="aten.mm.default" if seconds > 1e-5 else "aten.mul.Tensor",
                args=tuple(Ref(value) for value in dict.fromkeys(reads)),
                kwargs=(),
                outputs=tuple(creates),
                reads=tuple(dict.fromkeys(reads)),
                creates=tuple(creates),
                phase=phase,
                seconds=seconds,
            )
        )

    def forward(self, reads: Sequence[int], count: int, seconds: float, saves: Sequence[int] = ()) -> int:
        """An op whose backward reads the values `saves`, or else its result."""
        made = self.value(count)
        self.op(reads, [made], seconds, Phase.FORWARD)
        self.undone.append((tuple(reads), made, tuple(saves) or (made,), seconds))
        return made

    def graph(self, name: str) -> Graph:
        """The tape and its backward."""
        gradient: dict[int, int] = {}
        for reads, made, saves, seconds in reversed(self.undone):
            incoming = gradient.pop(made, None)
            if incoming is None:
                incoming = self.value(self.values[made].bytes)
                self.op([made], [incoming], 1e-6, Phase.BACKWARD)
            for read in dict.fromkeys(reads):
                if self.values[read].role is not Role.INTERMEDIATE:
                    continue
                outgoing = self.value(self.values[read].bytes)
                self.op([incoming, *saves], [outgoing], seconds, Phase.BACKWARD)
                if read in gradient:
                    total = self.value(self.values[read].bytes)
                    self.op([gradient[read], outgoing], [total], 2e-6, Phase.BACKWARD)
                    gradient[read] = total
                else:
                    gradient[read] = outgoing
        tensors = (Tensor(value.id, value.id, (value.bytes,), (1,), 0, "uint8") for value in self.values)
        return validate(Graph(name, Origin.JOINT, "cpu", tuple(self.ops), tuple(self.values), tuple(tensors)))


def lstm(steps: int, size: int = 4096) -> Graph:
    """An LSTM of one layer, step by step: two products, four gates, a cell."""
    tape = Tape()
    weight = tape.value(64 * size, Role.PARAMETER)
    hidden = tape.forward([weight], size, 1e-6)
    cell = tape.forward([weight], size, 1e-6)
    for _ in range(steps):
        seen = tape.value(size, Role.BATCH)
        products = [tape.forward([source, weight], 4 * size, 4e-5, [source]) for source in (seen, hidden)]
        total = tape.forward(products, 4 * size, 5e-6, [weight])
        gates = [tape.forward([total], size, 4e-6) for _ in range(4)]
        kept = tape.forward([gates[0], cell], size, 2e-6, [gates[0], cell])
        new = tape.forward([gates[1], gates[2]], size, 2e-6, [gates[1], gates[2]])
        cell = tape.forward([kept, new], size, 2e-6, [weight])
        squashed = tape.forward([cell], size, 4e-6)
        hidden = tape.forward([gates[3], squashed], size, 2e-6, [gates[3], squashed])
    return tape.graph(f"lstm of {steps} steps")


def gpt(layers: int, size: int = 1 << 20) -> Graph:
    """A stack of attention and feed-forward blocks."""
    tape = Tape()
    weight = tape.value(16 * size, Role.PARAMETER)
    stream = tape.forward([weight], size, 1e-5)
    for _ in range(layers):
        normed = tape.forward([stream], size, 2e-4, [stream])
        heads = tape.forward([normed, weight], 3 * size, 3e-3, [normed])
        attended = tape.forward([heads], size, 4e-3, [heads])
        projected = tape.forward([attended, weight], size, 1e-3, [attended])
        stream = tape.forward([stream, projected], size, 1e-4, [weight])
        normed = tape.forward([stream], size, 2e-4, [stream])
        wide = tape.forward([normed, weight], 4 * size, 4e-3, [normed])
        active = tape.forward([wide], 4 * size, 4e-4, [wide])
        narrow = tape.forward([active, weight], size, 4e-3, [active])
        stream = tape.forward([stream, narrow], size, 1e-4, [weight])
    return tape.graph(f"gpt of {layers} layers")


def sized(make: Callable[[int], Graph], ops: int) -> Graph:
    """The graph of that kind with about so many ops."""
    two, three = len(make(2).ops), len(make(3).ops)
    return make(max(1, round((ops - two) / (three - two)) + 2))


def searched_anew(graph: Graph) -> Graph:
    """The same under another name, for which no search is remembered."""
    return replace(graph, name=f"{graph.name}, anew")


def row(graph: Graph, budget: str, method: str) -> dict[str, object]:
    plain = simulate(graph, straight(graph))
    started = time.perf_counter()
    solution = solve(graph, method, budget)
    seconds = time.perf_counter() - started
    part = (solution.peak_bytes - plain.resident_bytes) / plain.growth_bytes
    print(
        f"{graph.name:>24} {len(graph.ops):6} ops {budget:>4}: {seconds:6.1f} s, growth {part:.3f} of plain, "
        f"time {1 + solution.extra_seconds_ratio:.3f} of plain",
        flush=True,
    )
    return {
        "graph": graph.name,
        "ops": len(graph.ops),
        "budget": budget,
        "method": method,
        "planning_seconds": seconds,
        "growth_part": part,
        "extra_seconds_ratio": solution.extra_seconds_ratio,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--most-ops", type=int, default=20_000)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--commit", default="unknown")
    asked = parser.parse_args()
    solve(lstm(4), asked.method)  # compiles
    rows: list[dict[str, object]] = []
    for ops in (1_000, 2_000, 5_000, 10_000, 20_000):
        for make in (lstm, gpt) if ops <= asked.most_ops else ():
            rows.append(row(sized(make, ops), HALF, asked.method))
            if ops == 1_000:
                rows.append(row(searched_anew(sized(make, ops)), LOWEST, asked.method))
    machine = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "compiled": is_compiling(),
        "commit": asked.commit,
        "date": time.strftime("%Y-%m-%d"),
    }
    if asked.output:
        write_text(asked.output, json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
