"""Provide ``trackers=[sqlite]``; the README says how."""
