"""Run programs that a model wrote, in bubblewrap or at a URL."""

from coupler_agents.sandbox.interpreter import Answer, Interpreter, InterpreterLost
from coupler_agents.sandbox.limits import SandboxLimits
from coupler_agents.sandbox.programs import run_python
from coupler_agents.sandbox.ran import Ran, SandboxFailed
from coupler_agents.sandbox.sandbox import Sandbox

__all__ = [
    "Answer",
    "Interpreter",
    "InterpreterLost",
    "Ran",
    "Sandbox",
    "SandboxFailed",
    "SandboxLimits",
    "run_python",
]
