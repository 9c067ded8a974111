"""Provide ``sync.transport=shm``; the README says how."""
