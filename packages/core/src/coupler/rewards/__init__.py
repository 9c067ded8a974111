"""Run reward functions, named by import path, in worker processes that can die."""

from coupler.rewards.pool import RewardPool, check_reward
from coupler.rewards.process import Limits
from coupler.rewards.result import Graded, Invalid, Scored
from coupler.rewards.value import judged

__all__ = ["Graded", "Invalid", "Limits", "RewardPool", "Scored", "check_reward", "judged"]
