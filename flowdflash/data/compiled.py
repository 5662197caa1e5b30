"""Templates as transformers compiles and keeps them; without its function for that, nothing is done or known."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


def _compiled(template: str) -> Any | None:
    from transformers.utils import chat_template_utils

    compiler = getattr(chat_template_utils, "_compile_jinja_template", None)
    return None if compiler is None else compiler(template)


def prepare(template: str) -> None:
    """Put the globals of a template into one dict.

    They lie in two, one behind the other, and jinja2 copies them for each rendering, key by key: half of its time.
    """
    from jinja2 import TemplateError

    with suppress(TemplateError):  # it will be told of each row
        if (compiled := _compiled(template)) is not None:
            compiled.globals = dict(compiled.globals)


def variables(template: str) -> set[str] | None:
    """Names that a template reads and does not set itself; None where there is no telling."""
    from jinja2 import TemplateError, meta

    with suppress(TemplateError):
        if (compiled := _compiled(template)) is not None:
            return set(meta.find_undeclared_variables(compiled.environment.parse(template)))
    return None
