"""Evaluation of a draft that lies on disk: what ``flowdflash eval`` does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flowdflash.cache import cache_dir
from flowdflash.cli.report_text import evaluation_lines
from flowdflash.errors import FlowdflashError, ModelInvalid
from flowdflash.items import Checkpoint
from flowdflash.stage import Check, OpenContext, Report
from flowdflash.stages.acceptance import AcceptanceSink


@dataclass(frozen=True)
class _Setting:
    """How a draft is evaluated where nothing else is said: as its run's pipeline does it."""

    stage: str = AcceptanceSink.type
    options: Mapping[str, Any] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


def evaluate_checkpoint(
    path: Path, load_pipeline: Callable[[str, Path], Any], report: Report, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Measure one draft with the evaluator of its run's pipeline, or with the options alone.

    Args:
        path: folder of a run (its newest checkpoint), of a checkpoint, or of an exported draft.
        load_pipeline: checks a pipeline, given its text and the folder that its paths start from.
        report: told about progress.
        options: of the evaluator, instead of the pipeline's.

    Raises:
        FlowdflashError: there is no draft, or it is not known on which prompts or with which target to evaluate it.
    """
    from flowdflash.dflash.decode import finish
    from flowdflash.dflash.export import load_zlab, zlab_config
    from flowdflash.dflash.importing import check_borrowed, find_draft, load_draft, read_provenance
    from flowdflash.target.load import load_embedding_and_head

    folder = find_draft(path.resolve())
    origin = read_provenance(folder)
    imported = None
    run_dir = folder.parent.parent.parent
    if folder.name == "draft" and (run_dir / "run.json").is_file():
        setting, step = _setting_of(run_dir, load_pipeline), int(_entry(folder.parent / "checkpoint.json", "step"))
        config, draft = load_zlab(folder)
        tensors: Mapping[str, Any] = draft.state_dict()
    else:
        imported = load_draft(folder)
        setting, step = _Setting(), int(origin.get("step", 0))
        config, tensors = imported.config, imported.tensors
    sink = _evaluator(setting, origin, options, folder, report)
    ctx = OpenContext(setting.stage, folder, cache_dir(), seed=setting.seed, facts=setting.facts, report=report)
    try:
        sink.open(ctx)
        if imported is not None and imported.borrowed:
            matrices = load_embedding_and_head(sink.ref, cache_dir(), report)
            check_borrowed(imported, matrices.embed, matrices.head)
        measuring = sink.measure(Checkpoint(step, 0, "final", zlab_config(config), tensors, {}, {}))
        result = finish(measuring, lambda at: report.progress(at[0], at[1], len(sink.prompts)))
        return {"checkpoint": str(folder), **result.as_dict()}
    finally:
        sink.close()


def _setting_of(run_dir: Path, load_pipeline: Callable[[str, Path], Any]) -> _Setting:
    pipeline = load_pipeline(_text(run_dir / "pipeline.yaml"), Path(_entry(run_dir / "run.json", "pipeline_folder")))
    nodes = pipeline.graph.nodes.values()
    for node in nodes:
        if issubclass(node.cls, AcceptanceSink):
            return _Setting(node.name, node.config.model_dump(exclude_unset=True), node.facts, pipeline.seed)
    facts: Mapping[str, Any] = next((node.facts for node in nodes if node.kind == "drafter"), {})
    return _Setting(facts=facts, seed=pipeline.seed)


def _evaluator(
    setting: _Setting, origin: Mapping[str, Any], options: Mapping[str, Any], folder: Path, report: Report
) -> AcceptanceSink:
    given = {**(setting.options or {}), **options}
    if options.get("temperature") == 0:
        given = {name: value for name, value in given.items() if name in options or name not in ("top_p", "top_k")}
    if setting.options is None and "prompts" not in given:
        raise FlowdflashError(f"no pipeline says on which prompts to evaluate {folder}: name a file (--prompts)")
    if "prompts" in options and "num_prompts" not in options:
        given["num_prompts"] = 0
    if "model" not in given and "model" not in setting.facts and origin.get("target"):
        given["model"] = origin["target"]
    try:
        sink = AcceptanceSink(AcceptanceSink.Config.model_validate(given))
    except ValidationError as error:
        raise FlowdflashError(
            "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        ) from None
    check = Check(setting.stage, setting.facts)
    sink.check(check)
    told = [(p.severity, f"{p.path}: {p.message}" + (f" ({p.hint})" if p.hint else "")) for p in check.problems]
    if wrong := [text for severity, text in told if severity == "error"]:
        raise FlowdflashError("; ".join(wrong))
    for _, text in told:
        report.warn(text)
    return sink


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
