"""``flowdflash schema``."""

from __future__ import annotations

import click

from flowdflash.cli.common import exit_codes, load_all_plugins


@click.command("schema")
@click.pass_context
def command(ctx: click.Context) -> None:
    """Print the JSON Schema of pipeline files, for editors."""
    import json

    from flowdflash.config.schema import json_schema

    with exit_codes():
        click.echo(json.dumps(json_schema(load_all_plugins(ctx).registry), indent=2))
