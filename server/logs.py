"""Log lines: one per event, structured, to standard error.

Knows: the format of every line of a process (this project's, the libraries', Python's warnings and crashes),
and that no line shows a prompt unless asked to. Does not know: what is logged.
"""

import logging
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TextIO, cast

import structlog
from structlog.typing import EventDict, ExcInfo, Processor

from configs.settings import Settings
from server.log_stream import LossyStream

# What a prompt can get into; one too short to be told from any other text is left there.
FREE_TEXT_FIELDS = ("event", "message", "exception", "cause", "reason", "error")
MIN_HIDDEN_CHARACTERS = 4
PROMPT_FIELDS = ("prompt", "negative_prompt")
# They bring handlers of their own, whose lines have another format.
LIBRARIES = ("diffusers", "transformers", "huggingface_hub", "accelerate")
# Their errors quote what they were given.
QUOTING_MODULES = ("pydantic", "pydantic_core", "fastapi")
_HIDDEN = "_hidden"


def configure(settings: Settings, process: str) -> None:
    """Set up structlog, the standard library's logging, warnings and crashes of this process."""
    as_json = settings.log_format == "json" or (settings.log_format == "auto" and not sys.stderr.isatty())
    level = getattr(logging, settings.log_level.upper())
    steps: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        partial(_add_process, process),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.ExceptionRenderer(partial(_traceback, settings.log_prompts)),
        partial(_hide_prompts, settings.log_prompts),
    ]
    renderer: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[*steps, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # Text and newline in one write.
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", LossyStream(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    _configure_libraries(level, steps, renderer)
    warnings.showwarning = _log_warning
    sys.excepthook = _log_crash
    threading.excepthook = _log_thread_crash


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """The logger of every module."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger


def job_logger(job_id: str, attempt: int, *texts: str | None) -> structlog.typing.FilteringBoundLogger:
    """A logger with a job bound; ``texts`` (its prompts) are hidden in its lines."""
    hidden = _worth_hiding(texts)
    logger: structlog.typing.FilteringBoundLogger = get_logger().bind(
        job=job_id, attempt=attempt, **{_HIDDEN: hidden}
    )
    return logger


@contextmanager
def job_lines(job_id: str, attempt: int, *texts: str | None) -> Iterator[None]:
    """Bind a job to every line of this thread; ``texts`` (its prompts) are hidden in them."""
    hidden = _worth_hiding(texts)
    with structlog.contextvars.bound_contextvars(job=job_id, attempt=attempt, **{_HIDDEN: hidden}):
        yield


@contextmanager
def request_lines(request_id: str) -> Iterator[None]:
    """Bind a request's id to every line of this task."""
    with structlog.contextvars.bound_contextvars(request=request_id):
        yield


@contextmanager
def crash_as_line() -> Iterator[None]:
    """Around the whole of a child process: an error that nobody handles is one line and exit code 1."""
    try:
        yield
    except Exception:
        get_logger().exception("process_crashed")
        raise SystemExit(1) from None


def adopt_libraries() -> None:
    """Have libraries with a logging of their own log as all others do; to be called after importing them."""
    for name in LIBRARIES:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def _worth_hiding(texts: tuple[str | None, ...]) -> tuple[str, ...]:
    return tuple(text for text in texts if text is not None and len(text) >= MIN_HIDDEN_CHARACTERS)


def _configure_libraries(level: int, steps: list[Processor], renderer: Processor) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, _shorten_asyncio, *steps],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))
    # It warns about every malformed form, which is the client's affair.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)


def _add_process(process: str, logger: object, method: str, event: EventDict) -> EventDict:
    return {**event, "process": process}


def _shorten_asyncio(logger: object, method: str, event: EventDict) -> EventDict:
    # What follows its first line shows the error once more, with what it may quote.
    if event["logger"] == "asyncio":
        event["event"] = event["event"].partition("\n")[0]
    return event


def _hide_prompts(are_wanted: bool, logger: object, method: str, event: EventDict) -> EventDict:
    hidden = event.pop(_HIDDEN, ())
    if are_wanted:
        return event
    kept = {key: value for key, value in event.items() if key not in PROMPT_FIELDS}
    for key in FREE_TEXT_FIELDS:
        for text in hidden:
            if isinstance(kept.get(key), str):
                kept[key] = kept[key].replace(text, "[prompt]").replace(repr(text)[1:-1], "[prompt]")
    return kept


def _traceback(are_prompts_wanted: bool, info: ExcInfo) -> str:
    kind, error, trace = info
    if are_prompts_wanted or not _quotes(error):
        return "".join(traceback.format_exception(kind, error, trace)).rstrip()
    frames = "".join(traceback.format_tb(trace))
    return f"Traceback (most recent call last):\n{frames}{kind.__name__} (its text may quote a request)"


def _quotes(error: BaseException | None) -> bool:
    """Whether this error, or one that it came from, may show what it was given."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if type(error).__module__.partition(".")[0] in QUOTING_MODULES:
            return True
        error = error.__cause__ or error.__context__
    return False


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    get_logger().warning(
        "python_warning", category=category.__name__, message=str(message), at=f"{filename}:{lineno}"
    )


def _log_crash(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    get_logger().critical("process_crashed", exc_info=(kind, error, trace))


def _log_thread_crash(crash: threading.ExceptHookArgs) -> None:
    if crash.exc_value is None or crash.exc_type is SystemExit:
        return
    name = crash.thread.name if crash.thread else None
    get_logger().error(
        "thread_crashed", thread=name, exc_info=(crash.exc_type, crash.exc_value, crash.exc_traceback)
    )
