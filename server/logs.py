"""Log lines: one per event, structured, to standard error.

Knows: the format. Does not know: what is logged; by rule never a prompt.
"""

import logging
import sys
from functools import partial
from typing import Any

import structlog

from configs.settings import Settings


def configure(settings: Settings, process: str) -> None:
    """Set up structlog and the standard library's logging for this process."""
    as_json = settings.log_format == "json" or (settings.log_format == "auto" and not sys.stderr.isatty())
    renderer: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    level = getattr(logging, settings.log_level.upper())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            partial(_add_process, process),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.StackInfoRenderer(),
            *([structlog.processors.format_exc_info] if as_json else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    # It warns about every malformed form, which is the client's affair.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    logging.basicConfig(level=max(level, logging.WARNING), stream=sys.stderr, format="%(name)s: %(message)s")


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """The logger of every module."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger


def _add_process(
    process: str, logger: object, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    return {**event, "process": process}
