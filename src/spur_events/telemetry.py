"""Logging: constant messages, facts as fields. One JSON object a line, or plain text on a terminal."""

import json
import logging
import sys
from datetime import UTC, datetime

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _PLAIN}


class JsonFormatter(logging.Formatter):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, message, then the fields as key=value."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = "".join(f" {key}={value!s}" for key, value in _fields(record).items())
        at = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        line = f"{at} {record.levelname.lower():7} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def set_up(level: str = "INFO") -> None:
    """Log to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter() if sys.stderr.isatty() else JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # The drivers' own logs repeat what our errors say.
    for noisy in ("nats", "kubernetes_asyncio", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
