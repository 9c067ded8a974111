"""Algorithms for Coupler: GRPO with its variants, RLOO, PPO, and supervised fine-tuning."""
