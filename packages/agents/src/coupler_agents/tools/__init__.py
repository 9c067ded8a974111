"""Play episodes in which the policy calls tools."""
