"""Provide ``sync.manager=plain``; the README says how."""
