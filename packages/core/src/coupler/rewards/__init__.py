"""Rewards: functions loaded by import path and run in killable worker processes."""

from coupler.rewards.pool import RewardPool, check_reward
from coupler.rewards.result import Invalid, Scored

__all__ = ["Invalid", "RewardPool", "Scored", "check_reward"]
