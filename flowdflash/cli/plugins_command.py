"""``flowdflash plugins``."""

from __future__ import annotations

from pathlib import Path

import click

from flowdflash.cli.common import exit_codes, load_all_plugins


@click.group("plugins")
def command() -> None:
    """List, show and write plugins."""


@command.command("list")
@click.pass_context
def plugins_list(ctx: click.Context) -> None:
    """Every plugin that was found: what it supplies, how long its import took, and what is wrong with it."""
    from flowdflash.cli.listing import plugins_text

    with exit_codes():
        click.echo(plugins_text(load_all_plugins(ctx).infos))


@command.command("show")
@click.argument("name")
@click.pass_context
def plugins_show(ctx: click.Context, name: str) -> None:
    """One plugin: its stages with their options, its hooks."""
    from flowdflash.cli.listing import plugin_text

    with exit_codes():
        found = [info for info in load_all_plugins(ctx).infos if info.name == name]
        if not found:
            raise click.UsageError(f"no plugin is called {name!r}; see flowdflash plugins list")
        click.echo("\n\n".join(map(plugin_text, found)))


@command.command("new")
@click.argument("name")
@click.option("--kind", type=click.Choice(["interleaver", "bucketer", "dispatcher", "sink"]), default="interleaver")
@click.option("--into", type=click.Path(path_type=Path), default=Path(), help="Folder to write the package into.")
def plugins_new(name: str, kind: str, into: Path) -> None:
    """Write a small package with a working stage and a passing test."""
    from flowdflash.plugin.scaffold import new_plugin

    with exit_codes():
        for path in new_plugin(name, kind, into):
            click.echo(path)
