"""Play episodes in processes of their own, also of another interpreter."""

from coupler.conversation.workers.pool import open_environment

__all__ = ["open_environment"]
