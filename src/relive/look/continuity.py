"""Rules on the order of rows.

In order: rows that do not lead to the following one; ends that are flagged wrongly, or whose final observation is lost;
jumps to where episodes begin; stacks of frames; rows that are stored twice; ready-made n-step windows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..steps.arrays import Array, Bools, Ints
from ..steps.schema import dotted
from .experience import Experience, are_whole, digests, episodes_of, same_rows
from .findings import Finding, Lack, Look, Sureness, rule, skip_if

FEW = 3
"""How many ends must look wrong before there is a finding."""

FAR = 3.0
"""Steps of one kind count as jumps if they move this many times farther than others."""

MOST = 0.9
"""The share of rows that must agree before a pattern counts as certain."""


# -- rows that do not lead to the following one ------------------------------------------------------------------------

SOME = 0.1
"""The share of rows that lead to the following one by which the rows are known to be in the order of time."""

ELSEWHERE = 0.3
"""The share of rows that must lead to another stored row before rows count as out of order."""

NEARLY = 0.05
"""Scales and offsets that differ by less than this share count as a drift."""


@rule(
    "next-observation-is-the-observation",
    "observation-one-step-late",
    "unmarked-end",
    "next-observation-on-another-scale",
    "rows-out-of-order",
)
def continuity(steps: Experience) -> Look:
    """Rows whose next observation is not the following row's, though no end is flagged between them."""
    if steps.next_obs is None:
        raise Lack("it keeps no next observations to compare with the following rows", absent=True)
    skip_if(not steps.ordered, "the transitions have no order")
    skip_if(not steps.inner.any(), "no step is followed by another one of its episode")
    looked = int(steps.inner.sum())
    if steps.window > 1:
        late = lagging(steps)
        yield from late
        skip_if(not late, "rows are n-step transitions", absent=True)
        return looked
    skip_if(offset_of_ends(steps), "ends are flagged one row off")
    broken = steps.inner & ~steps.chained
    frozen, rest = broken & steps.still, broken & ~steps.still
    if frozen.sum() >= FEW and frozen.sum() > broken.sum() / 2:
        yield from steps.finding("next-observation-is-the-observation", "certain",
            "observation and next observation of a row are the same, but the following row has another: the one was "
            "written over the other, or stored twice",
            "store a copy of the observation before step(), and what step() returned as next_obs",
            frozen, looked)  # fmt: skip
    else:
        rest = broken
    if rest.sum() > looked / 2:
        return (yield from _mostly_broken(steps, rest, looked))
    # with one flag for all ends, a time limit rightly has no flag if steps are read one by one
    yield from _unmarked(steps, rest, "possible" if steps.truncated is None else "certain")
    return looked


def lagging(steps: Experience) -> list[Finding]:
    """Observations of the row before, which look like transitions of two steps.

    The row before an end then leads to the observation two rows after it, beyond the end, but the row of the end, whose
    next observation is the final one, does not. Transitions of two steps do both or neither.
    """
    if steps.window != 2:
        return []
    reach = np.append(steps.reaches(2), [False, False])
    ends = np.flatnonzero(steps.ended & steps.follows)
    ends = ends[(ends > 0) & (ends < len(steps) - 2)]
    ends = ends[steps.inner[ends - 1] & steps.follows[ends + 1] & ~steps.ended[ends + 1]]
    if len(ends) < FEW or reach[ends - 1].mean() < 1 - SOME or reach[ends].mean() > SOME:
        return []
    return list(steps.finding("observation-one-step-late", "certain",
        "observations are those of the row before: a next observation is that of the row after the following one, and "
        "first observations of episodes are of the episode before",
        "store a copy of the observation that the action was chosen on, before step() overwrites it"))  # fmt: skip


def _unmarked(steps: Experience, rows: Bools, sure: Sureness) -> Iterator[Finding]:
    return steps.finding("unmarked-end", sure,
        "the next observation is not that of the following row, though no end is flagged: returns and sequences would "
        "run on into other steps",
        "flag such steps as truncated, or interrupt() the env before its next step",
        rows, int(steps.inner.sum()))  # fmt: skip


def _mostly_broken(steps: Experience, rest: Bools, looked: int) -> Look:
    """The finding where most rows do not lead to the following one; a lack if the mistake is not known."""
    scale = _scale(steps, np.flatnonzero(rest))
    if scale is not None:
        drift = scale < NEARLY
        yield from steps.finding("next-observation-on-another-scale", "possible" if drift else "certain",
            "next observations are those of the following rows on another scale"
            + (", nearly the same one, as by a running normalisation, or by rounding" if drift else ""),
            "normalise observations and next observations with the same numbers, best when a batch is read",
            rest, looked)  # fmt: skip
    elif steps.chained[steps.inner].mean() > SOME:
        yield from _unmarked(steps, rest, "likely")
    elif (elsewhere := _lead_elsewhere(steps))[rest].mean() > ELSEWHERE:
        yield from steps.finding("rows-out-of-order", "likely",
            "most rows lead to the observation of a row elsewhere, and not of the following one: the rows are not in "
            "the order of time, so returns, n-step targets and sequences of them are wrong",
            "store rows env by env in the order of time, or in a ReplayBuffer(ordered=False)",
            rest & elsewhere, looked)  # fmt: skip
    else:
        raise Lack(
            "most rows lead to an observation that no stored row begins with, so their order in time is not known"
        )
    return looked


def _scale(steps: Experience, rows: Ints) -> float | None:
    """The distance of the scale of next observations from that of the following rows; None if they differ otherwise."""
    rows = rows[:: max(len(rows) // 5000, 1)]
    if len(rows) < 50 or not steps.numbers.shape[1] or steps.numbers.dtype.kind != "f":
        return None
    after, following, before = (
        np.asarray(x, np.float64) for x in (steps.next_numbers[rows], steps.numbers[rows + 1], steps.numbers[rows])
    )
    varies = (following.std(0) > 0) & (after.std(0) > 0)
    if not varies.any() or not (np.isfinite(after).all() and np.isfinite(following).all()):
        return None
    after, following, before = after[:, varies], following[:, varies], before[:, varies]
    centred = after - after.mean(0)
    slope = (centred * (following - following.mean(0))).sum(0) / (centred**2).sum(0)
    offset = following.mean(0) - slope * after.mean(0)
    left = ((following - offset - slope * after) ** 2).mean(0)
    if (left > 0.05 * ((following - before) ** 2).mean(0)).any():
        return None
    return float(np.maximum(np.abs(slope - 1), np.abs(offset) / following.std(0)).max())


def _lead_elsewhere(steps: Experience) -> Bools:
    """True where the next observation of a row is the observation of any row, bool ``[S]``."""
    after = steps.next_obs or {}
    known = digests([leaf.reshape(len(steps), -1) for leaf in steps.obs.values()])
    return np.isin(digests([after[path].reshape(len(steps), -1) for path in steps.obs]), known)


# -- ends and final observations ---------------------------------------------------------------------------------------


@rule("reset-as-final-observation", "autoreset-step-stored", "next-episode-begins-on-the-end")
def next_episode_after_end(steps: Experience) -> Look:
    """Episodes that begin on the very observation that the last one ended on. Two mistakes have this effect."""
    steps.require_order()
    if steps.next_obs is None:
        return (yield from _ignored_steps_by_jump(steps))
    skip_if(offset_of_ends(steps), "ends are flagged one row off")
    findings = list(_after_ends(steps))
    yield from findings
    known = int((steps.ended & steps.follows & ~steps.still).sum())
    if known < FEW and not findings:
        raise Lack(f"fewer than {FEW} episodes end before another stored one, on an observation of their own")
    return max(known, 1)


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
        yield from _of_what_kind(steps, ends, ends & steps.chained, " and ".join(kinds), most)
    elif not known.any():
        yield from _idle_steps(steps)


def _idle_steps(steps: Experience) -> Iterator[Finding]:
    """Ignored steps in data without any flagged end: the few steps that earn exactly nothing, and that move far."""
    idle = (steps.reward == 0) & steps.follows & ~steps.still
    if FEW <= idle.sum() < len(steps) / 10 and _typical(steps, idle) > FAR * _typical(steps, ~idle):
        yield from _ignored_step(
            steps, "likely",
            "steps that earn nothing, unlike all others, jump to another place: the step that the env ignores after an "
            "end (NEXT_STEP autoreset) is stored as a real one, and the end is not flagged", idle)  # fmt: skip


def _ignored_step(steps: Experience, sure: Sureness, what: str, rows: Bools) -> Iterator[Finding]:
    mend = "leave that row out: add(..., mask=~ended), or AutoresetMode.SAME_STEP with final_obs"
    return steps.finding("autoreset-step-stored", sure, what, mend, rows)


def _of_what_kind(steps: Experience, ends: Bools, begun: Bools, kind: str, most: Sureness) -> Iterator[Finding]:
    """Decide which mistake it is. An ignored step moves far and earns nothing. A reset observation is itself far away.

    ``most`` is the most that a finding of a reset observation can be sure of, since a flag may keep it from being used.
    """
    after = _next_rows(begun) & ~steps.ended
    calm = ~steps.ended & ~after
    usual = _typical(steps, calm & (steps.jump > 0))  # most steps may change nothing
    idle = after.any() and (steps.reward[after] == 0).mean() > MOST and (steps.reward[calm] == 0).mean() < 0.5
    moved_after, moved_end = (
        0.0 if _made_elsewhere(steps, rows, calm) else _typical(steps, rows) for rows in (after, begun)
    )
    share = begun.sum() / ends.sum()
    if after.sum() >= FEW and (idle or moved_after > FAR * usual) and moved_after >= moved_end:
        sure: Sureness = "certain" if idle and share > MOST else "likely"
        return _ignored_step(
            steps, sure,
            f"after {kind} episodes the step that the env ignores (NEXT_STEP autoreset) is stored as a real one: it "
            "starts on the final observation and leads into the next episode", after)  # fmt: skip
    if moved_end > FAR * usual:
        if most == "certain" and _always_the_same(steps, _next_rows(begun)):
            most = "likely"  # where all episodes begin alike, one may also end there
        if most != "possible" and _always_the_same(steps, _next_rows(begun)) and _always_the_same(steps, begun):
            # one state that always leads to one other may be a clock that comes round
            return _begins_on_the_end(steps, kind, "possible", begun)
        masked = ", which their flag masks: one-step targets are right" if most == "possible" else ""
        return steps.finding("reset-as-final-observation", most if share > MOST or most == "possible" else "likely",
            f"the observation after {kind} steps is the next episode's first (SAME_STEP autoreset){masked}",
            "store info['final_obs'] as next_obs where an episode ended", begun)  # fmt: skip
    return _begins_on_the_end(steps, kind, "likely" if moved_after > FAR * usual else "possible", begun)


def _begins_on_the_end(steps: Experience, kind: str, sure: Sureness, begun: Bools) -> Iterator[Finding]:
    return steps.finding("next-episode-begins-on-the-end", sure,
        f"episodes begin on the very observation that the {kind} one before ended on: either a step that the env "
        "ignored is stored, or a reset observation stands for the final one"
        + ("" if sure == "likely" else "; or the env goes on from where it ended"),
        "check what the autoreset mode of the env returns at an end, see docs/episode-ends.md", begun)  # fmt: skip


def _made_elsewhere(steps: Experience, rows: Bools, calm: Bools) -> bool:
    """True if most of the moves of these rows are, to the bit, moves of calm rows: the env makes them by itself."""
    if not rows.any() or steps.next_obs is None:
        return False
    size = len(steps)
    leaves = [*steps.obs.values(), *(steps.next_obs[path] for path in steps.obs)]
    moves = digests([leaf.reshape(size, -1) for leaf in leaves])
    return bool(np.isin(moves[rows], moves[calm]).mean() > 0.5)


def _ignored_steps_by_jump(steps: Experience) -> Look:
    """Ignored steps in data without next observations: the row after an end earns nothing and jumps."""
    after = _next_rows(steps.ended & steps.follows) & ~steps.ended & steps.follows
    skip_if(after.sum() < FEW, f"fewer than {FEW} episodes end before another stored one")
    skip_if(not (~steps.ended & ~after & steps.follows).any(), "no step lies within an episode")
    yield from stored_ignored_steps(steps)
    return int(after.sum())


def stored_ignored_steps(steps: Experience) -> list[Finding]:
    """The finding of ignored steps in data without next observations."""
    ends = steps.ended & steps.follows
    after = _next_rows(ends) & ~steps.ended & steps.follows
    calm = ~steps.ended & ~after & steps.follows
    if after.sum() < FEW or not calm.any():
        return []
    idle = (steps.reward[after] == 0).mean() > MOST and (steps.reward[calm] == 0).mean() < 0.5
    if idle and _typical(steps, after) > FAR * _typical(steps, calm) and _typical(steps, ends) < _typical(steps, after):
        what = "the step that the env ignores after an end (NEXT_STEP autoreset) is stored as a real one"
        return list(_ignored_step(steps, "likely", what, after))
    return []


@rule("ends-one-row-off", "jump-inside-an-episode")
def ends_one_row_off(steps: Experience) -> Look:
    """Flags that stand one row before or after the step that ended the episode, or that only jumps show to be wrong."""
    steps.require_order()
    ends, offset = steps.ended & steps.follows, offset_of_ends(steps)
    if not offset and not stored_ignored_steps(steps) and (joined := list(_joined_episodes(steps))):
        yield from joined
        return len(steps)
    skip_if(ends.sum() < FEW, f"fewer than {FEW} episodes end before another stored one")
    if steps.next_obs is None and not steps.numbers.shape[1]:
        raise Lack("without next observations, ends are known by how far numbers jump, and observations are images")
    if offset and not (steps.next_obs is None and stored_ignored_steps(steps)):
        yield from steps.finding("ends-one-row-off", "certain" if steps.next_obs is not None else "likely",
            f"episode ends are flagged one row {'after' if offset > 0 else 'before'} the step that ended: the next "
            "episode begins where no end is flagged",
            "store the flags of the step itself, as step() returned them with its reward", ends)  # fmt: skip
    return int(ends.sum())


def offset_of_ends(steps: Experience) -> int:
    """1 if flags come one row after the steps where the chain breaks, -1 if one row before, 0 if neither."""
    broken, ends = _breaks(steps), steps.ended & steps.follows
    for offset in (1, -1):
        hit = (np.roll(broken, offset) & ends).sum()
        if hit >= FEW and hit > MOST * min(broken.sum(), ends.sum()) and (ends & broken).sum() < hit / 10:
            return offset
    return 0


def _breaks(steps: Experience) -> Bools:
    """True where the chain of observations breaks: by comparison, or, without next observations, by jumps."""
    if steps.next_obs is not None:
        return steps.follows & ~steps.chained
    calm = np.sort(steps.jump[steps.follows])
    if not len(calm):
        return np.zeros(len(steps), np.bool_)
    ends = int((steps.ended & steps.follows).sum())
    bar = FAR * max(float(calm[len(calm) // 2]), float(np.mean(calm[: max(len(calm) - ends, 1)])))
    return steps.follows & (steps.jump > bar)


@rule("truncation-without-final-observation")
def truncation_without_final(steps: Experience) -> Look:
    """Truncated steps without the observation that they ended on, which a learner has to bootstrap from."""
    if steps.truncated is None:
        raise Lack("one flag stands for both kinds of end")
    if steps.next_obs is not None or stored_ignored_steps(steps):  # the rows after begin on final ones
        return len(steps)
    cut = steps.truncated & ~steps.terminated & steps.follows
    values = steps.others.get(("final_value",))
    if values is not None:  # a rollout bootstraps from these, and needs no final observations
        cut &= np.isnan(values.reshape(len(steps), -1)).any(1)
    yield from steps.finding("truncation-without-final-observation", "certain",
        "an episode was cut off and its final observation is not stored: another one, such as the next episode's first "
        "in the following row, would serve as next observation",
        "store the final observation of truncated steps (info['final_obs'])", cut)  # fmt: skip
    return len(steps)


VARIED = 5
"""How many different lengths episodes must have before a limit stands out among them."""

NEAR = 10
"""Episodes up to this many steps shorter than the limit show how many episodes would end there by themselves."""


@rule("time-limit-as-terminal")
def time_limit_as_terminal(steps: Experience, max_episode_steps: int | None = None) -> Look:
    """Episodes that all stop at one length as terminals: most likely a time limit, after which values go on."""
    steps.require_order()
    skip_if(not steps.judge_limits, "rewards hold the values of time limits, or nothing is bootstrapped")
    table = episodes_of(steps)
    whole = table["complete"]
    lengths, last = table["length"][whole], (table["start"] + table["length"] - 1)[whole]
    skip_if(len(lengths) < FEW, f"fewer than {FEW} episodes are stored as a whole")
    limits = [None] if max_episode_steps is None else [max_episode_steps, None]
    findings = [finding for limit in limits for finding in _at_a_limit(steps, lengths, last, limit)]
    # an episode cut off at the longest length shows that time limits are stored as such
    cut = steps.truncated is not None and (steps.truncated[last] & (lengths == lengths.max())).any()
    few = max_episode_steps is None and not cut and len(np.unique(lengths)) <= VARIED
    if few and _all_at_once(steps, lengths, last):
        yield from steps.finding("time-limit-as-terminal", "possible",
            f"all {len(lengths)} episodes terminate after exactly {int(lengths[0])} steps, and observations do not "
            "foretell it: this is a time limit, unless the task itself ends there",
            "store a time limit as truncated, with the final observation, so that its value counts; pass "
            "max_episode_steps, the time limit of the env, to be certain",
            last, len(lengths))  # fmt: skip
        return len(lengths)
    if few:
        raise Lack(f"episodes have too few lengths, such as {int(lengths.max())} steps, for a time limit to stand out "
                    "among them; pass max_episode_steps, the time limit of the env")  # fmt: skip
    yield from findings[:1]
    return len(lengths)


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
    yield from steps.finding("time-limit-as-terminal", "likely" if max_episode_steps is None else "certain",
        f"{count} episodes stop after exactly {limit} steps and are flagged as "
        f"{'done, by one flag for both kinds of end' if steps.truncated is None else 'terminated'}",
        "store the time limit as truncated, with the final observation, so that its value counts",
        last[at_limit], len(lengths))  # fmt: skip


LONG = 20
"""Shorter episodes of one length are more often those of the task."""


def _all_at_once(steps: Experience, lengths: Array, last: Ints) -> bool:
    """True if all episodes terminate after one length, from observations like those of all other steps.

    A clock in the observation foretells the end, and so does a state where all episodes end. Then it is the task's own.
    """
    numbers = steps.numbers
    if np.ptp(lengths) or lengths[0] < LONG or not steps.terminated[last].all() or not numbers.shape[1]:
        return False
    at_end = np.zeros(len(steps), np.bool_)
    at_end[last] = True
    for seen in (numbers, steps.next_numbers if steps.next_obs is not None else numbers):
        ends, others = np.asarray(seen[at_end], np.float64), np.asarray(seen[~at_end], np.float64)
        apart = (ends.min(0) > others.max(0)) | (ends.max(0) < others.min(0))
        # in each number, ends lie much nearer to each other than all steps do
        alike = (np.ptp(ends, 0) < ALIKE * np.ptp(others, 0)) & (np.ptp(others, 0) > 0)
        if apart.any() or alike.any():
            return False
    return True


ALIKE = 0.1
"""Ends within this share of the range of a number lie together."""


def _stands_out(lengths: np.ndarray, limit: int, count: int) -> bool:
    """True if far more episodes end at the limit than just before it, among episodes of many lengths."""
    shorter = lengths[lengths < limit]
    just_shorter = int((shorter >= limit - NEAR).sum())
    return limit > NEAR and len(np.unique(shorter)) >= VARIED and count > 10 * just_shorter / NEAR + 2


def _always_the_same(steps: Experience, rows: Bools) -> bool:
    """True if the observations of these rows are all equal."""
    return all(bool((leaf[rows] == leaf[rows][:1]).all()) for leaf in steps.obs.values())


def _next_rows(rows: Bools) -> Bools:
    """The rows after these."""
    return np.append(False, rows[:-1])


def _typical(steps: Experience, rows: Bools) -> float:
    """The median jump of these rows; 0 if there are none."""
    return float(np.median(steps.jump[rows])) if rows.any() else 0.0


# -- jumps to where episodes begin -------------------------------------------------------------------------------------

ENOUGH = 8
"""How many known beginnings of episodes show where these lie."""

BEYOND = 5.0
"""A jump moves this many times farther than the farthest of all ordinary steps."""

AROUND = 5.0
"""An observation lies among others if it is at most this many usual steps outside of them."""

NARROW = 0.3
"""Episodes begin in a part of the range of a number if they do so in this share of it at most."""


# Where the states before them foretell the jumps, a finding stays "possible". A pole that falls, and a task that goes
# on at its start, leave the same log: of what is unexplained they have 0.22 to 0.50 and 0.28 to 0.44.
def _joined_episodes(steps: Experience) -> Iterator[Finding]:
    """Steps far beyond all others that lead to where episodes begin, though no end is flagged: two episodes in one.

    A jump alone proves nothing: an angle comes round, and a portal leads elsewhere. So a jump also has to begin outside
    of the place where episodes begin, and to lead into it.
    """
    numbers, begins = steps.numbers, steps.begun
    # images and whole numbers may change by any amount in a step; and windows of n steps reach over ends by themselves
    if not numbers.shape[1] or numbers.dtype.kind != "f" or are_whole(numbers) or not np.isfinite(numbers).all():
        return
    # where one flag stands for both kinds of end, a time limit rightly has none
    if begins.sum() < ENOUGH or steps.window > 1 or steps.truncated is None:
        return
    last = steps.ended | ~steps.follows
    inside = ~steps.ended & ~begins & (steps.follows if steps.next_obs is None else True)
    far = np.sort(steps.jump[inside])
    most = max(int(last.sum()) + FEW, len(far) // 20)  # a flag in another row makes one jump
    if len(far) <= 2 * most:
        return
    jumps = inside & (steps.jump > BEYOND * far[len(far) - most - 1])
    rows, calm = np.flatnonzero(jumps), inside & ~jumps
    if len(rows) < FEW:
        return
    around = AROUND * np.abs(steps.next_numbers[calm] - numbers[calm]).mean(0)
    low, high = numbers[begins].min(0), numbers[begins].max(0)
    # where episodes begin all over the range, as at any angle, what lies outside says nothing
    narrow = high - low < NARROW * np.ptp(numbers, 0)
    after, before = ((x >= low - around) & (x <= high + around) for x in (steps.next_numbers[rows], numbers[rows]))
    joined = rows[after.all(1) & ~before[:, narrow].all(1)]
    if len(joined) < FEW or len(joined) <= len(rows) * MOST:
        return
    # the row of a late flag is the one after, or, in a replay, which cannot draw it, none
    late = (last[np.minimum(joined + 1, len(steps) - 1)] | last[joined]).mean() > MOST
    yield from steps.finding("jump-inside-an-episode", "likely" if late else "possible",
        "steps inside an episode jump to where episodes begin, far beyond all other steps: "
        + ("flags follow in the row after, so ends are flagged one row late"
           if late else "an end is missing there, or the env itself goes back"),
        "store the flags of the step itself, and next_observations, which show where an episode goes on",
        joined, len(far))  # fmt: skip


# -- stacks of frames --------------------------------------------------------------------------------------------------


@rule("stack-over-an-end")
def stacks(steps: Experience) -> Look:
    """Stacks of frames, as obs ``[S, K, ...]``, whose first ones at an episode's start are of the episode before."""
    kinds = [(path, kind) for path, leaf in steps.obs.items() if (kind := _stack_of(steps, leaf)) is not None]
    skip_if(not kinds, "observations are no stacks of frames", absent=True)
    ends = np.flatnonzero(steps.ended & steps.follows)
    skip_if(len(ends) < FEW, f"fewer than {FEW} episodes end before another stored one")
    for path, (axis, size, newest_last) in kinds:
        older, newer = _parts(axis, size, newest_last)
        leaf, wrong = steps.obs[path], np.zeros(len(ends), np.bool_)
        first, before = leaf[ends + 1][older], leaf[ends][newer]
        # a padded stack repeats one frame, or holds zeros; and where all frames are alike, nothing shows
        varied, shown = ((x != _one_frame(x, axis, size)).reshape(len(ends), -1).any(1) for x in (first, before))
        for last in (leaf, (steps.next_obs or {}).get(path)):
            if last is not None:
                wrong |= same_rows(first, last[ends][newer])
        wrong &= varied
        if wrong.sum() >= FEW and wrong.sum() > shown.sum() / 2:
            yield from steps.finding("stack-over-an-end", "certain",
                f"the first stacks of an episode in '{dotted(('obs', *path))}' hold frames of the episode before",
                "empty the stack at each reset; relive.FrameStack stacks single frames when it reads",
                ends[wrong] + 1, len(ends))  # fmt: skip
    return len(ends)


def _stack_of(steps: Experience, leaf: Array) -> tuple[int, int, bool] | None:
    """The axis of a stack, the length of a frame along it, and whether the newest frame is the last; or None."""
    rows = np.flatnonzero(steps.inner & ~steps.still)
    rows = rows[:: max(len(rows) // 500, 1)]
    if leaf.ndim < 2:
        return None
    here, there = leaf[rows], leaf[rows + 1]
    for axis in (1,) if leaf.ndim < 3 else (1, leaf.ndim - 1):
        count = leaf.shape[axis]
        for size in (1,) if leaf.ndim > 2 else range(1, count // 2 + 1):
            if count % size or not 2 <= count // size <= 16:
                continue
            for newest_last in (True, False):
                older, newer = _parts(axis, size, newest_last)
                varied = ~same_rows(here[older], here[newer])
                if varied.sum() >= 20 and same_rows(there[older], here[newer])[varied].mean() > 0.95:
                    return axis, size, newest_last
    return None


def _parts(axis: int, size: int, newest_last: bool) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Indices of stacks ``[K, ...]``: of all frames but the newest, and of all frames but the oldest."""
    first, last = ((slice(None),) * axis + (frames,) for frames in (slice(None, -size), slice(size, None)))
    return (first, last) if newest_last else (last, first)


def _one_frame(frames: Array, axis: int, size: int) -> Array:
    """The first frame of each stack again and again, in the shape of ``frames``."""
    one = frames[(slice(None),) * axis + (slice(None, size),)]
    return np.concatenate([one] * (frames.shape[axis] // size), axis)


# -- rows that are stored twice ----------------------------------------------------------------------------------------

OVER_ENDS = 2
"""How many ends of episodes a run of copies must go beyond."""


# Deterministic environments repeat their episodes. So rows that come again count only if whole runs of them do, over
# two ends or side by side.
@rule("duplicate-rows")
def duplicate_rows(steps: Experience) -> Look:
    """Steps that are stored more than once. Observations must be continuous, so that none comes twice by chance."""
    numbers = steps.numbers
    skip_if(len(steps) < 20, "fewer than 20 steps are stored")
    if not numbers.shape[1] or numbers.dtype.kind != "f" or are_whole(numbers):
        raise Lack("observations are images or whole numbers, which may well come again")
    if _may_repeat([numbers, steps.reward]):
        yield from _repeated(steps)
    return len(steps)


def _may_repeat(columns: list[Array]) -> bool:
    """True if a tenth of all rows may repeat others, by the first few numbers of each row."""
    ordered = np.sort(digests([column.reshape(len(column), -1)[:, :3] for column in columns]))
    return int(np.count_nonzero(ordered[1:] == ordered[:-1])) > len(ordered) / 10


def _repeated(steps: Experience) -> Iterator[Finding]:
    numbers = steps.numbers
    digest = digests([numbers, *steps.action.values(), steps.reward, steps.next_numbers])
    _, first, kind, counts = np.unique(digest, return_index=True, return_inverse=True, return_counts=True)
    again = ~steps.still & (steps.jump > 0)
    again[first] = False
    again &= _in_step(steps, np.arange(len(steps)) - first[kind.reshape(-1)], again)
    if again.sum() > len(steps) / 10:
        yield from steps.finding("duplicate-rows", "likely",
            f"rows repeat others to the bit, up to {counts.max()} times",
            "look for steps that are added twice, a save that is loaded into a buffer that has it already, or "
            "environments with one seed", again)  # fmt: skip


def _in_step(steps: Experience, back: Ints, again: Bools) -> Bools:
    """True where a repeated row is a real copy: rows repeat their first copies beyond the end of an episode, or come
    right after them.

    In a deterministic env the same episode comes again and again, too, but each time after another episode.

    Args:
        steps: the steps.
        back: how many rows before each row its first copy lies.
        again: which rows are copies.
    """
    begins = np.append(True, (back[1:] != back[:-1]) | ~again[1:] | ~again[:-1])
    run = np.cumsum(begins) - 1
    inner = steps.ended & again & ~np.append(begins[1:], True)  # an end, after which the run goes on
    return (np.bincount(run, inner)[run] >= OVER_ENDS) | (back == 1)


# -- n-step windows ----------------------------------------------------------------------------------------------------

SYSTEMATIC = 0.5
"""The share of the windows that begin equally long before an end, and run over it, before there is a finding."""


@rule("n-step-over-an-end", "n-step-cut-short", "n-step-tail-missing", "n-step-flag-of-first-step")
def windows(steps: Experience) -> Look:
    """Windows over an end, cut short by another env's end, with the flag of their first step, or missing at an end."""
    if steps.next_obs is None:
        raise Lack("no next observations are stored, which would show n-step transitions", absent=True)
    steps.require_order()
    skip_if(steps.window < 2, "rows are transitions of one step", absent=True)
    skip_if(lagging(steps), "observations are those of the row before")
    n = steps.window
    ends_within, crossing = np.zeros(len(steps), np.bool_), np.zeros(len(steps), np.bool_)
    last = steps.ended.copy()  # of episodes: in a row that ends its window at the same place, the flag is the window's
    last[:-1] &= ~(steps.ended[1:] & _lead_to_one(steps, slice(-1), slice(1, None)))
    for k in range(n - 1):  # an end before the window's last step
        ends_within[: len(steps) - k] |= last[k:]
    reach = steps.reaches(n)
    crossing[: len(steps) - n] = reach & ends_within[: len(steps) - n]
    # where observations come again and again, a right window may lead to the one n rows on by chance
    for k in range(1, n - 1):
        crossing[:-k] &= ~(last[k:] & _lead_to_one(steps, slice(-k), slice(k, None)))
    begins = len(steps) - n
    shares = [crossing[:begins][last[k : begins + k]].mean() for k in range(n - 1) if last[k : begins + k].any()]
    if crossing.sum() >= FEW and max(shares) > SYSTEMATIC:
        yield from steps.finding("n-step-over-an-end", "certain",
            f"rows are {n}-step transitions, and windows run over an episode's end: the next observation, and perhaps "
            "some rewards, are of another episode",
            "stop a window at terminated or truncated, with the discount of the steps it has", crossing)  # fmt: skip
    yield from _cut_short(steps, n)
    yield from _tails(steps, n)
    yield from _flags_of_first_step(steps, n)
    return len(steps)


def _cut_short(steps: Experience, n: int) -> Iterator[Finding]:
    """Windows of fewer than n steps, though neither an end of their env nor its newest row lies in them.

    That is no mistake where a discount is stored with each window.
    """
    if ("discount",) in steps.others:
        return
    short = np.zeros(len(steps), np.bool_)
    open_ = ~steps.ended & steps.follows
    for k in range(1, n):
        size = len(steps) - n
        joined = np.logical_and.reduce([open_[j : size + j] for j in range(n)])
        short[:size] |= joined & steps.reaches(k)[:size] & ~steps.reaches(n) & ~steps.still[:size]
    if short.sum() >= FEW:
        yield from steps.finding("n-step-cut-short", "certain",
            f"rows are {n}-step transitions, and some windows stop after fewer steps though their episode goes on, as "
            "where another environment's end cuts all windows: a discount of gamma ** n is wrong there",
            "cut each environment's windows at its own ends, and store the discount of the steps summed",
            short)  # fmt: skip


def _tails(steps: Experience, n: int) -> Iterator[Finding]:
    """Episodes whose last n windows do not all lead to the final observation."""
    ends = np.flatnonzero(steps.ended & steps.follows & ~steps.still & np.append(False, steps.follows[:-1]))
    ends = ends[~steps.ended[ends - 1] & (ends + n < len(steps))]  # the first window that reaches the end
    reached = np.zeros(len(steps), np.bool_)
    for k in range(1, n + 1):
        reached[: len(steps) - k] |= steps.reaches(k)
    ends = ends[~reached[ends] & ~_lead_to_one(steps, ends, ends - 1)]  # of others, the flags are those of first steps
    if len(ends) < FEW:
        return
    joined, count = np.ones(len(ends), np.bool_), np.ones(len(ends), np.int64)
    for k in range(1, n):
        joined &= steps.ended[ends + k] & _lead_to_one(steps, ends, ends + k)
        count += joined
    single, leaks = (count == 1) & ~steps.ended[ends + 1], (count == n - 1) & ~steps.ended[ends + n - 1]
    if single.mean() > MOST:
        yield from steps.finding("n-step-tail-missing", "likely",
            f"rows are {n}-step transitions, and of each episode one row alone leads to the final observation: no "
            f"window begins at the last {n - 1} steps",
            "at an end, also store the windows that begin at its last n - 1 steps, with fewer rewards each",
            ends[single], len(ends))  # fmt: skip
    elif leaks.mean() > MOST:
        yield from steps.finding("n-step-over-an-end", "likely",
            f"rows are {n}-step transitions, and the window that begins at an episode's last step does not stop there: "
            "it runs on into the next episode",
            "look at the flag of a window's first step, too", ends[leaks] + n - 1, len(ends))  # fmt: skip


def _flags_of_first_step(steps: Experience, n: int) -> Iterator[Finding]:
    """Windows that stop at an end without its flag: their next observation is that of an ended row after them."""
    lost = np.zeros(len(steps), np.bool_)
    open_ = ~steps.ended & steps.follows
    for k in range(1, n):
        size = len(steps) - k
        joined = np.logical_and.reduce([open_[j : size + j] for j in range(k)])
        joined &= _lead_to_one(steps, slice(size), slice(k, None))
        lost[:size] |= joined & steps.terminated[k:] & ~steps.still[:size]
    if lost.sum() >= FEW:
        yield from steps.finding("n-step-flag-of-first-step", "certain",
            f"rows are {n}-step transitions whose next observation is a terminal one while terminated is that of their "
            "first step: a learner bootstraps from the end", "store terminated of the window's last step",
            lost)  # fmt: skip


def _lead_to_one(steps: Experience, rows: slice | Ints, others: slice | Ints) -> Bools:
    """True where rows ``[K]`` have the next observations of ``others``, bool ``[K]``."""
    return np.logical_and.reduce([same_rows(leaf[rows], leaf[others]) for leaf in (steps.next_obs or {}).values()])
