"""Train with GRPO and its variants, RLOO, PPO, or supervised fine-tuning."""
