"""Evaluation of a finished run's checkpoint: what ``flowdflash eval`` does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowdflash.cache import cache_dir
from flowdflash.cli.report_text import evaluation_lines
from flowdflash.errors import FlowdflashError, ModelInvalid
from flowdflash.items import Checkpoint
from flowdflash.stage import OpenContext, Report
from flowdflash.stages.acceptance import AcceptanceSink


def find_checkpoint(path: Path) -> Path:
    """A checkpoint's folder, given a run's folder (its newest complete checkpoint) or the checkpoint itself.

    Raises:
        ModelInvalid: there is none.
    """
    if (path / "draft" / "config.json").is_file():
        return path
    latest = path / "checkpoints" / "latest"
    if not latest.is_file():
        raise ModelInvalid(f"{path} is neither a checkpoint nor a run with one (no checkpoints/latest)")
    newest = path / "checkpoints" / latest.read_text(encoding="utf-8").strip()
    if not (newest / "draft" / "config.json").is_file():
        raise ModelInvalid(f"{latest} names {newest.name!r}, which is not there; name another checkpoint of {path}")
    return newest


def evaluate_checkpoint(
    path: Path,
    load_pipeline: Callable[[str, Path], Any],
    report: Report,
    *,
    prompts: Path | None = None,
    num_prompts: int | None = None,
    max_new_tokens: int | None = None,
) -> dict[str, Any]:
    """Measure one checkpoint with the evaluator of its run's pipeline.

    Args:
        path: folder of a run or of a checkpoint inside one.
        load_pipeline: checks a pipeline, given its text and the folder that its paths start from.
        report: told about progress.
        prompts, num_prompts, max_new_tokens: instead of the pipeline's.

    Raises:
        FlowdflashError: there is no checkpoint, or the run's pipeline has no evaluator.
    """
    from flowdflash.dflash.export import load_zlab, zlab_config

    folder = find_checkpoint(path.resolve())
    run_dir = folder.parent.parent
    base = Path(_entry(run_dir / "run.json", "pipeline_folder"))
    pipeline = load_pipeline(_text(run_dir / "pipeline.yaml"), base)
    nodes = [n for n in pipeline.graph.nodes.values() if issubclass(n.cls, AcceptanceSink)]
    if not nodes:
        raise FlowdflashError(f"the pipeline of {run_dir} has no sink of type {AcceptanceSink.type} to evaluate with")
    given = {"prompts": prompts and prompts.resolve(), "num_prompts": num_prompts, "max_new_tokens": max_new_tokens}
    config = nodes[0].config.model_copy(update={k: v for k, v in given.items() if v is not None})
    draft_config, draft = load_zlab(folder / "draft")
    step = int(_entry(folder / "checkpoint.json", "step"))
    checkpoint = Checkpoint(step, 0, "final", zlab_config(draft_config), draft.state_dict(), {}, {})
    sink = AcceptanceSink(config)
    ctx = OpenContext(nodes[0].name, run_dir, cache_dir(), seed=pipeline.seed, facts=nodes[0].facts, report=report)
    try:
        sink.open(ctx)
        return {"checkpoint": str(folder), **sink.measure(checkpoint).as_dict()}
    finally:
        sink.close()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        hint = "a checkpoint is evaluated where its run has left it, by the pipeline of that run"
        raise ModelInvalid(f"{path} cannot be read: {error} ({hint})") from error


def _entry(path: Path, name: str) -> str:
    try:
        return str(json.loads(_text(path))[name])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelInvalid(f"{path} has no {name}: it was not written by flowdflash, or is damaged") from error


def evaluation_text(result: dict[str, Any], style: str) -> str:
    """The result for a person or for a program."""
    if style == "json":
        return json.dumps(result)
    return "\n".join([f"checkpoint: {result['checkpoint']}", *evaluation_lines("acceptance", result)])
