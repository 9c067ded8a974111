"""Run reward functions, named by import path, in worker processes that can die."""

from coupler.rewards.functions import (
    RewardFunctions,
    Scoring,
    check_reward,
    check_rewards,
    make_scoring,
)
from coupler.rewards.pool import RewardPool
from coupler.rewards.process import Limits
from coupler.rewards.result import Graded, Invalid, Scored
from coupler.rewards.value import judged

__all__ = [
    "Graded",
    "Invalid",
    "Limits",
    "RewardFunctions",
    "RewardPool",
    "Scored",
    "Scoring",
    "check_reward",
    "check_rewards",
    "judged",
    "make_scoring",
]
