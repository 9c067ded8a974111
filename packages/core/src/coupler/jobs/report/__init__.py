"""Compare runs on one page of HTML, for ``coupler report``."""

from coupler.jobs.report.page import report

__all__ = ["report"]
