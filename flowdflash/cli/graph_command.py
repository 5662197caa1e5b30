"""``flowdflash graph``."""

from __future__ import annotations

from pathlib import Path

import click

from flowdflash.cli.common import FILE, SET, exit_codes, load_pipeline


@click.command("graph")
@FILE
@SET
@click.option(
    "--format",
    "style",
    type=click.Choice(["text", "mermaid", "dot", "svg", "html", "json"]),
    default="text",
    help="How the graph is written.",
)
@click.option("--output", "-o", type=click.Path(path_type=Path), help="File to write; default: standard output.")
@click.pass_context
def command(ctx: click.Context, file: Path, overrides: tuple[str, ...], style: str, output: Path | None) -> None:
    """Draw a pipeline: stages, what travels on each edge, and the facts. Offline."""
    from flowdflash.render import render

    with exit_codes():
        pipeline, _ = load_pipeline(ctx, file, overrides)
        text = render(pipeline.graph, style, name=pipeline.name)
    if output is None:
        click.echo(text)
    else:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise click.FileError(str(output), error.strerror) from error
