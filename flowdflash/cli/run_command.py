"""``flowdflash run``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from flowdflash.cli.common import FILE, SET, STRICT, exit_codes, load_pipeline


@click.command("run")
@FILE
@SET
@STRICT
@click.option(
    "--run-dir", type=click.Path(path_type=Path), help="Folder of the run (absent or empty); default runs/NAME-TIME."
)
@click.pass_context
def command(ctx: click.Context, file: Path, overrides: tuple[str, ...], strict: bool, run_dir: Path | None) -> None:
    """Run a pipeline.

    Ctrl-C or SIGTERM once: stop at the next step boundary and write a checkpoint. Twice: stop now.
    """
    from flowdflash.cli.console import ConsoleReport, run_pipeline

    with exit_codes():
        pipeline, plugins = load_pipeline(ctx, file, overrides, strict)
        with ConsoleReport() as report:
            code = run_pipeline(pipeline, plugins, run_dir, report, say=click.echo)
    sys.exit(code)
