"""Train agents over several turns: with tools, in environments, or as programs."""
