"""Start the ranks of a run on this machine, pass on what they say and what they are sent, and end them together."""

from paceline.verbs.launch.again import launch_if_asked
from paceline.verbs.launch.command import rank_command, without_launch
from paceline.verbs.launch.launcher import launch
from paceline.verbs.launch.ranks import Gpus, Ranks, choose_ranks, parse_gpus

__all__ = ["Gpus", "Ranks", "choose_ranks", "launch", "launch_if_asked", "parse_gpus", "rank_command", "without_launch"]
