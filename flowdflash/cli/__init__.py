"""The command line. Only this package prints or exits; results go to stdout, everything else to stderr."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import click

from flowdflash import __version__

INTERRUPTED = 130

COMMANDS = {
    "run": "Run a pipeline.",
    "validate": "Check a pipeline without running it, and list every problem.",
    "graph": "Draw a pipeline: stages, what travels on each edge, and the facts. Offline.",
    "plan": "Show what an epoch will look like, and strategies side by side. Offline.",
    "show": "Show one row of a data file as the draft sees it: its tokens and its loss mask.",
    "stages": "List the stages that a pipeline may use, with their options.",
    "plugins": "List, show and write plugins.",
    "schema": "Print the JSON Schema of pipeline files, for editors.",
    "compare": "Say whether two runs are the same, bit for bit, and where they part.",
    "eval": "Measure the acceptance length of a run's newest checkpoint by real speculative decoding.",
    "export": "Write the draft of a run, or another export, in a format that inference engines load.",
    "doctor": "Say whether a draft is what was trained and what will be served; the overfit gate of a pipeline.",
}
"""Commands in the order of ``--help``; each is ``command`` of the module ``<name>_command``, imported when used."""


class _LazyGroup(click.Group):
    """A group that imports a command's module only when the command is run: ``--help`` stays instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"flowdflash.cli.{name}_command").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from difflib import get_close_matches

        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            close = get_close_matches(args[0], COMMANDS, 1)
            ctx.fail(f"there is no command {args[0]!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """As of any group; Ctrl-C where no run is going on ends with the code of an interruption, not of a failure."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flowdflash")
@click.option("--plugins-dir", type=click.Path(path_type=Path), help="Load every plugin file (*.py) of this folder.")
@click.option("--disable-plugin", "disabled", multiple=True, metavar="NAME", help="Leave an installed plugin out.")
@click.pass_context
def main(ctx: click.Context, plugins_dir: Path | None, disabled: tuple[str, ...]) -> None:
    """Train DFlash draft models from a YAML pipeline.

    Exit codes: 0 ok, 1 a run failed, 2 wrong command line, 78 pipeline or plugin invalid, 130/143 interrupted.
    """
    # Libraries' own progress bars would run into ours, and fill log files. tqdm reads this when it is imported; a
    # download from the Hugging Face Hub still shows its bar, on terminals only.
    os.environ.setdefault("TQDM_DISABLE", "1")
    ctx.obj = {"plugins_dir": plugins_dir, "disabled": disabled}
