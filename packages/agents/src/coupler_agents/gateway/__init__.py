"""Serve conversations over HTTP on the loopback, so that any program can be trained.

A :class:`Gateway` gives each episode a key. Requests with that key, in the dialect of
OpenAI or Anthropic or as token ids, become turns of the episode's conversation.
"""

from coupler_agents.gateway.server import Gateway
from coupler_agents.gateway.session import Bounds, Session, Talk

__all__ = ["Bounds", "Gateway", "Session", "Talk"]
