"""The command line. Only this module prints or exits; results go to stdout, everything else to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flowdflash import __version__

if TYPE_CHECKING:
    from flowdflash.config.check import Pipeline
    from flowdflash.plugin.loader import Plugins

OK, FAILED, INVALID = 0, 1, 78

_FILE = click.argument("file", type=click.Path(path_type=Path))
_SET = click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Set one value of the pipeline; may be repeated.")
_STRICT = click.option("--strict", is_flag=True, help="Take warnings for errors.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flowdflash")
@click.option("--plugins-dir", type=click.Path(path_type=Path), help="Load every plugin file (*.py) of this folder.")
@click.option("--disable-plugin", "disabled", multiple=True, metavar="NAME", help="Leave an installed plugin out.")
@click.pass_context
def main(ctx: click.Context, plugins_dir: Path | None, disabled: tuple[str, ...]) -> None:
    """Train DFlash draft models from a YAML pipeline.

    Exit codes: 0 ok, 1 a run failed, 2 wrong command line, 78 pipeline or plugin invalid, 130/143 interrupted.
    """
    ctx.obj = {"plugins_dir": plugins_dir, "disabled": disabled}


def _plugins(ctx: click.Context) -> Plugins:
    from flowdflash import stages
    from flowdflash.plugin.loader import load_plugins

    plugins = load_plugins(builtin=[stages], plugins_dir=ctx.obj["plugins_dir"], disabled=ctx.obj["disabled"])
    for warning in plugins.warnings:
        click.echo(f"warning: plugin {warning}", err=True)
    return plugins


def _load(ctx: click.Context, file: Path, overrides: tuple[str, ...] = (), strict: bool = False) -> tuple[Pipeline, Plugins]:
    from flowdflash.config.check import load
    from flowdflash.config.problems import as_text

    plugins = _plugins(ctx)
    pipeline = load(file, plugins, overrides=overrides, strict=strict)
    if pipeline.warnings:
        click.echo(as_text(pipeline.warnings), err=True)
    return pipeline, plugins


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Turn the library's errors into a text on stderr and an exit code."""
    from flowdflash.errors import FlowdflashError, PipelineInvalid, PluginBroken, StageFailed

    try:
        yield
    except PipelineInvalid as error:
        from flowdflash.config.problems import as_text

        click.echo(as_text(error.problems), err=True)
        sys.exit(INVALID)
    except PluginBroken as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(INVALID)
    except StageFailed as error:
        _tell_failure(error)
        sys.exit(FAILED)
    except FlowdflashError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(FAILED)


def _tell_failure(error: Any) -> None:
    from flowdflash.errors import FlowdflashError

    # An error that we raise on purpose says all there is to say; anything else needs its traceback.
    if not isinstance(error.cause, FlowdflashError):
        click.echo(error.original_traceback(), err=True, nl=False)
    click.echo(f"error: {error}", err=True)
    for later in error.later:
        click.echo(f"  then: {later}", err=True)


@main.command()
@_FILE
@_SET
@_STRICT
@click.option("--run-dir", type=click.Path(path_type=Path), help="Folder of the run (absent or empty); default runs/NAME-TIME.")
@click.pass_context
def run(ctx: click.Context, file: Path, overrides: tuple[str, ...], strict: bool, run_dir: Path | None) -> None:
    """Run a pipeline.

    Ctrl-C or SIGTERM once: stop at the next step boundary and write a checkpoint. Twice: stop now.
    """
    from flowdflash.console import ConsoleReport, run_pipeline

    with _exit_codes():
        pipeline, plugins = _load(ctx, file, overrides, strict)
        with ConsoleReport() as report:
            code = run_pipeline(pipeline, plugins, run_dir, report, say=click.echo)
    sys.exit(code)


@main.command()
@_FILE
@_SET
@_STRICT
@click.option("--format", "style", type=click.Choice(["text", "json", "github"]), default="text", help="How problems are written.")
@click.pass_context
def validate(ctx: click.Context, file: Path, overrides: tuple[str, ...], strict: bool, style: str) -> None:
    """Check a pipeline without running it, and list every problem."""
    from flowdflash.config.check import load
    from flowdflash.config.problems import FORMATS
    from flowdflash.errors import PipelineInvalid

    with _exit_codes():
        plugins = _plugins(ctx)
        try:
            pipeline = load(file, plugins, overrides=overrides, strict=strict)
        except PipelineInvalid as error:
            click.echo(FORMATS[style](error.problems))
            sys.exit(INVALID)
        if pipeline.warnings or style == "json":
            click.echo(FORMATS[style](pipeline.warnings))
        if style == "text":
            click.echo(f"{file}: valid, {len(pipeline.graph.nodes)} stages")


@main.command()
@_FILE
@_SET
@click.option(
    "--format",
    "style",
    type=click.Choice(["text", "mermaid", "dot", "svg", "html", "json"]),
    default="text",
    help="How the graph is written.",
)
@click.option("--output", "-o", type=click.Path(path_type=Path), help="File to write; default: standard output.")
@click.pass_context
def graph(ctx: click.Context, file: Path, overrides: tuple[str, ...], style: str, output: Path | None) -> None:
    """Draw a pipeline: stages, what travels on each edge, and the facts. Offline."""
    from flowdflash.render import render

    with _exit_codes():
        pipeline, _ = _load(ctx, file, overrides)
        text = render(pipeline.graph, style, name=pipeline.name)
    if output is None:
        click.echo(text)
    else:
        output.write_text(text, encoding="utf-8")


@main.command()
@click.argument("kind", required=False)
@click.pass_context
def stages(ctx: click.Context, kind: str | None) -> None:
    """List the stages that a pipeline may use, with their options."""
    from flowdflash.listing import stages_text
    from flowdflash.stage import KINDS

    with _exit_codes():
        if kind is not None and kind not in KINDS:
            raise click.UsageError(f"there is no kind {kind!r}; kinds are {', '.join(KINDS)}")
        click.echo(stages_text(_plugins(ctx).registry.types(kind), options=kind is not None))


@main.command()
@click.pass_context
def schema(ctx: click.Context) -> None:
    """Print the JSON Schema of pipeline files, for editors."""
    import json

    from flowdflash.config.schema import json_schema

    with _exit_codes():
        click.echo(json.dumps(json_schema(_plugins(ctx).registry), indent=2))


@main.group()
def plugins() -> None:
    """List, show and write plugins."""


@plugins.command("list")
@click.pass_context
def plugins_list(ctx: click.Context) -> None:
    """Every plugin that was found: what it supplies, how long its import took, and what is wrong with it."""
    from flowdflash.listing import plugins_text

    with _exit_codes():
        click.echo(plugins_text(_plugins(ctx.find_root()).infos))


@plugins.command("show")
@click.argument("name")
@click.pass_context
def plugins_show(ctx: click.Context, name: str) -> None:
    """One plugin: its stages with their options, its hooks."""
    from flowdflash.listing import plugin_text

    with _exit_codes():
        found = [info for info in _plugins(ctx.find_root()).infos if info.name == name]
        if not found:
            raise click.UsageError(f"no plugin is called {name!r}; see flowdflash plugins list")
        click.echo("\n\n".join(map(plugin_text, found)))


@plugins.command("new")
@click.argument("name")
@click.option("--kind", type=click.Choice(["interleaver", "bucketer", "dispatcher", "sink"]), default="interleaver")
@click.option("--into", type=click.Path(path_type=Path), default=Path(), help="Folder to write the package into.")
def plugins_new(name: str, kind: str, into: Path) -> None:
    """Write a small package with a working stage and a passing test."""
    from flowdflash.plugin.scaffold import new_plugin

    with _exit_codes():
        for path in new_plugin(name, kind, into):
            click.echo(path)


@main.command("eval")
@click.argument("run_or_checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--prompts", type=click.Path(dir_okay=False, path_type=Path), help="Chat rows; default: those of the run's pipeline.")
@click.option("--num-prompts", type=click.IntRange(1), help="How many prompts to decode.")
@click.option("--max-new-tokens", type=click.IntRange(1), help="Most tokens generated per prompt.")
@click.option("--format", "style", type=click.Choice(["text", "json"]), default="text")
@click.pass_context
def evaluate(
    ctx: click.Context,
    run_or_checkpoint: Path,
    prompts: Path | None,
    num_prompts: int | None,
    max_new_tokens: int | None,
    style: str,
) -> None:
    """Measure the acceptance length of a run's newest checkpoint (or of one checkpoint) by real speculative decoding."""
    from flowdflash.console import ConsoleReport
    from flowdflash.evaluate import evaluate_checkpoint, evaluation_text

    def load_pipeline(text: str, base: Path) -> Any:
        from flowdflash.config.check import load_text

        return load_text(text, _plugins(ctx), base)

    with _exit_codes(), ConsoleReport() as report:
        result = evaluate_checkpoint(
            run_or_checkpoint, load_pipeline, report, prompts=prompts, num_prompts=num_prompts, max_new_tokens=max_new_tokens
        )
    click.echo(evaluation_text(result, style))


if __name__ == "__main__":
    main()
