"""`lowtide solvers`: the methods there are."""

from __future__ import annotations

import json

import click

from lowtide.cli.options import json_option


@click.command("solvers")
@json_option
def command(as_json: bool) -> None:
    """List the methods that choose what to recompute.

    For each: what it minimises, how its time grows with the number n of layers, whether it takes a
    budget, when it proves that its plan is the best, and where it is from.
    """
    from lowtide.report.methods import method_to_json, print_methods
    from lowtide.solvers import methods

    if as_json:
        click.echo(json.dumps([method_to_json(method) for method in methods().values()], indent=2))
    else:
        print_methods(methods())
