"""Algorithms for Coupler: GRPO with its variants, RLOO, and supervised fine-tuning."""
