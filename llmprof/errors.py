"""The exception tree: what the user can mend, told apart from what has no answer.

LlmprofError
├── RequestError        the request or an input is wrong                    exit code 2
│   ├── LayoutError       a layout that does not parse or does not multiply out
│   ├── ClusterError      an unknown or inconsistent cluster
│   ├── RunError          a run directory that is missing, torn, empty or foreign
│   ├── WorkloadError     a workload that cannot answer what was asked
│   └── TableError        a table of measurements that cannot be read, or is of no kind that is scored
└── NoAnswerError       the request is fine, but nothing fits               exit code 3
"""

from __future__ import annotations


class LlmprofError(Exception):
    """An error with one message for a person, and a hint of what to try.

    Args:
        message: what was asked and the rule, with the numbers filled in.
        hint: what to try next; may be empty.
    """

    kind = "error"
    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class RequestError(LlmprofError, ValueError):
    """What was asked, or an input file, is wrong."""

    kind = "request"
    exit_code = 2


class LayoutError(RequestError):
    """A layout string does not parse, or its degrees do not multiply out."""

    kind = "layout"


class ClusterError(RequestError):
    """A cluster or device is unknown, or its description is inconsistent."""

    kind = "cluster"


class RunError(RequestError):
    """A run directory is missing, torn, empty or not ours."""

    kind = "run"


class WorkloadError(RequestError):
    """A workload is missing or was not traced for what is asked."""

    kind = "workload"


class TableError(RequestError):
    """A table of measurements cannot be read, or is of no kind that is scored."""

    kind = "table"


class NoAnswerError(LlmprofError):
    """The request is fine, but no layout fits or no answer exists."""

    kind = "no_answer"
    exit_code = 3
