"""PyTorchRL's keys, as in its ``pytorchrl/__init__.py``, and relive's names for them."""

from __future__ import annotations

__all__ = [
    "ACT", "ACTPROBS", "ALGORITHM", "DONE", "DONE2", "EPISODES", "IREW", "NAMES", "OBS", "OBS2", "REW", "RHS", "RHS2",
    "STATES", "OffPolicyDataKeys",
]  # fmt: skip

OBS, RHS, DONE, ACT, ACTPROBS = "Observation", "RecurrentHiddenStates", "Done", "Action", "ActionProbs"
REW, IREW = "Reward", "IntrinsicReward"
OBS2, RHS2, DONE2 = "NextObservation", "NextRecurrentHiddenStates", "NextDone"
ALGORITHM, EPISODES = "Algorithm", "Episodes"

OffPolicyDataKeys = (OBS, RHS, DONE, ACT, REW, IREW, OBS2, RHS2, DONE2, ACTPROBS)
"""The keys that the buffers store."""

STATES = (RHS, RHS2)

NAMES = {
    OBS: "obs", DONE: "episode_start", ACT: "action", REW: "reward", IREW: "intrinsic_reward", OBS2: "next_obs",
    DONE2: "terminated", ACTPROBS: "action_probs",
}  # fmt: skip
