"""``flowdflash eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from flowdflash.cli.common import exit_codes, load_all_plugins


@click.command("eval")
@click.argument("run_or_checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--prompts",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Chat rows; default: those of the run's pipeline.",
)
@click.option("--num-prompts", type=click.IntRange(1), help="How many prompts to decode.")
@click.option("--max-new-tokens", type=click.IntRange(1), help="Most tokens generated per prompt.")
@click.option("--format", "style", type=click.Choice(["text", "json"]), default="text")
@click.pass_context
def command(
    ctx: click.Context,
    run_or_checkpoint: Path,
    prompts: Path | None,
    num_prompts: int | None,
    max_new_tokens: int | None,
    style: str,
) -> None:
    """Measure the acceptance length of a run's newest checkpoint, or of one named, by real speculative decoding."""
    from flowdflash.cli.checkpoint_eval import evaluate_checkpoint, evaluation_text
    from flowdflash.cli.console import ConsoleReport

    def load_pipeline(text: str, base: Path) -> Any:
        from flowdflash.config.check import load_text

        return load_text(text, load_all_plugins(ctx), base)

    with exit_codes(), ConsoleReport() as report:
        result = evaluate_checkpoint(
            run_or_checkpoint,
            load_pipeline,
            report,
            prompts=prompts,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
        )
    click.echo(evaluation_text(result, style))
