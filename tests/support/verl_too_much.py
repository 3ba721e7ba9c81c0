"""A tool that needs more of verl than its interface."""

from verl.utils.reward_score import gsm8k

score = gsm8k
