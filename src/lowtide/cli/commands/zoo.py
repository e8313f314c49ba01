"""`lowtide zoo`: the built-in models and their usual sizes."""

from __future__ import annotations

import json

import click

from lowtide.cli.options import json_option


@click.command("zoo")
@json_option
def command(as_json: bool) -> None:
    """List the built-in models and their usual sizes.

    Beside them there is preresnet<depth>, a pre-activation ResNet of any depth, and every model that
    hf:TYPE, torchvision:NAME, timm:NAME or path/to/file.py:function names.
    """
    from lowtide.zoo import REGISTRY

    sizes = {name: dict(entry.defaults) for name, entry in sorted(REGISTRY.items())}
    if as_json:
        click.echo(json.dumps(sizes, indent=2))
        return
    widest = max(map(len, sizes))
    for name, usual in sizes.items():
        click.echo(f"{name:{widest}}  {', '.join(f'{size} {value}' for size, value in usual.items())}")
