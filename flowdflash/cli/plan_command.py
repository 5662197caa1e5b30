"""``flowdflash plan``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flowdflash.cli.common import FILE, SET, exit_codes, load_pipeline

if TYPE_CHECKING:
    from flowdflash.config.check import Pipeline
    from flowdflash.plugin.registry import Registry
    from flowdflash.runtime.plan_compare import StrategyPlan
    from flowdflash.stage import Report


@click.command("plan")
@FILE
@SET
@click.option(
    "--compare",
    metavar="A,B,...",
    default="",
    help="Also plan with these interleavers or bucketers, or with both at once: bucketer+interleaver.",
)
@click.option(
    "--format", "style", type=click.Choice(["text", "json", "html"]), default="text", help="How the plan is written."
)
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write a page with plots to this file."
)
@click.pass_context
def command(
    ctx: click.Context, file: Path, overrides: tuple[str, ...], compare: str, style: str, html: Path | None
) -> None:
    """Show what an epoch will look like, and strategies side by side. Reads the data; touches no model."""
    from flowdflash.cli.console import ConsoleReport
    from flowdflash.cli.plan_text import text

    names = [name.strip() for name in compare.split(",") if name.strip()]
    with exit_codes():
        pipeline, plugins = load_pipeline(ctx, file, overrides)
        with ConsoleReport() as report:
            told, drawn = plan_report(pipeline, names, plugins.registry, report)
    page = _page(told, drawn) if html is not None or style == "html" else ""
    if html is not None:
        try:
            html.write_text(page, encoding="utf-8")
        except OSError as error:
            raise click.FileError(str(html), error.strerror) from error
    click.echo(page if style == "html" else json.dumps(told, indent=1) if style == "json" else text(told), nl=True)


def plan_report(
    pipeline: Pipeline, compare: Sequence[str], registry: Registry, report: Report
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All figures of the pipeline's plan and of the strategies to compare, and what a page draws of them."""
    from dataclasses import asdict

    from flowdflash.cache import cache_dir
    from flowdflash.cli.host_memory import host_memory
    from flowdflash.cli.strategies import strategies
    from flowdflash.runtime.draft_shape import DraftShape
    from flowdflash.runtime.plan import plan_window
    from flowdflash.runtime.plan_compare import plan_strategies
    from flowdflash.runtime.plan_figures import figures
    from flowdflash.runtime.plan_memory import memory

    graph = pipeline.graph
    graphs = strategies(graph, compare, registry)
    with tempfile.TemporaryDirectory() as folder:
        plans, totals = plan_strategies(
            graphs, pipeline.seed, run_dir=Path(folder), cache_dir=cache_dir(), report=report
        )
    own, window, shape = plans[0], plan_window(graph), DraftShape.of(graph)
    by_name = {plan.name: figures(plan, window, shape) for plan in plans}
    for of in by_name.values():
        # At the same padded tokens per second: what is not wasted on padding is spent on samples.
        of["throughput_gain"] = (1 - of["padding_waste"]) / (1 - by_name[own.name]["padding_waste"]) - 1
    held = memory(graph, own.table, pipeline.ordering, Path("runs").resolve())
    told = {
        "name": pipeline.name,
        "file": str(pipeline.path),
        "seed": pipeline.seed,
        "window": window,
        "chosen": own.name,
        "run": asdict(totals),
        "strategies": by_name,
        "memory": {**held, "host": host_memory(graph, own.table, held)},
    }
    return told, _drawn(plans)


def _drawn(plans: Sequence[StrategyPlan]) -> dict[str, Any]:
    from flowdflash.runtime.plan_series import histogram, length_classes, series

    own = plans[0].table
    classes = length_classes(own)
    return {
        "classes": classes,
        "histogram": histogram(own.samples.lengths),
        "series": {plan.name: series(plan, classes) for plan in plans},
    }


def _page(told: dict[str, Any], drawn: dict[str, Any]) -> str:
    from flowdflash.cli.plan_text import figure_rows, headline, memory_lines, skew_sentence
    from flowdflash.render.plan_page import page

    own = told["strategies"][told["chosen"]]
    rows = figure_rows(told["strategies"], told["window"])
    return page(
        told,
        drawn,
        headline=headline(told),
        finding=skew_sentence(own["buckets"]),
        rows=rows,
        notes=memory_lines(told["memory"]),
    )
