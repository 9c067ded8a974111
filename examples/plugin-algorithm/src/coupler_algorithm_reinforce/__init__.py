"""Provide ``algorithm=reinforce``; the README says how."""
