"""``flowdflash show``."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flowdflash.cli.common import SET, exit_codes, load_pipeline

if TYPE_CHECKING:
    from flowdflash.data.encode import RowResult
    from flowdflash.render.sample import Shown
    from flowdflash.stage import OpenContext, Source

LEGEND = "bold green or ⟦brackets⟧: supervised, what the draft learns to write; grey or bare: given"


@click.command("show")
@click.argument("file", type=click.Path(path_type=Path))
@SET
@click.option("--row", type=click.IntRange(1), default=1, show_default=True, help="Which row, counted from 1.")
@click.option("--source", "name", metavar="STAGE", help="Which source of a pipeline that has several.")
@click.option("--tokenizer", metavar="MODEL", help="Whose tokenizer and chat template, for a bare data file.")
@click.option("--html", is_flag=True, help="Write a page that needs nothing else, for sharing.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="File to write; default: standard output.")
@click.pass_context
def command(
    ctx: click.Context,
    file: Path,
    overrides: tuple[str, ...],
    row: int,
    name: str | None,
    tokenizer: str | None,
    html: bool,
    output: Path | None,
) -> None:
    """Show one row of a data file as the draft sees it: its tokens and its loss mask.

    A bare file is read as a source reads it with the options it has by default, and with SmolLM2-135M-Instruct's
    tokenizer and chat template unless another is named.
    """
    from flowdflash.cache import cache_dir
    from flowdflash.cli.console import ConsoleReport
    from flowdflash.render.sample import page, text, visible
    from flowdflash.stage import OpenContext

    with exit_codes(), ConsoleReport() as report, tempfile.TemporaryDirectory() as folder:
        if file.suffix in (".yaml", ".yml"):
            source, ref = _of_pipeline(ctx, file, overrides, name, tokenizer)
        elif overrides or name:
            raise click.UsageError("--set and --source are for a pipeline (*.yaml)")
        else:
            source, ref = _of_file(file, tokenizer)
        shown = show(source, row, ref, OpenContext("show", Path(folder), cache_dir(), report=report))
    coloured = output is None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    told = page(shown, f"{file}, row {row}") if html else text(shown, coloured=coloured) + "\n"
    if output is None:
        click.echo(told, nl=False)
    else:
        try:
            output.write_text(told, encoding="utf-8")
        except OSError as error:
            raise click.FileError(visible(str(output)), error.strerror) from error
    if not html and any(one.spans for one in shown):
        click.echo(LEGEND, err=True)


def _of_pipeline(
    ctx: click.Context, file: Path, overrides: tuple[str, ...], name: str | None, tokenizer: str | None
) -> tuple[Source, str]:
    graph = load_pipeline(ctx, file, overrides)[0].graph
    nodes = {node.name: node for node in graph.of_kind("source")}
    if name is None and len(nodes) > 1:
        raise click.UsageError(f"the pipeline has several sources: --source {' or '.join(nodes)}")
    node = nodes.get(name or next(iter(nodes), ""))
    if node is None:
        raise click.UsageError(f"the pipeline has no source {name!r}; it has {', '.join(nodes)}")
    known = graph.returned.get(node.name, {}).get("tokenizer", "")
    if known and tokenizer:
        raise click.UsageError(f"the pipeline names a tokenizer, {known}; change it there or with --set")
    if not known and not tokenizer:
        raise click.UsageError(f"{node.name} does not say whose tokens it has; name the model: --tokenizer MODEL")
    stage: Any = node.cls(node.config)
    return stage, str(known or tokenizer)


def _of_file(path: Path, tokenizer: str | None) -> tuple[Source, str]:
    """The source that reads a file: told by its first bytes and its first row, not by its name."""
    from flowdflash.data.arrow import is_parquet
    from flowdflash.data.rows import read_jsonl
    from flowdflash.stages.chat_jsonl import ChatJsonl
    from flowdflash.stages.chat_parquet import ChatParquet
    from flowdflash.stages.tokens import Tokens
    from flowdflash.target.catalogue import FETCHED

    kind: Any = ChatParquet if is_parquet(path) else ChatJsonl
    first = next(iter(read_jsonl(path, limit=1)), None) if kind is ChatJsonl else None
    if first is not None and isinstance(first.value, dict) and "input_ids" in first.value:
        kind = Tokens
    options = {"path": path, "tokenizer": tokenizer or FETCHED[0]}
    config = kind.Config.model_validate(options, context={"base": Path()})
    return kind(config), config.tokenizer


def show(source: Source, row: int, ref: str, ctx: OpenContext) -> list[Shown]:
    """What becomes of a row, or what a sample is where a source has no rows of its own.

    Raises:
        DataInvalid: there is no such row.
    """
    from flowdflash.data.stored import StoredSource
    from flowdflash.render.sample import Shown, spans
    from flowdflash.target.load import load_tokenizer

    place, result = source.preview(row, ctx) if isinstance(source, StoredSource) else _sample(source, row, ctx)
    shown = []
    for rejection in result.rejections:
        turn = f"turn {rejection.turn + 1} " if rejection.turn >= 0 else ""
        shown.append(Shown(f"{place}: {turn}rejected: {rejection}"))
    tokenizer = load_tokenizer(ref, ctx.cache_dir, ctx.report) if result.samples else None
    for number, sample in enumerate(result.samples, 1):
        of = f", sample {number} of {len(result.samples)}" if len(result.samples) > 1 else ""
        cut = "cut to max_length" if sample.truncated else "not cut"
        supervised = f"{int(sample.mask.sum())} supervised ({sample.mask.mean():.1%})"
        account = f"{place}{of}: {len(sample.ids)} tokens, {supervised}, {cut}"
        shown.append(Shown(account, tuple(spans(sample.ids.astype("int64"), sample.mask, tokenizer))))
    return shown or [Shown(f"{place}: in the other part of the split")]


def _sample(source: Source, number: int, ctx: OpenContext) -> tuple[str, RowResult]:
    """The number-th sample of the first epoch."""
    from flowdflash.data.encode import RowResult, Sample
    from flowdflash.errors import DataInvalid

    source.open(ctx)
    try:
        table = next(iter(source.epochs()), None)
        if table is None or number > len(table):
            raise DataInvalid(f"there is no sample {number}: the source gives {0 if table is None else len(table)}")
        sample = int(table.ids[number - 1])
        ids, mask = source.tokens(sample)
        return source.describe(sample), RowResult((Sample(ids.astype("int32"), mask),))
    finally:
        source.close()
