"""`lowtide solvers`: the methods there are."""

from __future__ import annotations

import json

import click

from lowtide.cli.options import json_option


@click.command("solvers")
@json_option
def command(as_json: bool) -> None:
    """List the methods that choose what to recompute, op by op or layer by layer.

    For each: what it minimises, how its time grows with the number n of layers or ops, whether it takes a
    budget, when it proves that its plan is the best, and where it is from.
    """
    from lowtide.report.text.methods import method_to_json, print_methods
    from lowtide.solvers import methods, schedulers

    if as_json:
        known = [*methods().values(), *schedulers().values()]
        click.echo(json.dumps([method_to_json(method) for method in known], indent=2))
    else:
        print_methods({"layer by layer": methods(), "op by op": schedulers()})
