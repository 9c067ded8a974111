"""Provide ``engine=plain``; the README says how."""
