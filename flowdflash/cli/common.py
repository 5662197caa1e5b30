"""What the commands share: plugins, loading a pipeline, errors to exit codes."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flowdflash.secrets import hidden

if TYPE_CHECKING:
    from flowdflash.config.check import Pipeline
    from flowdflash.plugin.loader import Plugins

FAILED, INVALID = 1, 78

FILE = click.argument("file", type=click.Path(path_type=Path))
SET = click.option(
    "--set", "overrides", multiple=True, metavar="A.B=C", help="Set one value of the pipeline; may be repeated."
)
STRICT = click.option("--strict", is_flag=True, help="Take warnings for errors.")


def say(text: str, *, err: bool = False) -> None:
    """Print what may repeat the words of a stage, a plugin or a server; secrets are left out."""
    click.echo(hidden(text), err=err)


def load_all_plugins(ctx: click.Context) -> Plugins:
    """Built-in stages, installed plugins and those of ``--plugins-dir``; what is wrong with one goes to stderr."""
    from flowdflash import stages
    from flowdflash.plugin.loader import load_plugins

    plugins = load_plugins(
        builtin=[stages], plugins_dir=ctx.find_root().obj["plugins_dir"], disabled=ctx.find_root().obj["disabled"]
    )
    for warning in plugins.warnings:
        say(f"warning: plugin {warning}", err=True)
    return plugins


def load_pipeline(
    ctx: click.Context, file: Path, overrides: tuple[str, ...] = (), strict: bool = False
) -> tuple[Pipeline, Plugins]:
    """Read and check a pipeline file; warnings go to stderr."""
    from flowdflash.config.check import load
    from flowdflash.config.problems import as_text

    plugins = load_all_plugins(ctx)
    pipeline = load(file, plugins, overrides=overrides, strict=strict)
    if pipeline.warnings:
        say(as_text(pipeline.warnings), err=True)
    return pipeline, plugins


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn the library's errors into a text on stderr and an exit code."""
    from flowdflash.errors import FlowdflashError, PipelineInvalid, PluginBroken, StageFailed

    try:
        yield
    except PipelineInvalid as error:
        from flowdflash.config.problems import as_text

        say(as_text(error.problems), err=True)
        sys.exit(INVALID)
    except PluginBroken as error:
        say(f"error: {error}", err=True)
        sys.exit(INVALID)
    except StageFailed as error:
        if isinstance(error.cause, KeyboardInterrupt):  # Ctrl-C in the midst of a stage's own work is no fault of it
            raise KeyboardInterrupt from None
        _tell_failure(error)
        sys.exit(FAILED)
    except FlowdflashError as error:
        say(f"error: {error}", err=True)
        sys.exit(FAILED)
    except OSError as error:
        if not (advice := _advice(error)):
            raise
        say(f"error: {error}; {advice}", err=True)
        sys.exit(FAILED)


def _advice(error: BaseException) -> str:
    """What a person can do about an error of the machine; nothing for other errors, which need their traceback."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "make room, or move the cache (FLOWDFLASH_CACHE_DIR) or the run folder (--run-dir)"
    if number == errno.EFBIG:
        return "files may not grow so large here (ulimit -f); move the cache (FLOWDFLASH_CACHE_DIR) or the run folder"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR) and getattr(error, "filename", None):
        return "see who may read and write there, or name another folder: FLOWDFLASH_CACHE_DIR, --run-dir"
    return ""


def _tell_failure(error: Any) -> None:
    from flowdflash.errors import FlowdflashError

    # An error that we raise on purpose says all there is to say; anything else needs its traceback.
    advice = _advice(error.cause)
    if not (isinstance(error.cause, FlowdflashError) or advice):
        say(error.original_traceback().rstrip("\n"), err=True)
    say(f"error: {error}" + (f"; {advice}" if advice else ""), err=True)
    for later in error.later:
        say(f"  then: {later}", err=True)
    for note in getattr(error, "__notes__", ()):
        say(note, err=True)
