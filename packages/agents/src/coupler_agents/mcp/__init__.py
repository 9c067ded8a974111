"""Offer the tools of MCP servers to a policy."""
