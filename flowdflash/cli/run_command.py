"""``flowdflash run``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from flowdflash.cli.common import SET, STRICT, exit_codes, load_all_plugins, load_pipeline, say


@click.command("run")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@SET
@STRICT
@click.option(
    "--run-dir", type=click.Path(path_type=Path), help="Folder of the run (absent or empty); default runs/NAME-TIME."
)
@click.option(
    "--resume",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="RUN",
    help="Go on with the run in this folder, from its newest complete checkpoint; FILE is not needed.",
)
@click.pass_context
def command(
    ctx: click.Context,
    file: Path | None,
    overrides: tuple[str, ...],
    strict: bool,
    run_dir: Path | None,
    resume: Path | None,
) -> None:
    """Run a pipeline.

    Ctrl-C or SIGTERM once: stop at the next step boundary and write a checkpoint. Twice: stop now. A run that was
    stopped, killed or failed goes on with --resume, and ends with the weights that it would have had anyway.
    """
    from flowdflash.cli.console import ConsoleReport, run_pipeline
    from flowdflash.cli.resume import resume_run

    if resume is not None and run_dir is not None:
        raise click.UsageError("--run-dir is for a new run; one that is resumed keeps its folder")
    if resume is None and file is None:
        raise click.UsageError("Missing argument 'FILE' (or --resume RUN).")
    with exit_codes():
        if resume is not None:
            plugins = load_all_plugins(ctx)
            with ConsoleReport() as report:
                code = resume_run(resume, plugins, report, file=file, overrides=overrides, strict=strict, say=say)
        else:
            assert file is not None
            pipeline, plugins = load_pipeline(ctx, file, overrides, strict)
            with ConsoleReport() as report:
                code = run_pipeline(pipeline, plugins, run_dir, report, say=say)
    sys.exit(code)
