"""The command line: one file a command, loaded when it is asked for.

Exit codes: 0 fine or "it fits", 1 the answer is no, 2 a bad request. What lowtide raises on purpose
becomes one message on stderr; anything else is a bug and shows its traceback.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from lowtide._version import __version__
from lowtide.errors import LowtideError
from lowtide.text.progress import switch_progress

_COMMANDS = (
    "fit",
    "saved",
    "plan",
    "compare",
    "batch",
    "rehearse",
    "worst",
    "check",
    "report",
    "explain",
    "solvers",
    "zoo",
)
_BAD_REQUEST = 2
_INTERRUPTED = 130  # as shells say it; click's own 1 would read as "it does not fit"


class LazyGroup(click.Group):
    """Commands that are modules of `commands`, each with its click command called `command`.

    No module here imports torch before its command runs, so that help comes at once.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command's name, in the order in which they are listed."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command of that name, if there is one."""
        if name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"lowtide.cli.commands.{name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; report what lowtide refuses."""
        try:
            return super().invoke(ctx)
        except LowtideError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(_BAD_REQUEST)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(_INTERRUPTED)


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lowtide")
@click.option(
    "--progress/--no-progress", default=True, help="Show on a terminal what is being done, or do not."
)
@click.pass_context
def main(ctx: click.Context, progress: bool) -> None:
    """Know, before it runs, how much memory a PyTorch training step needs, and make it need less."""
    switch_progress(ctx, progress)
