"""Play environments that are served by OpenEnv."""
