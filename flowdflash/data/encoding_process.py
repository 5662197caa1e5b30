"""A process of our own that encodes rows for this one, so that Python code runs on more than one core.

The child speaks pickle over its standard input and output: first the paths to import from, then the encoder, then one
chunk of rows after the other. It ends with its input, so also when this process is killed.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from flowdflash.data.packed import Packed
from flowdflash.data.rows import Row

CHILD = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from flowdflash.data.encoding_process import serve
serve()
"""
ONE_CORE = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true", "OMP_NUM_THREADS": "1"}
AHEAD = 2
"""Threads that may use a process at a time: one sends rows while the child is at work on those of the other."""
Encode = Callable[[Sequence[Row]], Packed]


class ProcessGone(Exception):
    """The process ended, or could not begin; says what it wrote last."""


class CannotSend(Exception):
    """Rows that cannot be pickled, as those that are nested deeply."""


class EncodingProcess:
    """A child process with a copy of an encoder, which uses one core. ``AHEAD`` threads may call it at a time.

    Raises:
        ProcessGone: it could not begin.
    """

    def __init__(self) -> None:
        self._sending, self._taking = threading.Lock(), threading.Lock()
        try:
            self._told = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
            self._process = subprocess.Popen(
                [sys.executable, "-c", CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._told,
                env={**os.environ, **ONE_CORE},
            )
        except OSError as error:
            raise ProcessGone(str(error)) from error

    def begin(self, encode: bytes) -> None:
        """Hand over what gives the results of rows, pickled, and wait until the child is ready: a second or two.

        Raises:
            ProcessGone: it ended instead.
        """
        self._exchange(pickle.dumps(sys.path), encode)

    def encode(self, rows: Sequence[Row]) -> Packed:
        """What the encoder makes of the rows. What it raises is raised here.

        Raises:
            ProcessGone: the child ended.
            CannotSend: nothing was sent.
        """
        try:
            pickled = pickle.dumps(rows, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # whatever a value in the rows finds wrong
            raise CannotSend(str(error)) from error
        packed, raised = self._exchange(pickled)
        if raised is not None:
            raise raised
        return packed  # type: ignore[no-any-return]

    def _exchange(self, *values: bytes) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            with self._sending:
                for value in values:
                    self._process.stdin.write(value)
                self._process.stdin.flush()
                self._taking.acquire()  # answers come in the order of the questions
            try:
                return pickle.load(self._process.stdout)
            finally:
                self._taking.release()
        except Exception as error:  # of the pipe, or of what came out of it
            raise ProcessGone(self._last_words() or str(error)) from error

    def _last_words(self) -> str:
        try:
            code = self._process.wait(timeout=5)
            self._told.seek(0)
            lines = self._told.read().decode(errors="replace").strip().splitlines()
            ended = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with {code}"
        except (subprocess.TimeoutExpired, ValueError):
            return ""
        return f"{ended}: {lines[-1]}" if lines else ended

    def kill(self) -> None:
        """End the child at once, which holds nothing that could be lost. A call that waits for it raises."""
        self._process.kill()

    def close(self) -> None:
        """End the child and wait for that. No other thread uses it any more."""
        with suppress(OSError), self._told, self._process:
            self._process.kill()


def serve() -> None:
    """The life of the child: an encoder, and then rows until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells all its processes; the parent decides
    commands, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not come between the answers
    try:
        encode: Encode = pickle.load(commands)
        gc.freeze()  # the libraries' many objects are not looked through again and again,
        gc.set_threshold(100_000)  # and rows, which form no cycles, seldom
        _answer(answers, None)
        while True:
            rows = pickle.load(commands)
            try:
                answer: tuple[Any, Any] = encode(rows), None
            except Exception as error:
                answer = None, _portable(error)
            _answer(answers, answer)
    except (EOFError, BrokenPipeError):
        os._exit(0)


def _portable(error: Exception) -> Exception:
    """The error, or one that says the same where it cannot be sent."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass
    return RuntimeError("".join(traceback.format_exception(error)))


def _answer(answers: Any, answer: Any) -> None:
    pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
    answers.flush()
