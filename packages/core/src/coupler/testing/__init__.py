"""Hold what backends are tested with: the conformance kit, tiny models, and backends in
plain NumPy.
"""
