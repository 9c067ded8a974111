"""Train programs and functions that speak to an HTTP endpoint."""
