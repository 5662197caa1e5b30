"""Processes of our own that encode rows for this one, so that Python code runs on more than one core.

They speak pickle. The first is told over its standard input what paths to import from, the encoder, and two pipes for
each process: one for chunks of rows, one for what became of them. A process ends when no rows can come any more, so
also when this process is killed.
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
from collections.abc import Callable, Iterable, Sequence
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
PATIENCE_SECS = 10.0
"""How long a process may take to end when nothing is asked of it."""
TOLD_BYTES = 1 << 20
FORKS = sys.platform == "linux"
"""Elsewhere system libraries do not survive a fork."""
Encode = Callable[[Sequence[Row]], Packed]


def sendable(encode: Encode) -> bytes:
    """What gives the results of rows, so that it can be handed to other processes."""
    return pickle.dumps(encode, pickle.HIGHEST_PROTOCOL)


class ProcessGone(Exception):
    """The process ended, or could not begin; says what it wrote last."""


class CannotSend(Exception):
    """Rows that cannot be pickled, as those that are nested deeply."""


class Family:
    """Child processes: the first imports what is needed and takes the encoder, and the others are forked from it.

    That saves each of them a second or two, and they share what they only read.

    Args:
        count: how many encode.

    Attributes:
        processes: those that encode.

    Raises:
        ProcessGone: the first could not begin.
    """

    def __init__(self, count: int) -> None:
        self._told = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the processes
        pipes = [(os.pipe(), os.pipe()) for _ in range(count)]
        self._theirs = [(rows[0], answers[1]) for rows, answers in pipes]
        self.processes = [EncodingProcess(rows[1], answers[0], self.last_words) for rows, answers in pipes]
        try:
            self._first = subprocess.Popen(
                [sys.executable, "-c", CHILD],
                stdin=subprocess.PIPE,
                stdout=self._told,
                stderr=self._told,
                env={**os.environ, **ONE_CORE},
                pass_fds=[end for ends in self._theirs for end in ends],
                process_group=0,
            )
        except OSError as error:
            for process in self.processes:
                process.close()
            self._told.close()
            raise ProcessGone(str(error)) from error
        finally:
            _close(end for ends in self._theirs for end in ends)

    def begin(self, encode: bytes) -> None:
        """Hand over what is ``sendable``. Each process says itself when it is ready."""
        assert self._first.stdin is not None
        with suppress(OSError), self._first.stdin as commands:  # whether it is gone will be seen in its answers
            for value in (pickle.dumps(sys.path), encode, pickle.dumps(self._theirs)):
                commands.write(value)

    def last_words(self) -> str:
        """What a process wrote before it ended."""
        with suppress(ValueError):  # closed already
            told = os.pread(self._told.fileno(), TOLD_BYTES, 0)  # its place is that where the processes write on
            return told.decode(errors="replace").strip().rpartition("\n")[2]
        return ""

    def kill(self) -> None:
        """End all at once; they hold nothing that could be lost. A call that waits for one of them raises."""
        with suppress(ProcessLookupError):
            os.killpg(self._first.pid, signal.SIGKILL)

    def close(self) -> None:
        """End all and wait for that. No other thread uses them any more."""
        for process in self.processes:
            process.close()
        with suppress(OSError), self._told, self._first:
            try:
                self._first.wait(PATIENCE_SECS)
            except subprocess.TimeoutExpired:
                self.kill()


class EncodingProcess:
    """A child process with a copy of an encoder, which uses one core. ``AHEAD`` threads may call it at a time."""

    def __init__(self, rows: int, answers: int, last_words: Callable[[], str]) -> None:
        self._rows, self._answers = os.fdopen(rows, "wb"), os.fdopen(answers, "rb")
        self._sending, self._taking = threading.Lock(), threading.Lock()
        self._last_words = last_words
        self.pid = 0

    def wait(self) -> None:
        """Wait until it is ready, and know its ``pid``, which is 0 until then.

        Raises:
            ProcessGone: it ended instead.
        """
        self.pid = self._take()

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
        try:
            with self._sending:
                self._rows.write(pickled)
                self._rows.flush()
                self._taking.acquire()  # answers come in the order of the questions
        except (OSError, ValueError) as error:
            raise ProcessGone(self._last_words() or str(error)) from error
        try:
            packed, raised = self._take()
        finally:
            self._taking.release()
        if raised is not None:
            raise raised
        return packed  # type: ignore[no-any-return]

    def _take(self) -> Any:
        try:
            return pickle.load(self._answers)
        except Exception as error:  # of the pipe, or of what came out of it
            raise ProcessGone(self._last_words() or "it ended without an answer") from error

    def close(self) -> None:
        """Close the pipes, which also ends it."""
        for stream in (self._rows, self._answers):
            with suppress(OSError):
                stream.close()


def serve() -> None:
    """The life of the first child: it takes the encoder, and has one process for each pair of pipes."""
    encode: Encode = pickle.load(sys.stdin.buffer)
    pairs: list[tuple[int, int]] = pickle.load(sys.stdin.buffer)
    gc.freeze()  # the libraries' many objects are not looked through again and again,
    gc.set_threshold(100_000)  # and rows, which form no cycles, seldom
    if len(pairs) == 1:
        _answer_all(encode, *pairs[0])
        return
    for number, pair in enumerate(pairs):
        if os.fork() == 0:
            _close([end for other in pairs[number + 1 :] for end in other])
            _answer_all(encode, *pair)
            os._exit(0)
        _close(pair)
    with suppress(ChildProcessError):
        while True:
            pid, status = os.wait()
            code = os.waitstatus_to_exitcode(status)
            if code:
                print(f"process {pid} ended with {code}", file=sys.stderr, flush=True)


def _close(ends: Iterable[int]) -> None:
    for end in ends:
        os.close(end)


def _answer_all(encode: Encode, rows: int, answers: int) -> None:
    """Encode what comes, until nothing does."""
    with suppress(EOFError, BrokenPipeError), os.fdopen(rows, "rb") as questions, os.fdopen(answers, "wb") as out:
        _answer(out, os.getpid())
        while True:
            chunk = pickle.load(questions)
            try:
                answer: tuple[Any, Any] = encode(chunk), None
            except Exception as error:
                answer = None, _portable(error)
            _answer(out, answer)


def _portable(error: Exception) -> Exception:
    """The error, or one that says the same where it cannot be sent."""
    try:
        arrives = type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # of whatever the error holds
        arrives = False
    return error if arrives else RuntimeError("".join(traceback.format_exception(error)))


def _answer(answers: Any, answer: Any) -> None:
    pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
    answers.flush()
