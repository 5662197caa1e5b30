"""``flowdflash stages``."""

from __future__ import annotations

import click

from flowdflash.cli.common import exit_codes, load_all_plugins


@click.command("stages")
@click.argument("kind", required=False)
@click.pass_context
def command(ctx: click.Context, kind: str | None) -> None:
    """List the stages that a pipeline may use, with their options."""
    from flowdflash.cli.listing import stages_text
    from flowdflash.stage import KINDS

    with exit_codes():
        if kind is not None and kind not in KINDS:
            raise click.UsageError(f"there is no kind {kind!r}; kinds are {', '.join(KINDS)}")
        click.echo(stages_text(load_all_plugins(ctx).registry.types(kind), options=kind is not None))
