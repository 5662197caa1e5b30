"""``flowdflash validate``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from flowdflash.cli.common import FILE, INVALID, SET, STRICT, exit_codes, load_all_plugins


@click.command("validate")
@FILE
@SET
@STRICT
@click.option(
    "--format", "style", type=click.Choice(["text", "json", "github"]), default="text", help="How problems are written."
)
@click.pass_context
def command(ctx: click.Context, file: Path, overrides: tuple[str, ...], strict: bool, style: str) -> None:
    """Check a pipeline without running it, and list every problem."""
    from flowdflash.config.check import load
    from flowdflash.config.problems import FORMATS
    from flowdflash.errors import PipelineInvalid

    with exit_codes():
        plugins = load_all_plugins(ctx)
        try:
            pipeline = load(file, plugins, overrides=overrides, strict=strict)
        except PipelineInvalid as error:
            click.echo(FORMATS[style](error.problems))
            sys.exit(INVALID)
        if pipeline.warnings or style == "json":
            click.echo(FORMATS[style](pipeline.warnings))
        if style == "text":
            click.echo(f"{file}: valid, {len(pipeline.graph.nodes)} stages")
