"""``coupler doctor``: looks at everything a run needs before it starts, and says how to fix what is wrong.

A plugin adds checks with the hook ``coupler_doctor``.
"""

from coupler.doctor.report import diagnose, render
from coupler.plugins.finding import Finding, Verdict, ok, problem, warning

__all__ = ["Finding", "Verdict", "diagnose", "ok", "problem", "render", "warning"]
