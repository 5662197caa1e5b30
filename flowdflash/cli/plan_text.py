"""A plan as text: buckets, the figures of each strategy side by side, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowdflash.cli.report_text import table

Figures = Mapping[str, Any]

NONE = "–"


def text(report: Figures) -> str:
    """The whole report."""
    run, chosen = report["run"], report["strategies"][report["chosen"]]
    lines = [headline(report), ""]
    lines += [f"{report['chosen']}, per epoch:", bucket_table(chosen["buckets"])]
    if finding := skew_sentence(chosen["buckets"]):
        lines += ["", finding]
    lines += ["", figure_table(report["strategies"], report["window"])]
    lines += [f"dropped: {count:,} samples ({reason})" for reason, count in chosen["dropped"].items()]
    lines += ["", *memory_lines(report["memory"])]
    if run["epochs"] > 1:
        lines.append(f"run: {run['epochs']} epochs, {run['batches']:,} batches, {run['steps']:,} optimizer steps")
    return "\n".join(lines).rstrip()


def headline(report: Figures) -> str:
    """What an epoch is made of."""
    own = report["strategies"][report["chosen"]]
    return (
        f"{report['name']}: {own['samples']:,} samples, {own['tokens']:,} tokens in {own['batches']:,} batches, "
        f"{own['steps']:,} optimizer steps of {report['window']} batches an epoch"
    )


def skew_sentence(rows: Sequence[Figures]) -> str:
    """Which bucket makes far more of the batches than it has samples; empty if none does."""
    worst = max(rows, key=lambda row: row["batch_share"], default=None)
    if worst is None or worst["batch_share"] < 1 / 3 or worst["batch_share"] < 1.5 * worst["sample_share"]:
        return ""
    return (
        f"bucket {worst['bucket']} has {worst['sample_share']:.1%} of the samples "
        f"and makes {worst['batch_share']:.1%} of the batches"
    )


def bucket_table(rows: Sequence[Figures]) -> str:
    """One row per bucket."""
    with_terms = all("term_share" in row for row in rows)
    head = ("bucket", "lengths", "mean", "samples", "share", "batches", "share", "samples/batch", "tokens", "share")
    body = []
    for row in rows:
        cells = [
            row["bucket"] if row["bucket"] >= 0 else "all",
            f"{row['min_length']}–{row['max_length']}",
            f"{row['mean_length']:.0f}",
            f"{row['samples']:,}",
            f"{row['sample_share']:.1%}",
            f"{row['batches']:,}",
            f"{row['batch_share']:.1%}",
            f"{row['samples_per_batch']:.1f}",
            f"{row['tokens']:,}",
            f"{row['token_share']:.1%}",
            f"{row['padding_waste']:.1%}",
        ]
        body.append([*cells, f"{row['term_share']:.1%}"] if with_terms else cells)
    return table([*head, "padding", *(["loss terms"] if with_terms else [])], body)


def figure_rows(strategies: Mapping[str, Figures], window: int) -> list[tuple[str, list[str]]]:
    """A label and one cell per strategy for each figure."""
    every = list(strategies.values())

    def row(label: str, key: str, style: str) -> tuple[str, list[str]]:
        return label, [_cell(figures[key], style) for figures in every]

    def pair(label: str, first: str, second: str, style: str, other: str) -> tuple[str, list[str]]:
        return label, [
            NONE if f[first] is None else f"{_cell(f[first], style)} ({_cell(f[second], other)})" for f in every
        ]

    sizes = sorted({window, *(int(k) for f in every for k in f["noise_ratio_by_window"])})
    noise = [(f"noise ratio, windows of {k}", [_noise(f, k, window) for f in every]) for k in sizes]
    rows = [
        row("batches", "batches", ",d"),
        row("optimizer steps", "steps", ",d"),
        row("padding waste", "padding_waste", ".1%"),
        row("throughput, padded tokens at equal speed", "throughput_gain", "+.1%"),
        row("fill of the budget", "fill", ".1%"),
        row("largest bucket's share of batches", "largest_batch_share", ".1%"),
        row("longest run of one bucket", "longest_run", ",d"),
        row("equal neighbours", "equal_neighbours", ".1%"),
        row("prefix discrepancy, batches", "prefix_discrepancy", ".2f"),
        pair("buckets per window (least)", "window_distinct", "window_distinct_min", ".2f", "d"),
        pair("window mix from the epoch's, bits (most)", "window_kl", "window_kl_max", ".2f", ".2f"),
        row("windows of one bucket", "homogeneous_windows", ".2%"),
        *noise,
        row("window spread", "window_spread", ".3f"),
        row("tokens per step", "tokens_per_step", ",.0f"),
        row("tokens per step, variation", "tokens_cv", ".1%"),
        row("loss terms per step", "terms_per_step", ",.0f"),
        row("loss terms per step, variation", "terms_cv", ".1%"),
        row("neighbours' lengths, correlation", "adjacent_length_corr", ".2f"),
        row("mix of the last twentieth, off by", "tail_gap", ".1%"),
        row("samples in batches", "coverage", ".1%"),
        row("planned in, seconds", "plan_secs", ".2f"),
    ]
    return [(label, cells) for label, cells in rows if set(cells) != {NONE}]


def figure_table(strategies: Mapping[str, Figures], window: int) -> str:
    """The figures of each strategy in a column."""
    orders = ["interleaver", *(f["interleaver"] or "none" for f in strategies.values())]
    rows = [[label, *cells] for label, cells in figure_rows(strategies, window)]
    return table(["bucketer", *(f["bucketer"] for f in strategies.values())], [orders, *rows])


def _noise(figures: Figures, size: int, window: int) -> str:
    value = figures["noise_ratio"] if size == window else figures["noise_ratio_by_window"][str(size)]
    return _cell(value, ".2f")


def _cell(value: Any, style: str) -> str:
    if value is None:
        return NONE
    shown = format(value["mean"] if isinstance(value, Mapping) else value, style)
    return shown.removeprefix("-") if not shown.strip("-0.%") else shown


def memory_lines(memory: Figures) -> list[str]:
    """Features, edges, checkpoints and the peak of host memory."""
    lines = []
    if host := memory.get("host"):
        parts = ", ".join(f"{name} {size(held)}" for name, held in host.items())
        lines.append(f"host memory on a CPU: about {size(sum(host.values()))} at the peak ({parts})")
    features = memory["features"]
    if features:
        unsure = " (twice that in float32; dtype is auto)" if features["dtype_assumed"] else ""
        lines.append(
            f"features: {size(features['bytes_per_token'])} per token in {features['dtype']}{unsure}, "
            f"{size(features['mean_batch_bytes'])} per batch, at most {size(features['largest_batch_bytes'])}; "
            f"{size(features['epoch_bytes'])} per epoch if kept"
        )
    elif any(edge["most_bytes"] is None for edge in memory["edges"]):
        lines.append("features: unknown until the target is opened")
    for edge in memory["edges"]:
        most = "unknown" if edge["most_bytes"] is None else f"at most {size(edge['most_bytes'])}"
        lines.append(f"edge {edge['edge']}: {edge['capacity']} batches, {most} waiting")
    for sink in memory["checkpoints"]:
        verdict = "" if sink["fits"] else "; THAT DOES NOT FIT"
        lines.append(
            f"checkpoints of {sink['sink']}: {size(sink['checkpoint_bytes'])} × {sink['checkpoints']} = "
            f"{size(sink['total_bytes'])}, {size(sink['free_bytes'])} free{verdict}"
        )
    return lines


def size(count: float) -> str:
    """A number of bytes for a person."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
