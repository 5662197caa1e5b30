"""The figures of a planned epoch: per bucket, and of the order as a whole. Plain values, ready for JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowdflash.items import BatchTable, FloatArray, IntArray
from flowdflash.runtime.draft_shape import DraftShape
from flowdflash.runtime.order_metrics import measure, noise_ratio, tail_share
from flowdflash.runtime.plan_compare import StrategyPlan

WINDOWS = (4, 8, 16, 32)
"""Window sizes that the noise ratio is given for, besides that of the pipeline."""

LEAST_WINDOWS = 4
"""Fewer windows have no variance worth the name."""

OF_BUCKETS = (
    "longest_run",
    "equal_neighbours",
    "prefix_discrepancy",
    "window_distinct",
    "window_distinct_min",
    "window_kl",
    "window_kl_max",
    "homogeneous_windows",
    "tail_gap",
)
"""Figures that say nothing of batches without buckets."""


def figures(plan: StrategyPlan, window: int, shape: DraftShape | None) -> dict[str, Any]:
    """Everything that can be said of one strategy."""
    table, order = plan.table, plan.order
    told = measure(table, order, window).as_dict()
    has_buckets = bool((table.bucket >= 0).any())
    told |= {} if has_buckets else dict.fromkeys(OF_BUCKETS)
    samples, dropped = len(table.members), sum(plan.dropped.values())
    padded, real = int(table.padded_tokens.sum()), int(table.tokens.sum())
    per_step = per_window(table.tokens[order], window)
    result = {
        "bucketer": plan.bucketer,
        "interleaver": plan.interleaver or None,
        "steps": len(per_step),
        **told,
        "noise_ratio_by_window": {
            str(k): noise_ratio(table.mean_length[order], k) if len(order) >= LEAST_WINDOWS * k else None
            for k in WINDOWS
        },
        "fill": real / (len(table) * plan.token_budget) if plan.token_budget and len(table) else None,
        "samples": samples,
        "tokens": real,
        "padded_tokens": padded,
        "coverage": samples / (samples + dropped) if samples + dropped else 1.0,
        "dropped": dict(plan.dropped),
        "tokens_per_step": spread(per_step),
        "terms_per_step": None,
        "terms_cv": None,
        "tail_share": {str(k): v for k, v in tail_share(table.bucket[order]).items()} if has_buckets else None,
        "plan_batches_per_s": len(table) / plan.secs if plan.secs else None,
        "plan_secs": plan.secs,
    }
    terms = None
    if shape is not None:
        terms = shape.terms(table)
        result["terms_per_step"] = spread(per_window(terms[order], window))
        result["terms_cv"] = _variation(terms[order], window)
    result["buckets"] = bucket_rows(table, terms)
    shares = [row["batch_share"] for row in result["buckets"]]
    result["largest_batch_share"] = max(shares) if has_buckets else None
    return result


def bucket_rows(table: BatchTable, terms: FloatArray | None = None) -> list[dict[str, Any]]:
    """One row per bucket."""
    rows = []
    samples, tokens = len(table.members), int(table.tokens.sum())
    for bucket in np.unique(table.bucket).tolist():
        of = table.bucket == bucket
        held, real, padded = (int(c[of].sum()) for c in (table.sizes, table.tokens, table.padded_tokens))
        row = {
            "bucket": bucket,
            "samples": held,
            "sample_share": held / samples,
            "batches": int(of.sum()),
            "batch_share": int(of.sum()) / len(table),
            "tokens": real,
            "token_share": real / tokens,
            "padding_waste": 1 - real / padded,
            "min_length": int(table.min_length[of].min()),
            "mean_length": real / held,
            "max_length": int(table.max_length[of].max()),
            "samples_per_batch": held / int(of.sum()),
        }
        if terms is not None:
            row["terms_per_batch"] = float(terms[of].mean())
            row["term_share"] = float(terms[of].sum() / terms.sum()) if terms.sum() else 0.0
        rows.append(row)
    return rows


def per_window(values: IntArray | FloatArray, window: int) -> FloatArray:
    """``[W]`` sum over each window, the incomplete one at the end included: it is a step too."""
    if not len(values):
        return np.zeros(0)
    return np.asarray(np.add.reduceat(values, np.arange(0, len(values), window)), dtype=np.float64)


def spread(values: FloatArray) -> dict[str, float]:
    """Mean, least and most."""
    if not len(values):
        return {"mean": 0.0, "min": 0.0, "max": 0.0}
    return {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}


def _variation(values: FloatArray, window: int) -> float:
    """Standard deviation over whole windows of their sums, divided by the mean."""
    sums = per_window(values[: len(values) // window * window], window)
    return float(sums.std() / sums.mean()) if len(sums) and sums.mean() > 0 else 0.0
