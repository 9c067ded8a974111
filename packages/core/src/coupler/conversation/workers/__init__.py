"""Play episodes in processes of their own, also of another interpreter."""

from coupler.conversation.workers.pool import WorkerDied, open_environment, uses_tools

__all__ = ["WorkerDied", "open_environment", "uses_tools"]
