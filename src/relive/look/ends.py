"""Rules on episode ends: what the next episode begins on, flags one row off, time limits, missing final observations.

Each rule takes an :class:`Experience` and returns what it found, or why it did not look. ``jump`` is how far a step
moved the observation, in units of a usual step. A step from an episode's end to the start of the next one moves far.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..steps.arrays import Bools
from .episodes import episodes_of
from .experience import Experience
from .findings import Finding, Lack, Looked, Sureness, Verdict, found

__all__ = [
    "ends_one_row_off",
    "next_episode_after_end",
    "offset_of_ends",
    "stored_ignored_steps",
    "time_limit_as_terminal",
    "truncation_without_final",
]


FEW = 3
"""How many ends must look wrong before there is a finding."""

FAR = 3.0
"""Steps of one kind count as jumps if they move this many times farther than others."""

MOST = 0.9
"""The share of rows that must agree before a pattern counts as certain."""

VARIED = 5
"""How many different lengths episodes must have before a limit stands out among them."""

NEAR = 10
"""Episodes up to this many steps shorter than the limit show how many episodes would end there by themselves."""


def next_episode_after_end(steps: Experience) -> Verdict:
    """Episodes that begin on the very observation that the last one ended on. Two mistakes have this effect."""
    if steps.disorder:
        return Lack(steps.disorder)
    if steps.next_obs is None:
        return _ignored_steps_by_jump(steps)
    if offset_of_ends(steps):
        return Lack("ends are flagged one row off")
    findings = tuple(_after_ends(steps))
    known = int((steps.ended & steps.follows & ~steps.still).sum())
    if known < FEW and not findings:
        return Lack(f"fewer than {FEW} episodes end before another stored one, on an observation of their own")
    return Looked(max(known, 1), findings)


def _after_ends(steps: Experience) -> Iterator[Finding]:
    cut = np.zeros(len(steps), np.bool_) if steps.truncated is None else steps.truncated & ~steps.terminated
    known = steps.ended & steps.follows & ~steps.still  # a last step that changed nothing shows nothing
    if steps.window > 1:
        known &= ~np.append(steps.ended[1:], False)  # of the windows that reach an end, the last one
    # where all episodes begin alike, some may end just there
    least = MOST if known.any() and _always_the_same(steps, _next_rows(known)) else 0.05
    kinds = {name: ends for name, ends in (("terminated", known & ~cut), ("truncated", known & cut))
             if (ends & steps.chained).sum() >= max(FEW, ends.sum() * least)}  # fmt: skip
    if kinds:
        ends = np.logical_or.reduce(list(kinds.values()))
        # a terminal's flag masks what comes after it, and so does a flag for both kinds of end
        masked = "truncated" not in kinds and (steps.truncated is None or (known & cut).sum() >= FEW)
        most: Sureness = "possible" if masked else "certain" if "truncated" in kinds else "likely"
        yield _of_what_kind(steps, ends, ends & steps.chained, " and ".join(kinds), most)
    elif not known.any():
        yield from _idle_steps(steps)


def _idle_steps(steps: Experience) -> Iterator[Finding]:
    """Ignored steps in data without any flagged end: the few steps that earn exactly nothing, and that move far."""
    idle = (steps.reward == 0) & steps.follows & ~steps.still
    if FEW <= idle.sum() < len(steps) / 10 and _typical(steps, idle) > FAR * _typical(steps, ~idle):
        yield found("autoreset-step-stored", "likely",
                    "steps that earn nothing, unlike all others, jump to another place: the step that the env ignores "
                    "after an end (NEXT_STEP autoreset) is stored as a real one, and the end is not flagged",
                    "leave that row out: add(..., mask=~ended), or AutoresetMode.SAME_STEP with final_obs",
                    idle, len(steps), place=steps.place)  # fmt: skip


def _of_what_kind(steps: Experience, ends: Bools, begun: Bools, kind: str, most: Sureness) -> Finding:
    """Decide which mistake it is. An ignored step moves far and earns nothing. A reset observation is itself far away.

    ``most`` is the most that a finding of a reset observation can be sure of, since a flag may keep it from being used.
    """
    after = _next_rows(begun) & ~steps.ended
    calm = ~steps.ended & ~after
    usual = _typical(steps, calm)
    idle = after.any() and (steps.reward[after] == 0).mean() > MOST and (steps.reward[calm] == 0).mean() < 0.5
    moved_after, moved_end = _typical(steps, after), _typical(steps, begun)
    share = begun.sum() / ends.sum()
    if (idle or moved_after > FAR * usual) and moved_after >= moved_end:
        sure: Sureness = "certain" if idle and share > MOST else "likely"
        return found("autoreset-step-stored", sure,
                     f"after {kind} episodes the step that the env ignores (NEXT_STEP autoreset) is stored as a real "
                     "one: it starts on the final observation and leads into the next episode",
                     "leave that row out: add(..., mask=~ended), or AutoresetMode.SAME_STEP with final_obs",
                     after, len(steps), place=steps.place)  # fmt: skip
    if moved_end > FAR * usual:
        if most == "certain" and _always_the_same(steps, _next_rows(begun)):
            most = "likely"  # where all episodes begin alike, one may also end there
        masked = ", which their flag masks: one-step targets are right" if most == "possible" else ""
        return found("reset-as-final-observation", most if share > MOST or most == "possible" else "likely",
                     f"the observation after {kind} steps is the next episode's first (SAME_STEP autoreset){masked}",
                     "store info['final_obs'] as next_obs where an episode ended",
                     begun, len(steps), place=steps.place)  # fmt: skip
    jumps = moved_end > FAR * usual or moved_after > FAR * usual
    return found("next-episode-begins-on-the-end", "likely" if jumps else "possible",
                 f"episodes begin on the very observation that the {kind} one before ended on: either a step that the "
                 "env ignored is stored, or a reset observation stands for the final one"
                 + ("" if jumps else "; or the env goes on from where it ended"),
                 "check what the autoreset mode of the env returns at an end, see docs/episode-ends.md",
                 begun, len(steps), place=steps.place)  # fmt: skip


def _always_the_same(steps: Experience, rows: Bools) -> bool:
    """Whether the observations of these rows are all the same."""
    return all(bool((leaf[rows] == leaf[rows][:1]).all()) for leaf in steps.obs.values())


def _ignored_steps_by_jump(steps: Experience) -> Verdict:
    """Ignored steps in data without next observations: the row after an end earns nothing and jumps."""
    after = _next_rows(steps.ended & steps.follows) & ~steps.ended & steps.follows
    if after.sum() < FEW:
        return Lack(f"fewer than {FEW} episodes end before another stored one")
    if not (~steps.ended & ~after & steps.follows).any():
        return Lack("no step lies within an episode")
    idle = stored_ignored_steps(steps)
    return Looked(int(after.sum()), [] if idle is None else [idle])


def stored_ignored_steps(steps: Experience) -> Finding | None:
    """The finding of ignored steps in data without next observations; None if there are none."""
    ends = steps.ended & steps.follows
    after = _next_rows(ends) & ~steps.ended & steps.follows
    calm = ~steps.ended & ~after & steps.follows
    if after.sum() < FEW or not calm.any():
        return None
    idle = (steps.reward[after] == 0).mean() > MOST and (steps.reward[calm] == 0).mean() < 0.5
    if idle and _typical(steps, after) > FAR * _typical(steps, calm) and _typical(steps, ends) < _typical(steps, after):
        return found("autoreset-step-stored", "likely",
                    "the step that the env ignores after an end (NEXT_STEP autoreset) is stored as a real one",
                    "leave that row out: add(..., mask=~ended), or AutoresetMode.SAME_STEP with final_obs",
                    after, len(steps), place=steps.place)  # fmt: skip
    return None


def ends_one_row_off(steps: Experience) -> Verdict:
    """Flags that stand one row before or after the step that ended the episode."""
    if steps.disorder:
        return Lack(steps.disorder)
    ends = int((steps.ended & steps.follows).sum())
    if ends < FEW:
        return Lack(f"fewer than {FEW} episodes end before another stored one")
    if steps.next_obs is None and not steps.numbers.shape[1]:
        return Lack("without next observations, ends are known by how far numbers jump, and observations are images")
    return Looked(ends, _one_row_off(steps))


def _one_row_off(steps: Experience) -> Iterator[Finding]:
    offset = offset_of_ends(steps)
    if offset and not (steps.next_obs is None and stored_ignored_steps(steps) is not None):
        word, ends = "after" if offset > 0 else "before", steps.ended & steps.follows
        yield found("ends-one-row-off", "certain" if steps.next_obs is not None else "likely",
                    f"episode ends are flagged one row {word} the step that ended: the next episode begins where no "
                    "end is flagged",
                    "store the flags of the step itself, as step() returned them with its reward",
                    ends, len(steps), place=steps.place)  # fmt: skip


def offset_of_ends(steps: Experience) -> int:
    """Whether flags come one row after (1) or before (-1) the steps where the chain breaks; 0 if neither."""
    broken, ends = _breaks(steps), steps.ended & steps.follows
    for offset in (1, -1):
        hit = (np.roll(broken, offset) & ends).sum()
        if hit >= FEW and hit > MOST * min(broken.sum(), ends.sum()) and (ends & broken).sum() < hit / 10:
            return offset
    return 0


def truncation_without_final(steps: Experience) -> Verdict:
    """Truncated steps without the observation that they ended on, which a learner has to bootstrap from."""
    if steps.truncated is None:
        return Lack("one flag stands for both kinds of end")
    if steps.next_obs is not None or stored_ignored_steps(steps) is not None:  # the rows after begin on final ones
        return Looked(len(steps))
    cut = steps.truncated & ~steps.terminated & steps.follows
    values = steps.others.get(("final_value",))
    if values is not None:  # a rollout bootstraps from these, and needs no final observations
        cut &= np.isnan(values.reshape(-1))
    return Looked(len(steps), [] if not cut.any() else [
        found("truncation-without-final-observation", "certain",
              "an episode was cut off and its final observation is not stored: another one, such as the next "
              "episode's first in the following row, would serve as next observation",
              "store the final observation of truncated steps (info['final_obs'])",
              cut, len(steps), place=steps.place)])  # fmt: skip


def time_limit_as_terminal(steps: Experience, max_episode_steps: int | None = None) -> Verdict:
    """Episodes that all stop at one length as terminals: most likely a time limit, after which values go on."""
    if steps.disorder:
        return Lack(steps.disorder)
    if not steps.judge_limits:
        return Lack("rewards hold the values of time limits, or nothing is bootstrapped")
    table = episodes_of(steps)
    whole = table["complete"]
    lengths, last = table["length"][whole], (table["start"] + table["length"] - 1)[whole]
    if len(lengths) < FEW:
        return Lack(f"fewer than {FEW} episodes are stored as a whole")
    limits = [None] if max_episode_steps is None else [max_episode_steps, None]
    findings = [finding for limit in limits for finding in _at_a_limit(steps, lengths, last, limit)]
    # an episode cut off at the longest length shows that time limits are stored as such
    cut = steps.truncated is not None and (steps.truncated[last] & (lengths == lengths.max())).any()
    if max_episode_steps is None and not cut and len(np.unique(lengths)) <= VARIED:
        return Lack(f"episodes have too few lengths, such as {int(lengths.max())} steps, for a time limit to stand out "
                    "among them; pass max_episode_steps, the time limit of the env")  # fmt: skip
    return Looked(len(lengths), findings[:1])


def _at_a_limit(
    steps: Experience, lengths: np.ndarray, last: np.ndarray, max_episode_steps: int | None
) -> Iterator[Finding]:
    """Episodes that terminate after ``max_episode_steps``, or, without it, after a length that stands out."""
    limit = max_episode_steps or int(lengths.max())
    at_limit = (lengths == limit) & steps.terminated[last]
    if steps.truncated is not None:
        at_limit &= ~steps.truncated[last]
        if (steps.truncated[last] & (lengths == limit)).any():
            return
    count = int(at_limit.sum())
    if count < FEW or (max_episode_steps is None and not _stands_out(lengths, limit, count)):
        return
    yield found("time-limit-as-terminal", "likely" if max_episode_steps is None else "certain",
                f"{count} episodes stop after exactly {limit} steps and are flagged as "
                f"{'done, by one flag for both kinds of end' if steps.truncated is None else 'terminated'}",
                "store the time limit as truncated, with the final observation, so that its value counts",
                last[at_limit], len(lengths), place=steps.place)  # fmt: skip


def _stands_out(lengths: np.ndarray, limit: int, count: int) -> bool:
    """Whether far more episodes end at the limit than just before it, among episodes of many lengths."""
    shorter = lengths[lengths < limit]
    near = int((shorter >= limit - NEAR).sum())
    return limit > NEAR and len(np.unique(shorter)) >= VARIED and count > 10 * near / NEAR + 2


def _breaks(steps: Experience) -> Bools:
    """Where the chain of observations breaks: by comparison, or, without next observations, by jumps."""
    if steps.next_obs is not None:
        return steps.follows & ~steps.chained
    calm = np.sort(steps.jump[steps.follows])
    if not len(calm):
        return np.zeros(len(steps), np.bool_)
    ends = int((steps.ended & steps.follows).sum())
    bar = FAR * max(float(calm[len(calm) // 2]), float(np.mean(calm[: max(len(calm) - ends, 1)])))
    return steps.follows & (steps.jump > bar)


def _next_rows(rows: Bools) -> Bools:
    """The rows after these."""
    return np.append(False, rows[:-1])


def _typical(steps: Experience, rows: Bools) -> float:
    """The median jump of these rows; 0 if there are none."""
    return float(np.median(steps.jump[rows])) if rows.any() else 0.0
