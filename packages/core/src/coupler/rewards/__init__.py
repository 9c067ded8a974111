"""Rewards: functions loaded by import path and run in killable worker processes."""

from coupler.rewards.pool import RewardPool, check_reward
from coupler.rewards.result import Graded, Invalid, Scored

__all__ = ["Graded", "Invalid", "RewardPool", "Scored", "check_reward"]
