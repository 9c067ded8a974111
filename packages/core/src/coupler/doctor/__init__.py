"""Look at everything that a run needs before it starts, and say how to fix it.

This is ``coupler doctor``. A plugin adds checks with the hook ``coupler_doctor``.
"""

from coupler.doctor.dataset import examine
from coupler.doctor.report import diagnose, render
from coupler.plugins.finding import Finding, Verdict, ok, problem, warning

__all__ = ["Finding", "Verdict", "diagnose", "examine", "ok", "problem", "render", "warning"]
