"""``flowdflash eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from flowdflash.cli.common import exit_codes, load_all_plugins


@click.command("eval")
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--prompts",
    type=click.Path(dir_okay=False, path_type=Path, resolve_path=True),
    help="Chat rows, rows with a prompt, or a .txt file of one prompt per line.  [default: those of the pipeline]",
)
@click.option("--num-prompts", type=click.IntRange(1), help="How many prompts to decode.  [default: all of --prompts]")
@click.option("--max-new-tokens", type=click.IntRange(1), help="Most tokens generated per prompt.")
@click.option("--batch-size", type=click.IntRange(1), help="Prompts decoded at once.")
@click.option("--alone/--no-alone", default=None, help="Decode every prompt by itself too: the speed one user sees.")
@click.option("--block-size", type=click.IntRange(1), help="Slots per block.  [default: as the draft is trained]")
@click.option("--temperature", type=click.FloatRange(0), help="0 decodes greedily; above, tokens are sampled.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Sample from this much probability.")
@click.option("--top-k", type=click.IntRange(0), help="Sample from so many most likely tokens; 0 for all.")
@click.option("--target", "model", metavar="MODEL", help="The target.  [default: the one the draft is trained for]")
@click.option("--device", help="auto, cpu, cuda or cuda:N.")
@click.option("--format", "style", type=click.Choice(["text", "json"]), default="text")
@click.pass_context
def command(ctx: click.Context, /, checkpoint: Path, style: str, **options: Any) -> None:
    """Measure the acceptance length of a draft by real speculative decoding.

    CHECKPOINT is a run (its newest checkpoint), a checkpoint, or an exported draft. What is not said here is taken from
    the evaluator of the run's pipeline.
    """
    from flowdflash.cli.checkpoint_eval import evaluate_checkpoint, evaluation_text
    from flowdflash.cli.console import ConsoleReport

    given = {name: value for name, value in options.items() if value is not None}
    with exit_codes(), ConsoleReport() as report:
        # Those of the run, and kinds of drafts that plugins add.
        plugins = load_all_plugins(ctx)

        def load_pipeline(text: str, base: Path) -> Any:
            from flowdflash.config.check import load_text

            return load_text(text, plugins, base)

        result = evaluate_checkpoint(checkpoint, load_pipeline, report, given)
    click.echo(evaluation_text(result, style))
