"""Mutations: one wrong line at a time in a copy of the source, each of which a quick test has to notice.

``make mutations`` runs them all, ``python tests/mutations.py crosses`` those whose name contains "crosses". A mutation
whose line is no longer in the source is an error, so the list cannot go stale unseen. For a line of C++, what it
concerns of the core is compiled again.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
SECONDS = 900
"""After so long, the tests are taken to hang: that is noticed as well."""


class Mutation(NamedTuple):
    """A line of the source and what it is changed to."""

    name: str
    """What goes wrong then, in a few words."""
    file: str
    """Where, below ``src/relive``; C++ below ``src/core``."""
    old: str
    """Text that occurs once in the file."""
    new: str
    tests: str
    """Folders and files below ``tests`` that have to notice, the likeliest first."""

    @property
    def compiled(self) -> bool:
        """Whether it is C++, so that the core has to be built."""
        return self.file.endswith((".cpp", ".hpp"))

    @property
    def path(self) -> str:
        """Where, below ``src``."""
        return f"{'core' if self.compiled else 'relive'}/{self.file}"


MUTATIONS = [
    # -- looking at what is stored: how often rows were drawn
    Mutation(
        "counts that are loaded add to those that are there",
        "look/monitor.py",
        "        self.by_place[:] = 0\n",
        "",
        "look/test_monitor.py",
    ),
    Mutation(
        "an overwritten row keeps the draws of the row before it",
        "look/monitor.py",
        ".places(ring.rows)] = 0",
        ".places(ring.rows)] += 0",
        "look/test_monitor.py",
    ),
    Mutation(
        "steps that cannot be drawn count as never drawn",
        "look/experience.py",
        "steps.draws[steps.draws >= 0]",
        "np.maximum(steps.draws, 0)",
        "look/test_monitor.py",
    ),
    Mutation(
        "audit: n-step windows that stop at an end count as wrong",
        "look/audit.py",
        "    goes_on = (~steps.ended & steps.follows)[within]",
        "    goes_on = steps.follows[within]",
        "look/test_audit.py look/test_traps.py look/test_right_collectors.py",
    ),
    Mutation(
        "audit: sequences may go over the seam",
        "look/audit.py",
        " & (there == here + 1)",
        "",
        "look/test_audit.py look/test_traps.py look/test_right_collectors.py",
    ),
    Mutation(
        "audit: a goal of the next episode counts as the row's own",
        "look/audit.py",
        "[episode[rows], episode[rows] + 1]",
        "[episode[rows], episode[rows] + 2]",
        "look/test_audit.py look/test_traps.py look/test_right_collectors.py",
    ),
    # -- exchange: the formats of other libraries
    Mutation(
        "an RLDS episode that terminated counts as truncated",
        "exchange/rlds.py",
        "terminated[-1], truncated[-1] = terminal[-1], not terminal[-1]",
        "terminated[-1], truncated[-1] = not terminal[-1], terminal[-1]",
        "exchange/test_rlds.py",
    ),
    Mutation(
        "a final observation of LeRobot comes after the first frame",
        "exchange/lerobot.py",
        "after[of.name][table.bounds[1:] - 1] = last",
        "after[of.name][table.bounds[:-1]] = last",
        "exchange/test_lerobot.py",
    ),
    Mutation(
        "a full ring of TorchRL is read from its first row on",
        "exchange/torchrl.py",
        "_read(entry, rows, first % batch[0])",
        "_read(entry, rows, 0)",
        "exchange/test_torchrl.py",
    ),
    Mutation(
        "a storage of TorchRL that names its envs is put in order by observations",
        "look/readers.py",
        "        if _goes_on(stated) or not _goes_on(experience):",
        "        if False:",
        "exchange/test_torchrl.py look/test_readers.py",
    ),
    Mutation(
        "a ring of Stable-Baselines3 that saves memory keeps a step whose observation is lost",
        "look/readers.py",
        "buffer.full, slim and buffer.full)",
        "buffer.full)",
        "exchange/test_stable_baselines3.py look/test_readers.py",
    ),
    Mutation(
        "a step is joined to one of another env that begins on what it led to",
        "exchange/log.py",
        "    return truncated | running",
        "    return truncated",
        "exchange/test_convert.py",
    ),
    Mutation(
        "flat arrays: NaN in an observation cuts the episode",
        "replay/arrays.py",
        " & ~((here != here) & (there != there))",
        "",
        "replay/test_arrays.py",
    ),
    Mutation(
        "flat arrays: a terminal that is truncated, too, is left out without next observations",
        "replay/arrays.py",
        "(self.truncated & ~self.terminated) | self.cut if",
        "self.truncated | self.cut if",
        "replay/test_arrays.py",
    ),
    Mutation(
        "a pickle makes room for bytes that are not there",
        "exchange/stable_baselines3.py",
        "if not 0 <= size <= self._left:",
        "if size < 0:",
        "exchange/test_stable_baselines3.py",
    ),
    Mutation(
        "a pickle may name anything",
        "exchange/stable_baselines3.py",
        'self._known.fullmatch(f"{module}:{name}")',
        "self._known",
        "exchange/test_stable_baselines3.py",
    ),
    Mutation(
        "LeRobot: frames of later episodes are counted from 0 again",
        "exchange/lerobot.py",
        '"index": frame + first',
        '"index": frame + 0 * first',
        "exchange/test_lerobot.py",
    ),
    Mutation(
        "LeRobot: all frames go into one file",
        "exchange/lerobot.py",
        "if not low and self._bytes >= FILE_BYTES:",
        "if not low and self._frames is None:",
        "exchange/test_lerobot.py",
    ),
    Mutation(
        "LeRobot: the least of all frames is that of the first episode",
        "exchange/lerobot.py",
        'np.minimum(one["min"], other["min"])',
        'one["min"]',
        "exchange/test_lerobot.py",
    ),
    Mutation(
        "LeRobot: the spread of all frames lacks that between episodes",
        "exchange/lerobot.py",
        'stats["std"] ** 2 + (stats["mean"] - mean) ** 2',
        'stats["std"] ** 2',
        "exchange/test_lerobot.py",
    ),
    Mutation(
        "Minari: an episode that was interrupted has no end",
        "exchange/minari.py",
        "truncated[-1] |= not episode.terminated[-1]",
        "truncated[-1] |= False",
        "exchange/test_minari.py",
    ),
    Mutation(
        "Minari: the largest action is not in the space",
        "exchange/minari.py",
        "max(most + 1, 2)",
        "max(most, 2)",
        "exchange/test_minari.py",
    ),
    Mutation(
        "a data set loses observations that are not those of the next step",
        "exchange/log.py",
        "if own and not (same",
        "if own and False and not (same",
        "exchange/test_lerobot.py",
    ),
    Mutation(
        "Velora: a file's name does not give the prefix",
        "exchange/velora.py",
        "folder.parent, folder.name.removesuffix(STATE)",
        "folder.parent, prefix",
        "exchange/test_velora.py",
    ),
    # -- FastTD3's buffer
    Mutation(
        "FastTD3: a reset in mid-episode is no end",
        "compat/fasttd3.py",
        'self._store(newest["truncated"] | (apart & ~newest["terminated"]))',
        'self._store(newest["truncated"])',
        "compat/test_fasttd3.py",
    ),
    Mutation(
        "FastTD3: a truncated step is a terminal as well",
        "compat/fasttd3.py",
        '"terminated": done & ~truncated,',
        '"terminated": done,',
        "look/test_readers.py",
    ),
    Mutation(
        "FastTD3: the newest step is what the env wrote last",
        "compat/fasttd3.py",
        "copy_all(_leaves(newest), _leaves(step))",
        "newest.update(step)",
        "compat/test_fasttd3.py",
    ),
    Mutation(
        "FastTD3: an observation with NaN never goes on",
        "compat/fasttd3.py",
        "apart = one.view(torch.int32) != other.view(torch.int32)",
        "apart = one != other",
        "compat/test_fasttd3.py",
    ),
    Mutation(
        "FastTD3: one row is too few for the newest step",
        "compat/fasttd3.py",
        "rows = max(buffer_size + 1, FEWEST_ROWS)",
        "rows = max(buffer_size, FEWEST_ROWS)",
        "compat/test_fasttd3.py",
    ),
    # -- checks of episode ends and of reused arrays
    Mutation(
        "ends: the flags of steps that are left out are believed",
        "steps/ends.py",
        "ends = terminated | truncated if mask is None else (terminated | truncated) & mask",
        "ends = terminated | truncated",
        "replay/test_ends.py",
    ),
    Mutation(
        "ends: a step that is left out begins the next episode",
        "steps/ends.py",
        "envs[since:] == env if mask is None else (envs[since:] == env) & mask[since:]",
        "envs[since:] == env",
        "replay/test_ends.py",
    ),
    Mutation(
        "ends: the next episode is that of any env",
        "steps/ends.py",
        "(envs[since:] == env) & mask[since:])",
        "mask[since:])",
        "replay/test_ends.py",
    ),
    Mutation(
        "ends: an episode that stood still counts",
        "steps/ends.py",
        "            if ended_on != _bytes(obs, row, self._dtypes):\n",
        "            if ended_on:\n",
        "replay/test_ends.py",
    ),
    Mutation(
        "ends: a final observation waits for ever",
        "steps/ends.py",
        "            self.ended_on.pop(env, None)\n",
        "",
        "replay/test_ends.py",
    ),
    Mutation(
        "ends: two alike are enough",
        "steps/ends.py",
        "if self._alike == EPISODES_TO_WARN:",
        "if self._alike == EPISODES_TO_WARN - 1:",
        "replay/test_ends.py",
    ),
    Mutation(
        "ends: the check goes on for ever",
        "steps/ends.py",
        "return self._looked < MOST or bool(self.ended_on)",
        "return True",
        "replay/test_ends.py",
    ),
    Mutation(
        "reused arrays: the last step of an episode counts",
        "steps/ends.py",
        "if (mask is not None and not mask[row]) or terminated[row] or truncated[row]:",
        "if mask is not None and not mask[row]:",
        "replay/test_reused_arrays.py",
    ),
    Mutation(
        "reused arrays: a step that is left out counts",
        "steps/ends.py",
        "if (mask is not None and not mask[row]) or terminated[row] or truncated[row]:",
        "if terminated[row] or truncated[row]:",
        "replay/test_reused_arrays.py",
    ),
    Mutation(
        "reused arrays: an episode that was broken off goes on",
        "steps/ends.py",
        " and (under_way is None or under_way[env]):",
        ":",
        "replay/test_reused_arrays.py",
    ),
    Mutation(
        "reused arrays: arrays that only share memory with the step before are an error",
        "steps/ends.py",
        "self._sure += reused and shared and before_shared and moved > 0",
        "self._sure += reused and moved > 0",
        "replay/test_reused_arrays.py",
    ),
    Mutation(
        "reused arrays: a next observation that may be anything counts",
        "steps/ends.py",
        "(reused or self._all_read)",
        "True",
        "replay/test_reused_arrays.py",
    ),
    # -- replays on a device
    Mutation(
        "on a device, errors of rows that are gone raise the largest",
        "device/priorities.py",
        "torch.where(accepted, sizes, 0.0).max()",
        "torch.where(right, sizes, 0.0).max()",
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, wrong errors of rows that are gone count as late",
        "device/priorities.py",
        "late = (right & ~able).sum()",
        "late = (~able).sum()",
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, errors of rows that are gone count as wrong",
        "device/priorities.py",
        "self.counts[1].add_((~right).sum())",
        "self.counts[1].add_((~taken).sum())",
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, an index that was never issued is late",
        "device/priorities.py",
        "right = issued & (weights <= self.heaviest)",
        "right = (index >= 0) & (weights <= self.heaviest)",
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, the first of several errors counts",
        "device/priorities.py",
        'torch.full_like(order, -1))\n        self.newest.scatter_reduce_(0, places, order, "amax")',
        'torch.full_like(order, len(index)))\n        self.newest.scatter_reduce_(0, places, order, "amin")',
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, new rows have the error 1",
        "device/priorities.py",
        "torch.where(torch.isnan(self.default), self.largest, self.default)",
        "torch.where(torch.isnan(self.default), 1.0, self.default)",
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, rows that are overwritten keep their weight",
        "device/priorities.py",
        "torch.where(added.completed_now == dummy_row, added.places, dummy_row)",
        "torch.full_like(added.completed_now, dummy_row)",
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, boundary rows keep the weight of what lay there",
        "device/priorities.py",
        "added.places, dummy_row), added.finals])",
        "added.places, dummy_row), added.completed_now])",
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, a schedule of weights goes on beyond its end",
        "device/priorities.py",
        "torch.clamp(self.draws / until, max=1.0)",
        "self.draws / until",
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, infinite rewards are not counted",
        "device/ring.py",
        "(~torch.isfinite(reward)).sum()",
        "torch.isnan(reward).sum()",
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, a final observation goes to the row of the step",
        "device/ring.py",
        "final = torch.where(done, base + (number + 1) % self.rows, dummy_row)",
        "final = torch.where(done, place, dummy_row)",
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, a row is complete although it begins an episode",
        "device/ring.py",
        "completes = index > 0  #",
        "completes = number > 0  #",
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, a terminal has a discount",
        "device/ring.py",
        "torch.where(ended, 0.0, discount).to(torch.float32)",
        "discount.to(torch.float32)",
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, a stack goes back beyond its episode",
        "device/ring.py",
        "torch.minimum(back, index)",
        "back",
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, frames before an episode are those of the row before",
        "device/ring.py",
        "torch.where(back <= index, frames, self.dummy_row - 1)",
        "torch.where(back <= index + 1, frames, self.dummy_row - 1)",
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, a row that was overwritten is found",
        "device/ring.py",
        "(number < self.head[env]) & (number >= self.oldest[env])",
        "(number < self.head[env])",
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, history that was overwritten does not count",
        "device/ring.py",
        "able = able & (spots.numbers - behind >= self.oldest[spots.envs])",
        "able = able & (spots.numbers - behind >= 0)",
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, a mass beyond all children goes to the first",
        "device/tree.py",
        "child = torch.where(child == FANOUT, positive, child)",
        "child = torch.where(child == FANOUT, 0, child)",
        "device",
    ),
    Mutation(
        "on a device, a part of the total is drawn from its beginning on",
        "device/tree.py",
        "u = (item.to(FLOAT64) + u) / (float",
        "u = (item.to(FLOAT64) + u * 0.5) / (float",
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, a sum of the tree leaves out its last child",
        "device/tree.py",
        "_summed(children)[-1])",
        "_summed(children)[-2])",
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, the new goals are those of the next episode",
        "device/goals.py",
        "end = number + ((self.ends[self._entry(spots)] - number) & 0xFFFFFFFF)",
        "end = number + 1 + ((self.ends[self._entry(spots)] - number) & 0xFFFFFFFF)",
        "device/test_hindsight.py",
    ),
    Mutation(
        "on a device, a later goal may be the row's own",
        "device/goals.py",
        "FUTURE: (number + 1, end)",
        "FUTURE: (number, end)",
        "device/test_hindsight.py",
    ),
    Mutation(
        "on a device, goals of the past begin at a row that is gone",
        "device/goals.py",
        "torch.minimum(ring.step[spots.places].to(INT64), number - oldest)",
        "ring.step[spots.places].to(INT64)",
        "device/test_hindsight.py",
    ),
    Mutation(
        "on a device, episodes that go on get other goals",
        "device/goals.py",
        "relabelled = relabelled & ~goes_on",
        "relabelled = relabelled & True",
        "device/test_hindsight.py",
    ),
    Mutation(
        "on a device, a window with another goal goes on after its end",
        "device/goals.py",
        "~(terminated | truncated)[:, :-1]",
        "~truncated[:, :-1]",
        "device/test_hindsight.py",
    ),
    Mutation(
        "on a device, rewards beyond a window count as not finite",
        "device/goals.py",
        "(within & choice.relabelled[:, None] & ~torch.isfinite(reward)).sum()",
        "(choice.relabelled[:, None] & ~torch.isfinite(reward)).sum()",
        "device/test_hindsight.py",
    ),
    Mutation(
        "on a device, the newest transitions are one too many",
        "device/recent.py",
        ".sum(0) >= newest",
        ".sum(0) > newest",
        "device/test_recent.py",
    ),
    Mutation(
        "on a device, fewer than the least are the newest",
        "device/recent.py",
        "newest = torch.maximum((stored.to(FLOAT64) * self.share).to(INT64), self.least)",
        "newest = (stored.to(FLOAT64) * self.share).to(INT64)",
        "device/test_recent.py",
    ),
    Mutation(
        "on a device, a sequence's padding is not an end",
        "device/sequences.py",
        "True, field)",
        "False, field)",
        "device/test_sequences.py",
    ),
    Mutation(
        "on a device, rewards beyond a sequence count where rows are not complete",
        "device/sequences.py",
        " & (ring.stamp[places] >= 0))",
        ")",
        "device/test_sequences.py",
    ),
    Mutation(
        "on a device, a sequence's mask has its burn-in",
        "device/sequences.py",
        "(each(burn_in) <= t) & (t < each(own))",
        "t < each(own)",
        "device/test_sequences.py",
    ),
    Mutation(
        "on a device, windows that lost their history keep their weight",
        "device/windows.py",
        "< oldest\n        tree.note(",
        "< oldest - 1\n        tree.note(",
        "device/test_sequences.py",
    ),
    Mutation(
        "on a device, all windows of an episode have a weight",
        "device/windows.py",
        "            groups.append(before)\n",
        "            before = before\n",
        "device/test_sequences.py",
    ),
    Mutation(
        "on a device, a window of steps with next observations of their own goes on after an end",
        "device/ring.py",
        "joins = ~((self.terminated[here] > 0) | (self.truncated[here] > 0)) & (self.stamp[after] >= 0)\n"
        "            if own:\n"
        "                joins = joins & (spots.numbers + ahead[1:n] < self.head[spots.envs])"
        " & (self.step[after] != 0)",
        "joins = self.stamp[after] >= 0\n"
        "            if own:\n"
        "                joins = joins & (spots.numbers + ahead[1:n] < self.head[spots.envs])",
        "device/test_replay.py",
    ),
    Mutation(
        "on a device, a window goes on in the rows of a ring ago",
        "device/ring.py",
        "joins & (spots.numbers + ahead[1:n] < self.head[spots.envs])",
        "joins & (ahead[1:n] > 0)",
        "device/test_replay.py",
    ),
    # -- drop-ins for other libraries
    Mutation(
        "EmbodiChain: wide rows are copied in the reverse order of envs",
        "compat/embodichain.py",
        'first, lengths = torch.arange(envs, device="cpu"), torch',
        'first, lengths = torch.arange(envs, device="cpu").flip(0), torch',
        "compat/test_embodichain.py",
    ),
    Mutation(
        "EmbodiChain: a step that is terminal and truncated is bootstrapped",
        "compat/embodichain.py",
        "truncated = truncated & ~rollout",
        "truncated = truncated | ~rollout",
        "compat/test_embodichain.py",
    ),
    Mutation(
        "EmbodiChain: a terminal that is truncated as well is bootstrapped",
        "compat/embodichain.py",
        '            truncated = truncated & ~rollout["terminated"][:, :-1].bool().T\n',
        "            truncated = truncated & True\n",
        "compat/test_embodichain.py",
    ),
    Mutation(
        "EmbodiChain: padding keeps what was written there",
        "compat/embodichain.py",
        "                padding[name].zero_()\n",
        "                padding[name].clone()\n",
        "compat/test_embodichain.py",
    ),
    Mutation(
        "EmbodiChain: what the critic sees last is zeroed",
        "compat/embodichain.py",
        'UNPADDED = ("obs", "critic_obs", "value"',
        'UNPADDED = ("obs", "value"',
        "compat/test_embodichain.py",
    ),
    Mutation(
        "EmbodiChain: a time limit that is valued by its own value needs a final value",
        "compat/embodichain.py",
        'value[:-1] if truncation == "own_value" else',
        'value[:-1] if truncation == "never" else',
        "compat/test_embodichain.py",
    ),
    Mutation(
        "EmbodiChain: one env's flat rollout is the storage",
        "compat/embodichain.py",
        "return steps.clone(memory_format=torch.contiguous_format).flatten(0, 1)",
        "return steps.flatten(0, 1)",
        "compat/test_embodichain.py",
    ),
    Mutation(
        "rsl_rl: a time-out that is no done cuts off",
        "compat/rsl_rl/storage.py",
        "time_outs, torch.bool) & dones",
        "time_outs, torch.bool)",
        "compat/test_rsl_rl.py",
    ),
    Mutation(
        "rsl_rl: recurrent batches are shuffled though they should not be",
        "compat/rsl_rl/storage.py",
        "epochs=num_epochs, shuffle=self.reshuffle_each_epoch",
        "epochs=num_epochs, shuffle=True",
        "compat/test_rsl_rl.py",
    ),
    Mutation(
        "rsl_rl: epochs are shuffled anew though they should not be",
        "compat/rsl_rl/storage.py",
        "reshuffle=self.reshuffle_each_epoch, fields",
        "reshuffle=True, fields",
        "compat/test_rsl_rl.py",
    ),
    Mutation(
        "rsl_rl: a time-out is a terminal",
        "compat/rsl_rl/storage.py",
        '"terminated": terminated & ~truncated,',
        '"terminated": terminated,',
        "compat/test_rsl_rl.py",
    ),
    Mutation(
        "rsl_rl: trajectories go on after a done",
        "compat/rsl_rl/storage.py",
        "    ends[-1:] = True  #",
        "    ends[:] = ends.any()  #",
        "compat/test_rsl_rl.py",
    ),
    Mutation(
        "rsl_rl: a state that a transition lacks is the one before",
        "compat/rsl_rl/storage.py",
        "return tuple(torch.zeros_like(column[0]) for column",
        "return tuple(torch.ones_like(column[0]) for column",
        "compat/test_rsl_rl.py",
    ),
    Mutation(
        "Velora: a full file at position 1 goes on at 0",
        "compat/velora.py",
        "self.capacity and original.position:",
        "self.capacity and original.position > 1:",
        "compat/test_velora.py",
    ),
    Mutation(
        "Velora: warm stores the steps that reset an env",
        "compat/velora.py",
        "real = (~ended).nonzero()",
        "real = (ended | ~ended).nonzero()",
        "compat/test_velora.py",
    ),
    Mutation(
        "Velora: an episode goes on with the recurrent state of the one before",
        "compat/velora.py",
        "hidden = torch.where(ended.unsqueeze(1), 0.0, hidden)",
        "hidden = torch.where(ended.unsqueeze(1), hidden, hidden)",
        "compat/test_velora.py",
    ),
    Mutation(
        "Velora: more steps than were asked for are stored",
        "compat/velora.py",
        ".squeeze(1)[:count]",
        ".squeeze(1)",
        "compat/test_velora.py",
    ),
    Mutation(
        "Velora: a truncated step of a rollout is a terminal",
        "compat/velora.py",
        "terminated=done & ~cut",
        "terminated=done",
        "compat/test_velora.py",
    ),
    Mutation(
        "Velora: a flipped bit passes",
        "compat/velora.py",
        'if f"{crc:08x}" != notes[CHECKSUM]:',
        'if len(f"{crc:08x}") != len(notes[CHECKSUM]):',
        "compat/test_velora.py",
    ),
    Mutation(
        "AgileRL: truncations that are no dones cut off",
        "compat/agilerl.py",
        'ended & vector("truncated"',
        'vector("truncated"',
        "compat/test_agilerl.py",
    ),
    Mutation(
        "AgileRL: the newest step counts as truncated though it goes on",
        "compat/agilerl.py",
        "        truncated[-1] |= done[-1]\n",
        "        truncated[-1] |= True\n",
        "compat/test_agilerl.py",
    ),
    Mutation(
        "AgileRL: the step after a done is stored",
        "compat/agilerl.py",
        "        real = ~self._ended\n        if self.autoreset_mode is not None:\n            step",
        "        real = ~self._ended | True\n        if self.autoreset_mode is not None:\n            step",
        "compat/test_agilerl.py",
    ),
    Mutation(
        "AgileRL: a reset after a reset is left out",
        "compat/agilerl.py",
        "self._ended = ended & real if",
        "self._ended = ended if",
        "compat/test_agilerl.py",
    ),
    Mutation(
        "AgileRL: final values that are given are lost",
        "compat/agilerl.py",
        "torch.where(unknown, value[1:][after], final[after])",
        "value[1:][after]",
        "compat/test_agilerl.py",
    ),
    Mutation(
        "AgileRL: the rows before the position are the oldest",
        "compat/agilerl.py",
        "again = pos % self.capacity if full else 0",
        "again = 0 if full else 0",
        "compat/test_from_original.py",
    ),
    Mutation(
        "AgileRL: sequences of a minibatch come with the steps of others",
        "compat/agilerl.py",
        "rows = index.index_select(0, chosen)[batch",
        "rows = index.index_select(0, chosen.flip(0))[batch",
        "compat/test_agilerl_sequences.py",
    ),
    Mutation(
        "PyTorchRL: steps that do not follow are summed",
        "compat/pytorchrl.py",
        'steps["truncated"][:-1] = breaks(',
        'steps["truncated"][:-1] &= breaks(',
        "compat/test_pytorchrl.py",
    ),
    Mutation(
        "PyTorchRL: single steps are summed though they do not follow",
        "compat/pytorchrl.py",
        "            flags[env * rows + last // self.num_envs % rows] = True\n",
        "            flags[env * rows + last // self.num_envs % rows] |= False\n",
        "compat/test_pytorchrl.py",
    ),
    Mutation(
        "PyTorchRL: an episode's length includes the one before",
        "compat/pytorchrl.py",
        "            self._lengths[ended] = 0\n",
        "            self._lengths[ended] += 0\n",
        "compat/test_pytorchrl.py",
    ),
    Mutation(
        "PyTorchRL: the memory is read in the order of its rows",
        "compat/pytorchrl.py",
        "number = (positions - self.step + size) % self.max_size",
        "number = (positions + 0 * self.step) % self.max_size",
        "compat/test_pytorchrl.py",
    ),
    Mutation(
        "PyTorchRL: targets of sequences mix episodes",
        "compat/pytorchrl.py",
        "np.where(flags[..., n - 1 :] > flags[..., :length], np.inf, n)",
        "np.where(flags[..., n - 1 :] < flags[..., :length], np.inf, n)",
        "compat/test_pytorchrl_recurrent.py",
    ),
    Mutation(
        "PyTorchRL: sequences do not overlap",
        "compat/pytorchrl.py",
        "self._stride, self._waits = length - overlap, length",
        "self._stride, self._waits = length, length",
        "compat/test_pytorchrl_recurrent.py compat/test_pytorchrl.py",
    ),
    Mutation(
        "PyTorchRL: the priority of a sequence is the mean of its steps'",
        "compat/pytorchrl.py",
        "return eta * np.max(sequence_data, axis=0) + (1 - eta)",
        "return eta * np.mean(sequence_data, axis=0) + (1 - eta)",
        "compat/test_pytorchrl_recurrent.py compat/test_pytorchrl.py",
    ),
    Mutation(
        "PyTorchRL: c_k counts all that fits",
        "compat/pytorchrl.py",
        "window = min(self._recent.window(number, of), len(rows))",
        "window = self._recent.window(number, of)",
        "compat/test_pytorchrl.py",
    ),
    Mutation(
        "Stable-Baselines3: a time limit is a terminal in batches",
        "compat/stable_baselines3.py",
        'ends = ends.gt(batch["truncated"])',
        'ends = ends | batch["truncated"]',
        "compat/test_stable_baselines3.py",
    ),
    Mutation(
        "Stable-Baselines3: a time limit counts though it should not",
        "compat/stable_baselines3.py",
        "        if self.handle_timeout_termination:\n            timeouts",
        "        if self.handle_timeout_termination or infos:\n            timeouts",
        "compat/test_stable_baselines3.py",
    ),
    Mutation(
        "Stable-Baselines3: windows go on over a reset of learn",
        "compat/stable_baselines3.py",
        "            self._continuity.follow(self._replay, obs)\n",
        "            self._continuity.forget()\n",
        "compat/test_stable_baselines3.py",
    ),
    Mutation(
        "Stable-Baselines3: the flags of a rollout are those of the step before",
        "compat/stable_baselines3.py",
        'torch.cat([rollout["episode_start"][1:] != 0,',
        'torch.cat([rollout["episode_start"][:-1] != 0,',
        "compat/test_stable_baselines3.py",
    ),
    Mutation(
        "Stable-Baselines3: the last flag of a rollout is not read",
        "compat/stable_baselines3.py",
        "ended.reshape(1, self.n_envs)])",
        "0 * ended.reshape(1, self.n_envs) != 0])",
        "compat/test_stable_baselines3.py",
    ),
    Mutation(
        "Stable-Baselines3: the discount is that of a whole window",
        "compat/stable_baselines3.py",
        'batch["steps"].float())',
        'batch["steps"].float().clamp(min=self._view.n))',
        "compat/test_stable_baselines3.py",
    ),
    Mutation(
        "drop-ins: an env that was reset goes on",
        "compat/base.py",
        "cut = ~self._done & ~equal_rows(obs, self.next_obs)",
        "cut = ~self._done & equal_rows(obs, obs) & False",
        "compat/test_pytorchrl.py compat/test_stable_baselines3.py",
    ),
    Mutation(
        "drop-ins: ended episodes are cut again",
        "compat/base.py",
        "return ~done[:-1] & ~equal_rows(",
        "return ~equal_rows(",
        "compat/test_attributes.py",
    ),
    Mutation(
        "AgileRL: the newest step's terminal is bootstrapped",
        "compat/agilerl.py",
        "        terminated[-1] |= self.newest\n",
        "        terminated[-1] |= False\n",
        "compat/test_agilerl.py",
    ),
    Mutation(
        "PyTorchRL: a factory takes any argument",
        "compat/pytorchrl.py",
        "            signature(owner).bind(size, *OF_FACTORY, *options, **named)  #",
        "            signature(owner)  #",
        "compat/test_signatures.py",
    ),
    Mutation(
        "drop-ins: arguments that a class gives itself are shown",
        "compat/base.py",
        "named = {one.name for one in own}.union(without)",
        "named = {one.name for one in own}",
        "compat/test_signatures.py",
    ),
    # -- shards: what each has, and what it lost
    Mutation(
        "a chunk that comes again is stored again",
        "cluster/shard.py",
        "if origin.start < received:",
        "if origin.start < 0:",
        "cluster/test_shard.py",
    ),
    Mutation(
        "what a restarted shard has lost is not counted",
        "cluster/shard.py",
        "self.lost += gap * len(origin.envs)",
        "self.lost += 0 * len(origin.envs)",
        "cluster/test_shard.py",
    ),
    Mutation(
        "an episode goes on over steps that a shard has lost",
        "cluster/shard.py",
        "if admission.interrupt:",
        "if admission.interrupt and not admission.store:",
        "cluster/test_shard.py",
    ),
    Mutation(
        "an error for an earlier life of a shard rates what lies there now",
        "cluster/plan.py",
        "np.where(index < 0, index, index | (life << BITS))",
        "np.where(index < 0, index, index | (0 * life << BITS))",
        "cluster/test_shard.py",
    ),
    Mutation(
        "a shard's probabilities do not know of the other shards",
        "cluster/replay.py",
        ", drawn / mass\n",
        ", drawn / drawn.sum()\n",
        "cluster/test_shard.py",
    ),
    Mutation(
        "a rollout that a learner has not settled is forgotten",
        "cluster/messages.py",
        "self._line[0][0] <= place",
        "self._line[0][0] <= place + 1",
        "cluster/test_rollouts.py",
    ),
    # -- files: what a save holds, and in which order it is written
    Mutation(
        "a save may count beyond what 64 bits hold",
        "files/disk.py",
        " or (counts > MOST).any()",
        "",
        "files/test_disk.py",
    ),
    Mutation(
        "the error of a save that was under way is lost",
        "files/save.py",
        "fresh = last.unseen or not last.done",
        "fresh = last.unseen",
        "files/test_save.py",
    ),
    Mutation(
        "a save goes into a directory that was removed while it waited",
        "files/save.py",
        "            if is_at(path, descriptor):  # not removed or replaced meanwhile\n                yield",
        "            if descriptor:\n                yield",
        "files",
    ),
    Mutation(
        "a data file that was cut short counts as intact",
        "files/save.py",
        "return stat.S_ISREG(status.st_mode) and status.st_size == size",
        "return stat.S_ISREG(status.st_mode)",
        "replay/test_saves_of_changes.py",
    ),
    Mutation(
        "wide numbers of a data file are not aligned",
        "files/format.py",
        "key=lambda name: -_DTYPES[codes[name]].itemsize",
        "key=lambda name: _DTYPES[codes[name]].itemsize",
        "files",
    ),
    Mutation(
        "a manifest may have a name twice",
        "files/format.py",
        '    if len(found) != len(pairs):\n        raise ValueError("a name comes',
        '    if not found and pairs:\n        raise ValueError("a name comes',
        "files attacks/test_forged_saves.py",
    ),
    Mutation(
        "a manifest is in place before its data files are on the disk",
        "files/save.py",
        "            sync(descriptor)\n            os.replace(",
        "            os.replace(",
        "files",
    ),
    Mutation(
        "old data files go before the new manifest is on the disk",
        "files/save.py",
        "            sync(descriptor)  # remove",
        "            # remove",
        "files",
    ),
    Mutation(
        "a save may hold tensors that its extra does not name",
        "files/save.py",
        "    if left:\n",
        "    if left is None:\n",
        "replay/test_loading.py",
    ),
    Mutation(
        "two values of extra share a tensor",
        "files/save.py",
        "    while name in tensors:\n",
        "    while not name:\n",
        "files/test_save.py",
    ),
    # -- rings: which rows there are, and where
    Mutation(
        "the window of the newest has one transition too many",
        "samplers/uniform.py",
        "core.draw_by_chance(self._ring.core, count, key, newest)",
        "core.draw_by_chance(self._ring.core, count, key, newest + bool(newest))",
        "samplers/test_recent.py",
    ),
    Mutation(
        "the window of the newest, as places, has one transition too few",
        "ring/ring.py",
        "core.window_runs(self.core, newest, begins, ends)",
        "core.window_runs(self.core, max(newest - 1, 0), begins, ends)",
        "samplers/test_recent.py samplers/test_prioritized.py",
    ),
    Mutation(
        "the seam of a window of places is off by one",
        "draws.cpp",
        "std::max<std::int64_t>(end - (base + ring.rows), 0);",
        "std::max<std::int64_t>(end - (base + ring.rows) - 1, 0);",
        "samplers/test_recent.py",
    ),
    Mutation(
        "an interrupted episode goes on after a repair",
        "ring/ring.py",
        "self.state[change.cut, NEXT] = 0",
        "self.state[change.cut, NEXT] += 0",
        "attacks/test_interrupts.py ring",
    ),
    Mutation(
        "windows that an interruption opens are not counted",
        "ring/ring.py",
        "self.counters[DRAWABLE] += len(opened)",
        "self.counters[DRAWABLE] += 0",
        "samplers/test_sequence_weights.py ring",
    ),
    Mutation(
        "another view's rule leaves the count of drawable rows as it was",
        "ring/ring.py",
        "may be more events now\n        self.counters[DRAWABLE] = len(self.anchors())",
        "may be more events now\n        self.counters[DRAWABLE] = self.drawable",
        "ring",
    ),
    Mutation(
        "a cleared ring still counts drawable rows",
        "ring/ring.py",
        "self.counters[DRAWABLE] = 0",
        "self.counters[DRAWABLE] += 0",
        "ring replay",
    ),
    Mutation(
        "a stale row is taken for the one that was asked for",
        "ring/ring.py",
        "wrong = np.flatnonzero(found[:known] != chosen[:known])",
        "wrong = np.flatnonzero(found[:known] > chosen[:known])",
        "attacks/test_foreign_parts.py ring",
    ),
    # -- views
    Mutation(
        "the stack after a step ends on the observation before it",
        "views/frames.py",
        "ends[count:] = plan.places, plan.last",
        "ends[count:] = plan.places, plan.places",
        "views/test_transitions.py",
    ),
    Mutation(
        "stacks are drawn before their oldest frame is known to be there",
        "views/frames.py",
        "return self.depth - 1",
        "return self.depth - 2 if self.depth > 1 else 0",
        "views/test_transitions.py",
    ),
    Mutation(
        "rewards that each_reward changed are discounted once too often",
        "views/transitions.py",
        "self.gamma**within",
        "self.gamma**(within + 1)",
        "views/test_transitions.py",
    ),
    Mutation(
        "rewards that each_reward changed are summed one step too far",
        "views/transitions.py",
        "within < steps[:, None]",
        "within <= steps[:, None]",
        "views/test_transitions.py",
    ),
    Mutation(
        "the row before a window of sequences need not be there",
        "views/sequences.py",
        "history = burn_in + length - 1 + before",
        "history = burn_in + length - 1",
        "views/test_sequences.py",
    ),
    Mutation(
        "the previous action reaches over an episode's start",
        "sequences.cpp",
        "before = step_ == 0 ? -1 :",
        "before = false ? -1 :",
        "views/test_sequences.py",
    ),
    Mutation(
        "a stored previous action is read beyond the end of its episode",
        "sequences.cpp",
        "if (final || !last.stored)",
        "if (!last.stored)",
        "views/test_sequences.py",
    ),
    # -- samplers
    Mutation(
        "recent draws shrink one update too early",
        "samplers/recent.py",
        "self.eta ** (1000 * update / of)",
        "self.eta ** (1000 * (update + 1) / of)",
        "samplers/test_recent.py",
    ),
    Mutation(
        "an epoch without replacement draws its last item twice",
        "samplers/uniform.py",
        "int(alive[-1]) + 1 :]",
        "int(alive[-1]) :]",
        "samplers/test_uniform.py",
    ),
    Mutation(
        "an epoch without replacement does not skip what has left",
        "samplers/uniform.py",
        "np.flatnonzero(places >= 0)[:missing]",
        "np.flatnonzero(places >= -1)[:missing]",
        "samplers/test_uniform.py",
    ),
    Mutation(
        "the schedule of beta is one draw ahead",
        "samplers/prioritized.py",
        "beta = self.beta_at(draws)",
        "beta = self.beta_at(draws + 1)",
        "samplers/test_prioritized.py",
    ),
    Mutation(
        "a transition that came while a call was broken off keeps an old priority",
        "samplers/prioritized.py",
        "new = (self._tree.get(places) == 0) | (ring.stamp[places] >= ring.unseen)",
        "new = self._tree.get(places) == 0",
        "attacks/test_interrupts.py samplers",
    ),
    Mutation(
        "the weights of recent draws are normalised by the whole buffer",
        "samplers/prioritized.py",
        "self._lowest(tree, *runs)",
        "self._lowest(tree)",
        "samplers/test_recent.py samplers/test_prioritized.py",
    ),
    Mutation(
        "an episode's older windows keep their weight",
        "weights.cpp",
        "weigh(before, 0.0);",
        "weigh(before, 1.0);",
        "samplers/test_sequence_weights.py",
    ),
    Mutation(
        "the oldest window of an episode is never drawn",
        "weights.cpp",
        "(last - first) / rule.positive_stride() + 1",
        "(last - first) / rule.positive_stride()",
        "samplers/test_sequence_weights.py",
    ),
    Mutation(
        "a short window weighs as much as a whole one",
        "weights.cpp",
        "static_cast<double>(at + 1 - rule.window_start(at))",
        "static_cast<double>(rule.length)",
        "samplers/test_sequence_weights.py",
    ),
    Mutation(
        "new transitions do not get the largest error of an appended buffer",
        "samplers/prioritized.py",
        "        self.largest_error = other.largest_error\n",
        "",
        "samplers/test_prioritized.py",
    ),
    # -- returns
    Mutation(
        "a masked mean counts every step",
        "returns.py",
        ".sum(axes, keepdim=True) / count.clamp(min=1)",
        ".sum(axes, keepdim=True) / entries.numel()",
        "returns/test_functions_of_groups.py",
    ),
    Mutation(
        "the deviation of a masked normalisation is that of a population",
        "returns.py",
        "_moments(wide, mask, tuple(range(x.dim())), 1)",
        "_moments(wide, mask, tuple(range(x.dim())), 0)",
        "returns/test_functions_of_groups.py",
    ),
    Mutation(
        "a group's later episodes count although only the first should",
        "returns.py",
        "real & (ended == 0) if until_first_done",
        "real & (ended <= 1) if until_first_done",
        "returns/test_functions_of_groups.py",
    ),
    Mutation(
        "TD(λ)'s advantage leaves the return as it is",
        "returns.py",
        'lam=self.lam)\n        return ret - columns["value"][:-1], ret',
        'lam=self.lam)\n        return ret - columns["value"][1:], ret',
        "returns/test_estimators.py rollout/test_finishing.py",
    ),
    Mutation(
        "on a device, advantages of the next episode but one come back",
        "core/returns.py",
        "ends = ends[:-distance] | ends[distance:]",
        "ends = ends[:-distance] & ends[distance:]",
        "core/test_returns.py",
    ),
    Mutation(
        "on a device, a truncation without final value counts as a termination",
        "core/returns.py",
        "final = zero * math.nan if grid.final_value is None else grid.final_value",
        "final = zero if grid.final_value is None else grid.final_value",
        "core/test_returns.py",
    ),
    # -- rollouts
    Mutation(
        "on a device, a permutation looks back to the swap of another place",
        "core/rollouts.py",
        "torch.where(grouped[1:] == grouped[:-1], order[:-1], -1)",
        "order[:-1]",
        "core/test_draws.py",
    ),
    Mutation(
        "on a device, an episode's end is forgotten by the next step that is not real",
        "core/rollouts.py",
        "torch.where(done | real, time, 0)",
        "torch.where(done | ~done, time, 0)",
        "core/test_rollouts.py",
    ),
    Mutation(
        "on a device, a mask that was written after a look at it is not heeded",
        "rollout/columns.py",
        "written is not None and written == self._memory[path]._version",
        "written is not None",
        "rollout/test_device.py",
    ),
    Mutation(
        "even parts of a rollout lose what does not divide",
        "rollout/minibatches.py",
        "i * size + min(i, more)",
        "i * size + min(i, more // 2)",
        "rollout/test_minibatches.py",
    ),
    Mutation(
        "the last small minibatch is left out",
        "rollout/minibatches.py",
        "if drop_last or bounds[-1] == total else",
        "if drop_last or bounds[-1] <= total else",
        "rollout/test_minibatches.py",
    ),
    Mutation(
        "every epoch has the same order",
        "rollout/minibatches.py",
        "if order is None or reshuffle:",
        "if order is None:",
        "rollout/test_minibatches.py",
    ),
    Mutation(
        "minibatches have steps that are not real",
        "rollout/minibatches.py",
        "return order if rows is None else rows[order]",
        "return order",
        "rollout/test_minibatches.py",
    ),
    Mutation(
        "a batch of windows has one step too many",
        "rollout/minibatches.py",
        "bisect_right(until, before + batch_steps)",
        "bisect_right(until, before + batch_steps + 1)",
        "rollout/test_sequences.py",
    ),
    Mutation(
        "a rollout is finished without the bootstrap value that it needs",
        "rollout/buffer.py",
        'under_way = ~(columns["terminated"][-1] | columns["truncated"][-1])',
        'under_way = ~(columns["terminated"][-1] | ~columns["truncated"][-1])',
        "rollout/test_finishing.py",
    ),
    Mutation(
        "the in-place estimator is used after the ring of rows has come round",
        "rollout/buffer.py",
        "self._gae_in_place is not None and not columns.start:",
        "self._gae_in_place is not None:",
        "rollout/test_finishing.py rollout/test_columns.py",
    ),
    Mutation(
        "final values go to the wrong row after the ring of rows has come round",
        "rollout/buffer.py",
        "rows = columns.place(rows).to(target.device)",
        "rows = rows.to(target.device)",
        "rollout/test_columns.py collect",
    ),
    Mutation(
        "an interruption does not truncate the newest step",
        "rollout/buffer.py",
        "truncated[-1] |= under_way",
        "truncated[-1] |= under_way & False",
        "rollout/test_episodes.py",
    ),
    Mutation(
        "on a device, a step over an old one keeps its mask",
        "rollout/columns.py",
        "name in given or not self._is_preset(path)",
        "name in given",
        "rollout/test_device.py",
    ),
    Mutation(
        "an episode that ended in a step that is overwritten goes on",
        "rollout/buffer.py",
        "np.logical_or(terminated, truncated) | (ended > real)",
        "np.logical_or(terminated, truncated) & real | (ended > real)",
        "rollout/test_columns.py rollout/test_episodes.py",
    ),
    Mutation(
        "a step that a full ring refuses has taken the place of another",
        "rollout/buffer.py",
        "self._ended, self._has_last, columns.start, columns.count = before",
        "columns.start, columns.count = before[2:]",
        "rollout/test_columns.py",
    ),
    Mutation(
        "a window in the middle of an episode starts it",
        "rollout/sequences.py",
        "(begins == 1) & (start == origin)",
        "begins == 1",
        "rollout/test_windows.py",
    ),
    Mutation(
        "kept recurrent states are looked up in the wrong row",
        "rollout/sequences.py",
        "start * self._envs + env\n",
        "(start + 1) // 2 * self._envs + env\n",
        "rollout/test_states.py",
    ),
    Mutation(
        "columns of a rollout that has come round begin at the wrong row",
        "rollout/columns.py",
        "slice(self.start, self.num_steps), slice(end - self.num_steps)",
        "slice(end - self.num_steps), slice(self.start, self.num_steps)",
        "rollout/test_columns.py",
    ),
    # -- collecting
    Mutation(
        "truncated episodes end on the next episode's first observation: a stale final observation",
        "collect/collector.py",
        "after[path] = after[path].index_copy(0, where, rows[path])",
        "pass",
        "collect/test_collector.py replay/test_buffer.py",
    ),
    Mutation(
        "a rollout values the next episode's first observation: a stale final observation",
        "collect/collector.py",
        "_PolicyInputs(rows, memory, known)",
        "_PolicyInputs(inputs.obs_of(obs, envs), memory, known)",
        "collect/test_final_observations.py",
    ),
    Mutation(
        "final values are set one step too late",
        "collect/collector.py",
        "first + x.step)",
        "first + x.step + 1)",
        "collect/test_final_observations.py",
    ),
    Mutation(
        "the step that an env ignores counts as one",
        "collect/collector.py",
        "self._episode_length += played",
        "self._episode_length += 1",
        "collect/test_stats.py collect/test_final_observations.py",
    ),
    Mutation(
        "a new episode goes on with the state of the last one",
        "collect/collector.py",
        "self._hidden = self._started(outcome.states, starts)",
        "self._hidden = outcome.states",
        "collect/test_inputs.py",
    ),
    Mutation(
        "a replay needs the final observation of a terminal step that was truncated too",
        "collect/collector.py",
        "truncated & ~terminated, ~vector.ignored",
        "truncated, ~vector.ignored",
        "collect/test_collector.py",
    ),
    Mutation(
        "the info of a reset is taken for that of the step before it",
        "collect/inputs.py",
        "rows = torch.where(shaped_as(self.rows(ended), rows), last, rows)",
        "pass",
        "collect/test_step_info.py",
    ),
    Mutation(
        "steps of a warm-up stay in the collector's own rollout",
        "collect/collector.py",
        "self._obs, self._warmed = {}, not buffer.wrap",
        "self._obs = {}",
        "collect/test_warming_up.py",
    ),
    Mutation(
        "a reset keeps the steps of a warm-up",
        "collect/collector.py",
        "self._under_way or self._warmed",
        "self._under_way or (self._warmed and not self._obs)",
        "collect/test_warming_up.py",
    ),
    Mutation(
        "a broken-off step over a full ring leaves the bootstrap row",
        "rollout/buffer.py",
        "self._has_last = False\n        leaving",
        "leaving",
        "rollout/test_writing.py",
    ),
    Mutation(
        "episodes go on behind those of a warm-up",
        "collect/collector.py",
        "self._obs, self._warmed = {}, not buffer.wrap",
        "self._warmed = not buffer.wrap",
        "collect/test_warming_up.py",
    ),
    Mutation(
        "a simulator's episodes end on the next episode's first observation",
        "collect/inputs.py",
        "found[path] = torch.where(shaped_as(done, x), rows, x)",
        "found[path] = x",
        "collect/test_simulators.py",
    ),
    Mutation(
        "final observations with numbers of envs go to other envs",
        "collect/inputs.py",
        "x.index_copy(0, envs.to(self.device), rows)",
        "x.index_copy(0, envs.to(self.device).flip(0), rows)",
        "collect/test_simulators.py",
    ),
    Mutation(
        "a time limit of a simulator is a terminal",
        "collect/envs.py",
        "done if truncated is None else done & ~truncated",
        "done",
        "collect/test_simulators.py",
    ),
    Mutation(
        "a simulator may hide a final observation behind its mask",
        "collect/envs.py",
        "(found is not None and found.present is None)",
        "found is not None",
        "collect/test_simulators.py",
    ),
    Mutation(
        "the newest episodes of a simulator are listed backwards",
        "collect/episodes.py",
        ".indices.flip(0)",
        ".indices",
        "collect/test_simulators.py",
    ),
    Mutation(
        "the episodes of a simulator are those of other envs",
        "collect/episodes.py",
        "step, env = lengths.nonzero()",
        "env, step = lengths.T.nonzero()",
        "collect/test_simulators.py",
    ),
    Mutation(
        "every head of a value has the final values of the first one",
        "returns.py",
        "final_value[..., k]",
        "final_value[..., 0]",
        "rollout/test_value_heads.py",
    ),
    # -- hindsight
    Mutation(
        "goals of other episodes come from the stream that draws the batch",
        "goals.cpp",
        "draw_uniform(*ring, key(stream.value, OTHERS), 0, others)",
        "draw_uniform(*ring, stream.value, 0, others)",
        "device/test_hindsight.py replay/test_seeds.py",
    ),
    Mutation(
        "a step added in one call is not told to the sampler if it changes one row",
        "replay/writer.py",
        "        if events > 0:\n",
        "        if events > 1:\n",
        "replay/test_steps_in_one_call.py",
    ),
    Mutation(
        "a broken off add in one call leaves no note",
        "replay/writer.py",
        "ring.pending = adding",
        "ring.pending = None",
        "attacks/test_interrupts.py",
    ),
    Mutation(
        "one call goes on with the room for events of another rule",
        "replay/writer.py",
        " or (watches and ring.rule is not self._rule):",
        ":",
        "replay/test_steps_in_one_call.py",
    ),
    Mutation(
        "one call overwrites rows that a save still reads",
        "replay/writer.py",
        "        if ring.before_overwriting is not None:\n            return False\n",
        "",
        "replay/test_background.py",
    ),
    Mutation(
        "a user's view is read as the class that it inherits from",
        "replay/reader.py",
        "own = is_own(view)  # a class",
        "own = True  # a class",
        "replay/test_batches.py",
    ),
    Mutation(
        "a draw where all priorities are 0 moves a scheduled beta on",
        "samplers/prioritized.py",
        "        if not total > 0:\n            raise",
        "        if not total > 0:\n            self.count_draw()\n            raise",
        "samplers/test_prioritized.py replay/test_batches.py",
    ),
    Mutation(
        "probabilities are overwritten by weights",
        "batches.cpp",
        "Column<float> weights{out.first + weight_at_, out.stride, count};",
        "Column<float> weights{out.first + probability_at_, out.stride, count};",
        "replay/test_batches.py",
    ),
    Mutation(
        "after a change of a view, batches are drawn by the rule of before",
        "replay/reader.py",
        "            self.keep_rule()\n        progress = self",
        "            pass\n        progress = self",
        "replay/test_stacks.py replay/test_sequence_batches.py",
    ),
    Mutation(
        "a step that is not stored yet overwrites the bootstrap row",
        "rollout/buffer.py",
        "full or self._has_last",
        "full",
        "memory/test_copier.py rollout/test_writing.py",
    ),
    Mutation(
        "a step without a mask is not real, nor has it a missing final value",
        "rollout/columns.py",
        "targets, self.num_envs, watched, [*self._defaults.values()])",
        "targets, self.num_envs, watched, [x * 0 for x in self._defaults.values()])",
        "rollout/test_writing.py",
    ),
    Mutation(
        "minibatches of a rollout that begins behind its first place have the rows before it",
        "rollout/columns.py",
        "array = self._memory[path][self.start : self.start + self.count]",
        "array = self._memory[path][: self.count]",
        "rollout/test_packed_minibatches.py",
    ),
    Mutation(
        "arguments with gaps between their numbers count as plain ones",
        "returns.cpp",
        "found.shape[1] == envs && found.contiguous() &&",
        "found.shape[1] == envs &&",
        "returns/test_few_calls.py core/test_returns.py",
    ),
    Mutation(
        "hindsight keeps the functions that it had before they were changed",
        "views/hindsight.py",
        "if of() is not ring or then != now:",
        "if of() is not ring:",
        "views/test_hindsight.py views/test_goals.py",
    ),
    Mutation(
        "k relabelled rows per unchanged one are a share of 1 / (k + 1)",
        "views/hindsight.py",
        "k / (k + 1)\n        self.terminated_fn",
        "1 / (k + 1)\n        self.terminated_fn",
        "views/test_hindsight.py",
    ),
    # -- saving
    Mutation(
        "a save's checksums are not looked at",
        "files/save.py",
        "reader.check_crc32(self._files[file].crc32)",
        "self._files[file]",
        "files/test_save.py",
    ),
    Mutation(
        "the old files of a save go before the new one is in place",
        "files/save.py",
        "            sync(descriptor)\n            os.replace(temporary, path / MANIFEST)",
        "            remove_others(path, keep=files)\n            os.replace(temporary, path / MANIFEST)",
        "files/test_disk.py",
    ),
    Mutation(
        "the newest row of an episode that goes on is frozen in a segment",
        "replay/saving.py",
        "np.maximum(live.until - ring.under_way, live.first)",
        "np.maximum(live.until, live.first)",
        "replay/test_saves_of_changes.py",
    ),
    Mutation(
        "new segments leave out what was added to envs that have come round",
        "replay/saving.py",
        "new = Span(np.maximum(kept[-1].span.until, live.first) if kept else live.first, stable.until)",
        "new = Span(np.maximum(kept[-1].span.until + 1, live.first) if kept else live.first, stable.until)",
        "replay/test_saves_of_changes.py",
    ),
    Mutation(
        "segments with rows that are gone are never given up",
        "replay/saving.py",
        "if gone > live.size:",
        "if gone > 9 * live.size:",
        "replay/test_saves_of_changes.py",
    ),
    Mutation(
        "a smaller ring than the saved one gets rows that are not its newest",
        "replay/loading.py",
        "live = part.span.meet(ring.span)\n",
        "live = part.span.meet(ring.span)\n    rows = rows[::-1].copy()\n",
        "replay/test_loading.py",
    ),
    Mutation(
        "a loaded replay's sampler starts anew",
        "replay/loading.py",
        "    if alike:\n        sampler.load_state_dict(parts)",
        "    if not parts:\n        sampler.load_state_dict(parts)",
        "replay/test_saving.py replay/test_buffer.py",
    ),
    Mutation(
        "a loaded replay draws its first batches again",
        "replay/loading.py",
        'progress.draws, progress.sampled, progress.late = integers(content, "counts", 3).tolist()',
        '_, progress.sampled, progress.late = integers(content, "counts", 3).tolist()',
        "replay/test_saving.py replay/test_buffer.py",
    ),
    Mutation(
        "a loaded rollout shuffles as a new one does",
        "rollout/saving.py",
        'draws=whole(content, "draws"),',
        "draws=0,",
        "rollout/test_sequences.py",
    ),
    Mutation(
        "a loaded rollout forgets that its last episodes had ended",
        "rollout/saving.py",
        'interrupted=entry(content, "interrupted", bool),',
        "interrupted=False,",
        "rollout rollout/test_buffer.py",
    ),
    # -- the core: draws
    Mutation(
        "a random number has a bit less",
        "random.hpp",
        "(mix(stream + GOLDEN * nth) >> 11)) * 0x1p-53",
        "(mix(stream + GOLDEN * nth) >> 12)) * 0x1p-52",
        "core/test_draws.py",
    ),
    Mutation(
        "a mass may be rounded up to the total",
        "draws.cpp",
        "out[i] = std::min(below, u * total);",
        "out[i] = std::min(total, u * total);",
        "core/test_draws.py",
    ),
    Mutation(
        "a permutation leaves no number at its place",
        "draws.cpp",
        "u * static_cast<double>(left))]);",
        "u * static_cast<double>(left - 1))]);",
        "core/test_draws.py",
    ),
    Mutation(
        "a draw that missed takes the number of the draw after it",
        "draws.cpp",
        "spot = range.at(stream, 1 + low + i + all * attempt);",
        "spot = range.at(stream, 1 + low + i + attempt);",
        "core/test_draws.py",
    ),
    Mutation(
        "of anchors that are counted out, the last is never drawn",
        "draws.cpp",
        "static_cast<std::int64_t>(uniform(mix(stream) + i, 0) * static_cast<double>(found));",
        "static_cast<std::int64_t>(uniform(mix(stream) + i, 0) * static_cast<double>(found - 1));",
        "core/test_draws.py",
    ),
    Mutation(
        "the window of the newest is off by one where some of them have gone",
        "draw_ranges.cpp",
        "auto missing = newest - move_to(ring, at, first);",
        "auto missing = newest - 1 - move_to(ring, at, first);",
        "core/test_draws.py",
    ),
    Mutation(
        "draws do not know of the rows that were added since the first of them",
        "adding.cpp",
        "if (ring.ranges.known)\n",
        "if (false)\n",
        "core/test_draws.py",
    ),
    Mutation(
        "the newest are those of before, although rows were added",
        "adding.cpp",
        "++ring.ranges.version;",
        ";",
        "core/test_draws.py",
    ),
    Mutation(
        "draws do not know that the ring was cleared",
        "ring/ring.py",
        "        self.counters[DRAWABLE] = 0\n        self.core.changed()\n",
        "        self.counters[DRAWABLE] = 0\n",
        "core/test_draws.py",
    ),
    Mutation(
        "the number of an overwritten row finds the row that lies there now",
        "draws.cpp",
        "places[i] = number >= ring.oldest(e) && ring.can_draw(place, number, e) ? place : -1;",
        "places[i] = ring.can_draw(place, number, e) ? place : -1;",
        "core/test_draws.py",
    ),
    Mutation(
        "an index is found before it is issued",
        "draws.cpp",
        "if (given < 0 || number >= ring.envs[e].head) {",
        "if (given < 0 || number > ring.envs[e].head) {",
        "core/test_draws.py",
    ),
    Mutation(
        "a row whose history has gone can be drawn",
        "ring.hpp",
        "std::min<std::int64_t>(step[place], history) >= oldest(e);",
        "std::min<std::int64_t>(step[place], history) >= oldest(e) - 1;",
        "core/test_draws.py",
    ),
    Mutation(
        "a chunk can be drawn whose step before is of the same episode and gone",
        "ring.hpp",
        "(begins == oldest(e) && step[place_of(begins, e)] == 0)",
        "begins == oldest(e)",
        "views/test_chunks.py",
    ),
    Mutation(
        "a tail that an interruption left is no window",
        "ring.hpp",
        "if (number + 2 == head) return following == 0;  // the row after is the newest",
        "if (number + 2 == head) return false;",
        "core/test_draws.py",
    ),
    # -- new rows, each served once
    Mutation(
        "fresh: a row that was served waits still",
        "draws.cpp",
        "        next[e] = number + 1;\n",
        "        next[e] = number;\n",
        "samplers/test_fresh.py",
    ),
    Mutation(
        "fresh: a draw that fails has served its rows",
        "samplers/fresh.py",
        "        self._new_last = taken\n",
        "        self._new_last, self.noted = taken, served\n",
        "samplers/test_fresh.py",
    ),
    Mutation(
        "fresh: what was skipped comes again when batches are put back",
        "samplers/fresh.py",
        "        if served.skips != now.skips:\n",
        "        if served.skips > now.skips:\n",
        "replay/test_changes_while_served.py",
    ),
    Mutation(
        "fresh: rows that wait for another view count as lost once batches are put back",
        "samplers/fresh.py",
        "        if served.kinds != now.kinds:",
        "        if served.kinds > now.kinds:",
        "replay/test_changes_while_served.py",
    ),
    Mutation(
        "fresh: rows that come after a power cut count as served",
        "samplers/fresh.py",
        "next=np.minimum(behind, ring.heads)",
        "next=behind",
        "samplers/test_fresh.py",
    ),
    Mutation(
        "fresh: on a device, a step's rows are served before its final ones of other envs",
        "device/fresh.py",
        "torch.stack(pair, 1).view(-1)",
        "torch.stack(pair, 0).view(-1)",
        "device/test_fresh.py",
    ),
    Mutation(
        "fresh: on a device, a row that was overwritten is served as the one that lies there now",
        "device/fresh.py",
        "        return number >= ring.oldest[env]\n",
        "        return number >= 0\n",
        "device/test_fresh.py",
    ),
    Mutation(
        "fresh: on a device, rows behind overwritten ones are not looked for",
        "device/fresh.py",
        "        self._looks_at_all = steps > self._safe\n",
        "        self._looks_at_all = False\n",
        "device/test_fresh.py",
    ),
    Mutation(
        "fresh: in shards, a shard in which few rows wait never has its turn",
        "cluster/plan.py",
        "(end * batch_size + int(shift[0])) // total",
        "end * batch_size // total",
        "cluster/test_fresh.py",
    ),
    Mutation(
        "fresh: rows of an answer that was lost are lost",
        "cluster/shard.py",
        "                sampler.put_back(self._before[-lost])\n",
        "                pass\n",
        "cluster/test_fresh.py",
    ),
    Mutation(
        "fresh: rows that shards gave for a batch that was given up are lost",
        "cluster/replay.py",
        "            self._group.received = received  # shards",
        "            pass  # shards",
        "cluster/test_fresh.py",
    ),
    Mutation(
        "fresh: beta moves on with batches of new rows alone",
        "cluster/replay.py",
        "sampler.beta_at(self._state.draws - self._state.only_new)",
        "sampler.beta_at(self._state.draws)",
        "cluster/test_fresh.py",
    ),
    # -- chunks: rows of one env over the ends of its episodes
    Mutation(
        "chunks: the first row of an episode has the step before, of another one",
        "sequences.cpp",
        "before = final_ ? -1 : place;",
        "before = place;",
        "views/test_chunks.py",
    ),
    Mutation(
        "chunks: with next observations of their own, the last one of an episode is not numbered",
        "sequences.cpp",
        "put<std::int64_t>(row + to.timestep, step + after);",
        "put<std::int64_t>(row + to.timestep, step);",
        "views/test_chunks.py",
    ),
    Mutation(
        "chunks: with next observations of their own, the newest step has none after it",
        "sequences.cpp",
        "final_ = over_ || number_ + 1 == ring.envs[env_].head;",
        "final_ = over_;",
        "views/test_chunks.py",
    ),
    # -- the core: sum trees and priorities
    Mutation(
        "a mass on the edge of two leaves goes to the left one",
        "tree.cpp",
        "child += edges[k + 1] <= masses[i];",
        "child += edges[k + 1] < masses[i];",
        "core/test_tree.py",
    ),
    Mutation(
        "a mass on the edge of two parts of a cover goes to the left one",
        "tree.cpp",
        "std::upper_bound(among.until.begin()",
        "std::lower_bound(among.until.begin()",
        "core/test_tree.py",
    ),
    Mutation(
        "a mass that rounding left beyond all falls on a leaf without weight",
        "tree.cpp",
        "child = children[k] > 0.0 ? k : child;",
        "child = k;",
        "core/test_tree.py",
    ),
    Mutation(
        "the smallest weight is that of a leaf without any",
        "tree.cpp",
        "return nodes[node] > 0.0 ? nodes[node] : INFINITE;",
        "return nodes[node] >= 0.0 ? nodes[node] : INFINITE;",
        "core/test_tree.py",
    ),
    Mutation(
        "sums of a tree are added from right to left",
        "tree.cpp",
        "for (std::int64_t k = 0; k < Tree::WIDTH; ++k) sum += children[k];",
        "for (std::int64_t k = Tree::WIDTH; k-- > 0;) sum += children[k];",
        "core/test_tree.py",
    ),
    Mutation(
        "a tree holds a weight of -0.0",
        "tree.cpp",
        "auto weight = values[i * each] + 0.0;  // -0.0 becomes 0.0",
        "auto weight = values[i * each];",
        "core/test_tree.py",
    ),
    Mutation(
        "eps is not added to an error",
        "priorities.cpp",
        "static_cast<double>(rated[i].size) + facts_->eps;",
        "static_cast<double>(rated[i].size);",
        "core/test_priorities.py",
    ),
    Mutation(
        "weights compare with a priority, not with its probability",
        "priorities.cpp",
        "if (lowest > 0.0) least = lowest / total;",
        "if (lowest > 0.0) least = lowest;",
        "samplers/test_prioritized.py core/test_batches.py",
    ),
    Mutation(
        "the largest error is the last one",
        "priorities.cpp",
        "largest = std::max<double>(largest, size);",
        "largest = size;",
        "core/test_priorities.py",
    ),
    Mutation(
        "an error of a row that was overwritten goes to the row that lies there now",
        "priorities.cpp",
        "if (number < ring->oldest(e)) continue;",
        "if (number < 0) continue;",
        "core/test_priorities.py",
    ),
    Mutation(
        "a note of rated rows has their new errors",
        "priorities.cpp",
        "pair[1] = errors_[rated[i].place];",
        "pair[1] = rated[i].size;",
        "core/test_priorities.py",
    ),
    Mutation(
        "the error of a sequence weighs its mean by eta and its largest by the rest",
        "priorities.cpp",
        "return eta * largest + (1 - eta) * (total",
        "return (1 - eta) * largest + eta * (total",
        "core/test_priorities.py",
    ),
    Mutation(
        "the mean of a sequence's errors counts steps that do not count",
        "priorities.cpp",
        "(total / static_cast<double>(count ? count : 1));",
        "(total / static_cast<double>(counts.size()));",
        "core/test_priorities.py",
    ),
    Mutation(
        "errors that lie apart are read as if they were neighbours",
        "priorities.cpp",
        "Errors all{given.data, given.stride(item), given.dtype.bits == 64};",
        "Errors all{given.data, given.dtype.bits / 8, given.dtype.bits == 64};",
        "core/test_priorities.py",
    ),
    Mutation(
        "an error beyond float32 is infinite",
        "priorities.cpp",
        "return size <= LARGEST_ERROR ? static_cast<float>(size)",
        "return size < INFINITY ? static_cast<float>(size)",
        "core/test_priorities.py",
    ),
    # -- the core: adding rows
    Mutation(
        "what an episode ended on is the observation before: a stale final observation",
        "adding.cpp",
        "scatter(given.final + first, given.width, part(given.finals),",
        "scatter(given.staged + first, given.width, part(given.finals),",
        "core/test_adding.py",
    ),
    Mutation(
        "a row makes way, and one that needs it as history stays drawable",
        "adding.cpp",
        "auto last = std::min(old + history_, number - 1);",
        "auto last = std::min(old + history_ - 1, number - 1);",
        "core/test_adding.py",
    ),
    Mutation(
        "the last row before a clear never makes way",
        "adding.cpp",
        "if (auto old = number - rows_; old >= tail)",
        "if (auto old = number - rows_; old > tail)",
        "core/test_adding.py",
    ),
    Mutation(
        "an episode that is as long as can be counted is not cut",
        "adding.cpp",
        "bool cut = index + 1 >= LONGEST && kind == Kind::GoesOn;",
        "bool cut = index + 1 > LONGEST && kind == Kind::GoesOn;",
        "core/test_adding.py",
    ),
    Mutation(
        "a final observation counts as older than the step before it",
        "adding.cpp",
        "stamp[final] = -2 - completed_;",
        "stamp[final] = -1 - completed_;",
        "core/test_adding.py",
    ),
    Mutation(
        "the first row that is not in reserve is overwritten",
        "adding.cpp",
        "heads[e] - ring.rows > ring.reserve[e]) return true;",
        "heads[e] - ring.rows > ring.reserve[e] + 1) return true;",
        "core/test_adding.py",
    ),
    Mutation(
        "a negative order overwrites a row's step in a note",
        "adding.cpp",
        "static_cast<std::uint32_t>(ring.order[place]));",
        "static_cast<std::uint64_t>(ring.order[place]));",
        "core/test_adding.py",
    ),
    Mutation(
        "a note forgets the row that the first new one completes",
        "adding.cpp",
        "if (number > 0) row_at = note_row(ring, row_at, ring.place_of(number - 1, e));",
        "if (number > ring.rows) row_at = note_row(ring, row_at, ring.place_of(number - 1, e));",
        "core/test_adding.py",
    ),
    Mutation(
        "the first row without a final observation is named by the one after it",
        "adding.cpp",
        "if (mode == NO_FINALS && ended >= 0) return -1 - ended;",
        "if (mode == NO_FINALS && ended >= 0) return -2 - ended;",
        "core/test_adding.py",
    ),
    Mutation(
        "infinite rewards are not counted",
        "adding.cpp",
        "&& !std::isfinite(given.reward[i]);",
        "&& std::isnan(given.reward[i]);",
        "core/test_adding.py",
    ),
    Mutation(
        "a truncated row that is left out starts an episode",
        "adding.cpp",
        "given.truncated[i] && ring.envs[given.envs[i]].next > 0;",
        "given.truncated[i];",
        "replay/test_steps_in_one_call.py",
    ),
    Mutation(
        "the last window before a row that is left out is never drawn",
        "adding.cpp",
        "open(place, same && ring_.can_draw(place, last, e));",
        "open(place, false);",
        "replay/test_steps_in_one_call.py",
    ),
    Mutation(
        "an episode goes on after a row that is left out",
        "adding.cpp",
        "        env.next = 0;\n        open(",
        "        open(",
        "replay/test_steps_in_one_call.py",
    ),
    Mutation(
        "a large final observation is stored in place of the last one but one",
        "steps.cpp",
        "(one.is_final ? staged_.finals : staged_.places).data + low",
        "staged_.places.data + low",
        "core/test_steps.py",
    ),
    Mutation(
        "a float64 that is too large for a float32 is stored as infinite",
        "numbers.cpp",
        "(static_cast<double>(std::numeric_limits<T>::max()));",
        "(std::numeric_limits<double>::max());",
        "core/test_steps.py",
    ),
    Mutation(
        "a whole number is rounded to a float",
        "numbers.cpp",
        "lost |= numbers[i] < -exact || numbers[i] > exact;",
        "lost |= numbers[i] < -exact;",
        "core/test_steps.py",
    ),
    Mutation(
        "a whole number that is out of range is stored",
        "numbers.cpp",
        "lost |= !std::in_range<T>(numbers[i]);",
        "lost |= 0;",
        "core/test_steps.py",
    ),
    Mutation(
        "axes with a gap between them are read as one",
        "numbers.cpp",
        "else if (given.stride(axes - 1) != count * stride) break;",
        "",
        "core/test_steps.py",
    ),
    Mutation(
        "of many rows, those behind the first block come from too early on",
        "steps.cpp",
        "step[i].data + low * size, size,",
        "step[i].data, size,",
        "core/test_steps.py",
    ),
    Mutation(
        "a row that is left out keeps its end",
        "steps.cpp",
        "ring_.terminated[place] = ring_.truncated[place] = 0;",
        "ring_.terminated[place] = 0;",
        "replay/test_steps_in_one_call.py",
    ),
    Mutation(
        "debug mode refuses a next observation of a step that goes on",
        "steps.cpp",
        "finite &= !staged_.ended(n) || ",
        "finite &= ",
        "replay/test_steps_in_one_call.py",
    ),
    Mutation(
        "a step's truncations are those of the step before",
        "steps.cpp",
        " || has(staged_.terminated.first) || has(staged_.truncated.first);",
        " || has(staged_.terminated.first);",
        "core/test_steps.py",
    ),
    # -- the core: n-step windows and frames
    Mutation(
        "a window of n steps crosses an episode's end",
        "windows.hpp",
        "going = !(next.terminated | next.truncated) && window.steps != most && follows(window.steps);",
        "going = window.steps != most;",
        "views/test_transitions.py views/test_hindsight.py",
    ),
    Mutation(
        "windows of rows with next observations of their own go over an interruption",
        "windows.cpp",
        "return !own || (number + k <= newest && step[place] != 0);",
        "return !own || number + k <= newest;",
        "views/test_transitions.py core/test_windows.py",
    ),
    Mutation(
        "the next index of a row with a next observation of its own is one too large",
        "windows.cpp",
        "(number + window.steps - own) * num_envs + e",
        "(number + window.steps) * num_envs + e",
        "views/test_transitions.py core/test_windows.py",
    ),
    Mutation(
        "a target bootstraps after a terminal",
        "windows.hpp",
        "return terminated ? 0.0 : discount;",
        "return discount;",
        "views/test_transitions.py views/test_hindsight.py",
    ),
    Mutation(
        "the first reward of a window is discounted",
        "windows.hpp",
        "window.value += window.discount * next.reward;\n        window.discount *= gamma;",
        "window.discount *= gamma;\n        window.value += window.discount * next.reward;",
        "views/test_transitions.py views/test_hindsight.py",
    ),
    Mutation(
        "frames of an earlier episode are in a stack",
        "windows.cpp",
        "auto reach = std::min(back, index);",
        "auto reach = back;",
        "views/test_transitions.py core/test_windows.py",
    ),
    Mutation(
        "frames that do not follow one another are copied as if they did",
        "windows.cpp",
        "together &= places[k] == places[0] + k;",
        "together &= places[k] >= places[0];",
        "views/test_transitions.py core/test_windows.py",
    ),
    # -- the core: sequences
    Mutation(
        "a chunk ends with its last step",
        "sequences.cpp",
        "for (auto more = total - 2; more > 0; --more) {",
        "for (auto more = total - 1; more > 0; --more) {",
        "views/test_chunks.py",
    ),
    Mutation(
        "an observation that is stored with its step is no row of a chunk",
        "sequences.cpp",
        "if (own && ring.step[place] == 0) final = --more == 0;",
        "if (own && ring.step[place] == 0) final = more == 1;",
        "views/test_chunks.py",
    ),
    Mutation(
        "an episode that was interrupted goes on in a chunk",
        "sequences.cpp",
        "return number + 1 == env.head ? env.next <= 0 :",
        "return number + 1 == env.head ? false :",
        "views/test_chunks.py",
    ),
    Mutation(
        "a chunk is terminal where its episode was truncated",
        "sequences.cpp",
        "over_ && before >= 0 && ring.terminated[before]",
        "over_ && before >= 0",
        "views/test_chunks.py",
    ),
    Mutation(
        "a large observation that an episode ended on is that before its last step",
        "ring/sequences.py",
        "zip(self.obs, self.finals or self.obs, strict=True)",
        "zip(self.obs, self.obs, strict=True)",
        "views/test_chunks.py",
    ),
    Mutation(
        "a large action mask is False where there is no step",
        "sequences.cpp",
        "else if (fill) std::memset",
        "else if (false) std::memset",
        "views/test_chunks.py views/test_sequences.py",
    ),
    Mutation(
        "large fields of hindsight are those after the windows as they were recorded",
        "goals.cpp",
        "last[i] = after;",
        ";",
        "views/test_large_fields.py",
    ),
    Mutation(
        "a sequence's rewards reach one step less far",
        "sequences.cpp",
        "auto k = t < own_ ? std::min(n, known_ - t) : 0;",
        "auto k = t < own_ ? std::min(n, known_ - t - 1) : 0;",
        "views/test_sequences.py",
    ),
    Mutation(
        "the last step of burn-in counts",
        "sequences.cpp",
        "burn_in_ <= t && t < own_);",
        "burn_in_ <= t + 1 && t < own_);",
        "views/test_sequences.py",
    ),
    Mutation(
        "an episode that was truncated has no last observation in its sequence",
        "sequences.cpp",
        "t == known_ && (terminated_ | truncated_) ?",
        "t == known_ && terminated_ ?",
        "views/test_sequences.py",
    ),
    Mutation(
        "a sequence is said to start with its burn-in",
        "sequences.cpp",
        "fact.start = number - at + start;",
        "fact.start = number - at + first;",
        "views/test_sequences.py",
    ),
    Mutation(
        "steps that do not count still bootstrap",
        "sequences.cpp",
        "if (k == 0) window.discount = 0.0;",
        "if (k < 0) window.discount = 0.0;",
        "views/test_sequences.py",
    ),
    Mutation(
        "a sequence whose burn-in begins its episode does not say so",
        "sequences.cpp",
        "t == 0 && step_ == 0);",
        "t == 0 && step_ == 0 && own_ == known_);",
        "views/test_sequences.py",
    ),
    Mutation(
        "the layers of a state lie as they are stored",
        "replay/reader.py",
        "states[path] = swap_layers(batch.pop(path)).contiguous()",
        "states[path] = batch.pop(path)",
        "replay/test_sequence_batches.py views/test_sequences.py",
    ),
    # -- the core: goals
    Mutation(
        "a goal of the future is the one reached before the row's own step",
        "goals.cpp",
        "return {number + 1, end};",
        "return {number, end};",
        "views/test_hindsight.py views/test_goals.py core/test_goals.py",
    ),
    Mutation(
        "a goal of the past may be the one that the row's own step reached",
        "goals.cpp",
        "return {first + 1, number};",
        "return {first + 1, number + 1};",
        "views/test_hindsight.py views/test_goals.py core/test_goals.py",
    ),
    Mutation(
        "a goal is chosen by the number that decided that there is one",
        "goals.cpp",
        "auto u = uniform(key, GOALS + 2 * i + 1);",
        "auto u = uniform(key, GOALS + 2 * i);",
        "views/test_hindsight.py views/test_goals.py core/test_goals.py",
    ),
    Mutation(
        "an episode that was interrupted is never over",
        "goals.cpp",
        "(layout.finished && end == env.head - 1 && env.next > 0)",
        "(layout.finished && end == env.head - 1)",
        "views/test_hindsight.py views/test_goals.py core/test_goals.py",
    ),
    Mutation(
        "numbers of 33 bits have goals of other episodes",
        "goals.cpp",
        "auto end = number + static_cast<std::uint32_t>(noted - number);",
        "auto end = noted;",
        "views/test_hindsight.py views/test_goals.py core/test_goals.py",
    ),
    Mutation(
        "with another goal, a window goes on over a truncation",
        "windows.hpp",
        "going = !(next.terminated | next.truncated)",
        "going = !next.terminated",
        "views/test_transitions.py views/test_hindsight.py",
    ),
    Mutation(
        "hindsight takes rewards that are not finite",
        "goals.cpp",
        "if (!std::isfinite((*judged)[entry])) return entry;",
        "if (std::isinf((*judged)[entry])) return entry;",
        "views/test_hindsight.py views/test_goals.py core/test_goals.py",
    ),
    Mutation(
        "a batch of hindsight that is drawn by priority has no weights",
        "goals.cpp",
        "weighed ? of->weighed : of->fields;",
        "of->fields;",
        "views/test_hindsight.py views/test_goals.py core/test_goals.py",
    ),
    # -- the core: returns and rollouts
    Mutation(
        "GAE carries on over a truncation",
        "returns_passes.hpp",
        "auto goes_on = unset(terminated | truncated), valued = goes_on;",
        "auto goes_on = unset(terminated), valued = unset(terminated | truncated);",
        "core/test_returns.py",
    ),
    Mutation(
        "a truncated step is valued by the next episode",
        "returns_passes.hpp",
        "following = unset(truncated) ? following",
        "following = unset(terminated) ? following",
        "core/test_returns.py",
    ),
    Mutation(
        "GAE passes on what a step that is not real was told",
        "returns_passes.hpp",
        "delta = where(real, delta);\n            goes_on &= real;",
        "delta = where(real, delta);",
        "core/test_returns.py",
    ),
    Mutation(
        "GAE adds a step's numbers in another order",
        "returns_passes.hpp",
        "(load(grid.reward + i, reads) - value) + where(ends.valued, gamma * ends.following);",
        "(load(grid.reward + i, reads) + where(ends.valued, gamma * ends.following)) - value;",
        "core/test_returns.py",
    ),
    Mutation(
        "V-trace clips traces as it clips rewards",
        "returns_passes.hpp",
        "auto c = lam * (ratio > most_c ? most_c : ratio)",
        "auto c = lam * (ratio > most_rho ? most_rho : ratio)",
        "core/test_returns.py",
    ),
    Mutation(
        "V-trace's advantage bootstraps from the value, not from the target",
        "returns_passes.hpp",
        "auto advantage = rho * (gain + where(ends.valued, gamma * targets.following));",
        "auto advantage = rho * (gain + where(ends.valued, gamma * ends.following));",
        "core/test_returns.py",
    ),
    Mutation(
        "a return of a step that is not real passes on",
        "returns_passes.hpp",
        "            goes_on &= real;\n        }\n        return {term + where(goes_on, gamma * next.ret)};",
        "        }\n        return {term + where(goes_on, gamma * next.ret)};",
        "core/test_returns.py",
    ),
    Mutation(
        "a step that is left out needs a final value",
        "returns_passes.hpp",
        "if (grid.truncated[i] && !grid.terminated[i] && (!grid.mask || grid.mask[i]) &&",
        "if (grid.truncated[i] && !grid.terminated[i] &&",
        "core/test_returns.py",
    ),
    Mutation(
        "a step that is left out ends the episode before it",
        "rollouts.cpp",
        "ended[env] = is_done[env] | (ended[env] & (1 - is_real[env]));",
        "ended[env] = is_done[env] | (1 - is_real[env]);",
        "core/test_rollouts.py rollout/test_windows.py",
    ),
    Mutation(
        "the last window of a run is left out if it is short",
        "rollouts.cpp",
        "return beyond > 0 ? (beyond + stride - 1) / stride * stride : 0;",
        "return beyond > 0 ? beyond / stride * stride : 0;",
        "core/test_rollouts.py rollout/test_windows.py",
    ),
    Mutation(
        "a window of a rollout goes on over an episode's end",
        "rollouts.cpp",
        "while (end + 1 < done.rows && !done[end][env] && real[end + 1][env]) ++end;",
        "while (end + 1 < done.rows && real[end + 1][env]) ++end;",
        "core/test_rollouts.py rollout/test_windows.py",
    ),
    Mutation(
        "padding whose bytes differ is filled with its first byte",
        "rollouts.cpp",
        "std::memcmp(pad.data, pad.data + 1, width - 1) == 0;",
        "std::memcmp(pad.data, pad.data + 1, width / 2) == 0;",
        "core/test_rollouts.py rollout/test_windows.py",
    ),
    # -- the core: counters and pages
    Mutation(
        "a step that ended without a next observation is committed to a lane",
        "counters.cpp",
        "if (kept && !(marks & FOLLOWED) && ends(row, n))",
        "if (kept && !(marks & CUT) && ends(row, n))",
        "core/test_counters.py",
    ),
    Mutation(
        "a row that is left out interrupts an episode that has ended",
        "counters.cpp",
        "is_kept(before_marks, before, n) && !ends(before, n)) marks |= LANE_ALONE;",
        "is_kept(before_marks, before, n)) marks |= LANE_ALONE;",
        "core/test_counters.py",
    ),
    Mutation(
        "a bell rings one step too late",
        "counters.cpp",
        "return held >= wanted && rung(Bell(bell_[0]));",
        "return held > wanted && rung(Bell(bell_[0]));",
        "core/test_counters.py",
    ),
    Mutation(
        "samples pass because of inserts that are not in yet",
        "counters.cpp",
        "auto ready = across - seen(counts[PENDING]);",
        "auto ready = across;",
        "core/test_counters.py",
    ),
    Mutation(
        "the last insert before the first sample waits for samples",
        "counters.cpp",
        "allowed = total <= rule.min_size ||",
        "allowed = total < rule.min_size ||",
        "core/test_counters.py",
    ),
    Mutation(
        "the page that a row begins on is not asked for",
        "pages.cpp",
        "for (auto low = first - first % page; low < last;",
        "for (auto low = first + (page - first % page) % page; low < last;",
        "replay/test_early_reads.py",
    ),
    Mutation(
        "of a large row, pages behind the first ones are not asked for",
        "pages.cpp",
        "low < last; low += PAGES * page)",
        "low < last; low += 2 * PAGES * page)",
        "replay/test_early_reads.py",
    ),
    # -- the core: tensors and batches
    Mutation(
        "a tensor with gaps is copied as if it had none",
        "tensors.cpp",
        "whole &= shape[axis] == 1 || static_cast<std::uint64_t>(stride(axis)) == step;",
        "whole &= shape[axis] >= 1 || static_cast<std::uint64_t>(stride(axis)) == step;",
        "core/test_tensors.py core/test_steps.py",
    ),
    Mutation(
        "a tensor that is negated lazily is copied as it lies in memory",
        "tensors.cpp",
        "return is_true(tensor, torch.is_neg) || (dtype.code",
        "return (dtype.code",
        "core/test_tensors.py memory/test_copier.py",
    ),
    Mutation(
        "the row behind the last is gathered",
        "windows.cpp",
        "if (place >= source.rows) return i;",
        "if (place > source.rows) return i;",
        "views/test_transitions.py core/test_windows.py",
    ),
    Mutation(
        "row -1 is taken, as one of zeros",
        "tensors.cpp",
        "if (index[i] < 0) return i;  // that",
        "if (index[i] < -1) return i;  // that",
        "core/test_tensors.py",
    ),
    Mutation(
        "bytes are copied up to the last whole 16 of them",
        "copies.hpp",
        "        move_piece(to + bytes - PIECE, from + bytes - PIECE);\n",
        "",
        "core/test_windows.py",
    ),
    Mutation(
        "rows of several envs are packed time first",
        "tensors.cpp",
        "found[i].data + (t * envs + low) * size,",
        "found[i].data + (low * steps + t) * size,",
        "core/test_tensors.py",
    ),
    Mutation(
        "of the blocks of a pool, the largest makes way",
        "pool.cpp",
        "other->capacity_ < block->capacity_",
        "other->capacity_ > block->capacity_",
        "core/test_tensors.py",
    ),
    Mutation(
        "of the blocks of a pool, the largest is taken",
        "pool.cpp",
        "block->capacity_ < best->capacity_);",
        "block->capacity_ > best->capacity_);",
        "core/test_tensors.py",
    ),
    Mutation(
        "a draw from the newest is from all",
        "batches.cpp",
        "draw.newest = newest;",
        "draw.newest = 0 * newest;",
        "core/test_batches.py samplers/test_recent.py",
    ),
    Mutation(
        "a cover is forgotten by the draw that it came with",
        "batches.cpp",
        "draw.from_some = true;",
        "draw.from_some = false;",
        "core/test_batches.py samplers/test_recent.py",
    ),
    Mutation(
        "leaves that are drawn by their weight come one from each part of the total",
        "batches.cpp",
        "masses(stream, false, total, wanted);",
        "masses(stream, true, total, wanted);",
        "core/test_batches.py",
    ),
    # -- lanes: steps of other processes
    Mutation(
        "lanes: the first step of a writer does not start new episodes",
        "processes/lanes.py",
        "CUT * cut + FOLLOWED * follows",
        "CUT * False + FOLLOWED * follows",
        "processes/test_lanes.py",
    ),
    Mutation(
        "lanes: a step that was taken is given back too late",
        "processes/lanes.py",
        "            lane.give_back(after)  #",
        "            lane.give_back(after - 1)  #",
        "processes/test_lanes.py",
    ),
    Mutation(
        "lanes: a writer takes the row of a step that was not drained",
        "processes/lanes.py",
        "        if number >= self._limit:\n            self._limit = self._lane.drained + self._steps\n",
        "        if number >= self._limit:\n            self._limit = self._lane.drained + self._steps + 1\n",
        "processes/test_lanes.py",
    ),
    Mutation(
        "lanes: a piece goes on over the start of new episodes",
        "processes/lanes.py",
        "stops = np.flatnonzero(flags[1:] & (CUT | FINISHED | LANE_ALONE))",
        "stops = np.flatnonzero(flags[1:] & (FINISHED | LANE_ALONE))",
        "processes/test_lanes.py",
    ),
    Mutation(
        "lanes: after a drain that was broken off its last piece comes again",
        "processes/lanes.py",
        "                if piece.intake.head_sum() != piece.head_sum:\n",
        "                if piece.intake.head_sum() == piece.head_sum:\n",
        "processes/test_lanes.py",
    ),
    # -- processes: weights, limits, servers, shared memory
    Mutation(
        "weights: a copy that was overwritten meanwhile is taken",
        "processes/weights.py",
        "            if self.version == number:",
        "            if number:",
        "processes/test_weights.py",
    ),
    Mutation(
        "weights: what was fetched is new again",
        "processes/weights.py",
        "        self._fetched = number\n",
        "        self._fetched = number - 1\n",
        "processes/test_weights.py",
    ),
    Mutation(
        "limits: rings that share a limit may each wait for all of it",
        "processes/limits.py",
        "samples = shares * (count",
        "samples = 1 * (count",
        "processes/test_limits.py",
    ),
    Mutation(
        "limits: the most inserts at once are rounded up",
        "processes/limits.py",
        "return most - (most * ratio > self._most_ahead)",
        "return most",
        "processes/test_limits.py",
    ),
    Mutation(
        "limits: a ring may insert what the others have inserted already",
        "processes/limits.py",
        "else inserts + room - most",
        "else min(inserts + room - most, 0)",
        "processes/test_limits.py cluster/test_limited_shards.py cluster/test_limited_ranks.py",
    ),
    Mutation(
        "limits: more can be taken back than was counted",
        "processes/limits.py",
        "if inserts > counted[INSERTS] or",
        "if inserts > counted[INSERTS] + 1 or",
        "processes/test_limits.py",
    ),
    Mutation(
        "servers: a stranger without the token is let in",
        "processes/wire.py",
        "if secrets.compare_digest(token.encode(), self.token.encode()) else None",
        "if token else None",
        "processes/test_server.py",
    ),
    Mutation(
        "servers: half a first message holds everybody up",
        "processes/wire.py",
        "(missing := self._hello_lacks()) and self.waits(0)",
        "missing := self._hello_lacks()",
        "processes/test_server.py processes/test_wire.py",
    ),
    Mutation(
        "servers: a line goes on within a message that was broken off",
        "processes/wire.py",
        "        if self._within:\n",
        "        if self._within and not self.fileno():\n",
        "processes/test_wire.py",
    ),
    Mutation(
        "shared memory: a forked child keeps its parent's claims",
        "processes/shared.py",
        "ONLY_HERE[self] = lambda claim: claim.drop()",
        "ONLY_HERE[self] = bool",
        "processes/test_shared.py",
    ),
    Mutation(
        "shared memory: another block is taken for one that is gone",
        "processes/shared.py",
        "if not _has_token(descriptor, token):",
        "if descriptor < 0:",
        "processes/test_shared.py",
    ),
    Mutation(
        "bells: a sleeper whom nobody wakes does not look by itself",
        "processes/shared.py",
        "self._sleep(value, min(left, GLANCE))",
        "self._sleep(value, min(left, 60.0))",
        "processes/test_bells.py",
    ),
    Mutation(
        "slots: a batch that was given back can still be read",
        "processes/server.py",
        "            take_back(batch)\n",
        "            pass\n",
        "processes/test_server.py",
    ),
    Mutation(
        "slots: autograd does not see that a batch was given back",
        "processes/server.py",
        "        increment_version(self.memory)\n",
        "",
        "processes/test_server.py",
    ),
    # -- shards: several rings and rollouts as one
    Mutation(
        "a ledger counts a step that the ring has lost",
        "cluster/shard.py",
        'if line["before"] >= heads:',
        'if line["before"] > heads:',
        "cluster/test_durable_shards.py",
    ),
    Mutation(
        "a ledger reads on after a torn line",
        "cluster/shard.py",
        'if len(checksum) != 8 or checksum != b"%08x" % crc32(text):',
        "if len(checksum) != 8:",
        "cluster/test_durable_shards.py",
    ),
    Mutation(
        "one shard gets the room of all",
        "cluster/replay.py",
        "granted = min(stored[shard] + room // len(up), bounds[shard] + max(free, 0))",
        "granted = bounds[shard] + max(free, 0)",
        "cluster/test_limited_ranks.py cluster/test_limited_shards.py",
    ),
    Mutation(
        "a restarted shard counts as having used its allowance",
        "cluster/replay.py",
        "if allowance is not None and allowance.born == totals.born else 0",
        "if allowance is not None else 0",
        "cluster/test_limited_shards.py",
    ),
    Mutation(
        "a rollout that comes again is kept again",
        "cluster/messages.py",
        "if label.number <= number:",
        "if label.number < number:",
        "cluster/test_rollouts.py",
    ),
    Mutation(
        "a rollout of the oldest version that is allowed is dropped",
        "cluster/messages.py",
        "if label.version >= oldest:",
        "if label.version > oldest:",
        "cluster/test_rollouts.py",
    ),
    Mutation(
        "the line of a restarted queue does not begin anew",
        "cluster/messages.py",
        "place if born == self._born else 0",
        "place",
        "cluster/test_rollouts.py",
    ),
    Mutation(
        "errors that a shard lost are not counted",
        "cluster/replay.py",
        "self.dropped += sent.rows",
        "self.dropped += 0",
        "cluster/test_outbox.py",
    ),
    Mutation(
        "the first minibatch has a row more than was asked for",
        "cluster/distributed.py",
        ".sum()) > batch_size:",
        ".sum()) > batch_size + 1:",
        "cluster/test_minibatch_bounds.py cluster/test_minibatches.py",
    ),
    Mutation(
        "the final observation of another env is sent",
        "cluster/writer.py",
        "+ columns[ended % width]",
        "+ ended % width",
        "cluster",
    ),
    Mutation(
        "an end that is left out needs a final observation",
        "cluster/writer.py",
        "return done if mask is None else done & mask",
        "return done",
        "cluster/test_writer.py",
    ),
    Mutation(
        "weights normalised by the buffer know only the rows that were drawn",
        "cluster/replay.py",
        "least = min([least, *(self._group.totals[shard].least",
        "least = min([least, *(least",
        "cluster/test_shard.py",
    ),
    Mutation(
        "a shard draws where the shard before it lies",
        "cluster/plan.py",
        "(self.wanted >= begin) & (self.wanted < self.ends[shard])] - begin",
        "(self.wanted >= begin) & (self.wanted < self.ends[shard])] - begin * (shard < 2)",
        "cluster",
    ),
    Mutation(
        "a mass at the end of a shard is rounded up to beyond it",
        "cluster/plan.py",
        "np.minimum(masses, math.nextafter(self.masses[shard], 0.0))",
        "masses",
        "cluster/test_plan.py",
    ),
    Mutation(
        "a mass that is stretched to the mass of now is rounded up to beyond it",
        "cluster/plan.py",
        "np.minimum(masses * (now / share.mass), math.nextafter(now, 0.0))",
        "masses * (now / share.mass)",
        "cluster/test_shard_sampler.py",
    ),
    Mutation(
        "rows of ranks with few rows count more",
        "cluster/distributed.py",
        "np.float32(rows * ranks.count / batch_size)",
        "np.float32(1.0)",
        "cluster/test_distributed.py",
    ),
    Mutation(
        "weights compare with the rows of this rank alone",
        "cluster/distributed.py",
        'ranks.exchange("sample: weights", report).min().item()',
        'ranks.exchange("sample: weights", report)[ranks.rank].min().item()',
        "cluster/test_distributed.py",
    ),
    Mutation(
        "ranks do not learn of each other's largest error",
        "cluster/distributed.py",
        "sampler.prioritized.largest_error = table[:, 2].max().item()",
        "sampler.prioritized.largest_error = table[ranks.rank, 2].item()",
        "cluster/test_distributed.py",
    ),
    Mutation(
        "a minibatch is the mean over each rank's rows",
        "cluster/distributed.py",
        "rows * self.ranks.count / total)",
        "1.0)",
        "cluster/test_minibatches.py",
    ),
    Mutation(
        "a replay stands still while its rank waits for the others",
        "cluster/distributed.py",
        "with self._turn:",
        "with self._turn, self._sampler.lock:",
        "cluster/test_distributed.py",
    ),
    Mutation(
        "a rank draws where its rows lay before it waited for the others",
        "cluster/plan.py",
        "masses * (now / share.mass)",
        "masses",
        "cluster/test_distributed.py",
    ),
    Mutation(
        "a batch has the number that came up while its rank waited for the others",
        "cluster/distributed.py",
        "batch_size, agreed.seed, agreed.t, table",
        "batch_size, agreed.seed, sampler.t, table",
        "cluster/test_distributed.py",
    ),
    Mutation(
        "a first message has a size of its own at each call",
        "cluster/distributed.py",
        "np.zeros((self.count, FIRST + WIDTH))",
        "np.zeros((self.count, FIRST + WIDTH + len(call)))",
        "cluster/test_distributed.py",
    ),
    Mutation(
        "the error of one rank is its own",
        "cluster/distributed.py",
        "row[FAILED], failure = 1.0, error",
        "row[FAILED], failure = 0.0, error",
        "cluster",
    ),
]
"""In the order of the rooms they are in, more or less."""


def stale() -> list[str]:
    """The mutations whose text does not occur exactly once, or whose tests are gone."""
    found = list[str]()
    for mutation in MUTATIONS:
        file = ROOT / "src" / mutation.path
        count = file.read_text(encoding="utf-8").count(mutation.old) if file.exists() else 0
        missing = [name for name in mutation.tests.split() if not (ROOT / "tests" / name).exists()]
        if count != 1 or missing:
            found.append(f"{mutation.name}: {mutation.path} has its line {count} times; missing: {missing}")
    return found


def verdict(mutation: Mutation, source: Path, stamp: int) -> str:
    """Run the tests of a mutation on a changed copy, which is mended afterwards: the test that noticed, or "lives"."""
    file = source / mutation.path
    core = {path: path.read_bytes() for path in source.glob("relive/core/_core*.so") if mutation.compiled}
    text, times = file.read_text(encoding="utf-8"), file.stat()
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    if not mutation.compiled:
        os.utime(file, (stamp, stamp))  # another second for each, since Python compiles again by whole seconds
    try:
        if mutation.compiled:
            build(source.parent)
        noticed = first_failure([f"tests/{name}" for name in mutation.tests.split()], source)
    finally:
        for path, good in core.items():
            path.unlink(missing_ok=True)
            path.write_bytes(good)
        file.write_text(text, encoding="utf-8")
        if not mutation.compiled:  # C++ is compiled anew where its time is later than the last build's
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    if noticed is None:
        return "lives"
    anyway = "::" in noticed and first_failure([noticed], source) is not None
    return noticed.removeprefix("tests/") + " (which fails without it, too)" * anyway


def build(checkout: Path) -> None:
    """Build the core of a copy of the checkout, and put it there: the first time all of it, then what has changed."""
    folder, tools = checkout / "build", Path(sys.executable).parent
    if not folder.exists():
        nanobind = done_by(sys.executable, "-m", "nanobind", "--cmake_dir").strip()
        known = {"CMAKE_MAKE_PROGRAM": tools / "ninja", "Python_EXECUTABLE": sys.executable, "nanobind_DIR": nanobind}
        known |= {"CMAKE_CXX_FLAGS_RELEASE": "-O1 -DNDEBUG", "RELIVE_ZIG": os.environ.get("RELIVE_ZIG") or "OFF"}
        options = [f"-D{name}={value}" for name, value in known.items()]
        done_by(tools / "cmake", "-S", checkout, "-B", folder, "-G", "Ninja", *options)
    done_by(tools / "cmake", "--build", folder)
    for path in checkout.glob("src/relive/core/_core*.so"):
        path.unlink()  # another process may have it mapped
    done_by(tools / "cmake", "--install", folder, "--prefix", checkout / "src")


def done_by(*command: str | Path) -> str:
    """What a program writes; an error if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def first_failure(tests: list[str], source: Path) -> str | None:
    """The first of the quick tests in these places that fails, or how they broke off; None if all pass."""
    output = source / "output"
    run: Any = multiprocessing.get_context("fork").Process(target=run_tests, args=(tests, source, output))
    run.start()
    run.join(SECONDS)
    if run.exitcode is None:
        os.killpg(run.pid, signal.SIGKILL)  # with the processes that its tests have started
        run.join()
        return "(hangs)"
    if run.exitcode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output.read_text(encoding="utf-8"), re.MULTILINE)
    return found.group(1) if found else f"(exit status {run.exitcode})"


def run_tests(tests: list[str], source: Path, output: Path) -> None:
    """In a process of its own: the quick tests in these places, up to the first that fails."""
    os.setsid()
    os.environ["PYTHONPATH"] = str(source)  # for processes that tests start
    sys.path.insert(0, str(source))
    os.chdir(ROOT)
    with output.open("w", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        options = ["-q", "-x", "-m", "not slow", "-p", "no:cacheprovider"]
        status = pytest.main([*options, *tests])
        sys.stdout.flush()
    os._exit(status)


def main(wanted: list[str]) -> int:
    """Run the mutations whose names contain one of the words, or all; returns how many live."""
    problems = stale()
    print("\n".join(problems), end="\n" * bool(problems))
    chosen = [m for m in MUTATIONS if not wanted or any(word in m.name for word in wanted)]
    lives = 0
    for heavy in ("torch", "gymnasium", "tensordict", "hypothesis"):  # once, for all processes that follow
        importlib.import_module(heavy)
    print("| mutation | in | noticed by | after |\n|---|---|---|---:|", flush=True)
    folder = tempfile.mkdtemp(prefix="mutations-")  # not one that goes when a process ends: tests end forks of this one
    try:
        source = Path(folder, "src")
        shutil.copytree(ROOT / "src", source)  # with the core that was built
        shutil.copy(ROOT / "CMakeLists.txt", folder)
        for i, mutation in enumerate(chosen):
            before = time.perf_counter()
            found = verdict(mutation, source, int(time.time()) + i)
            lives += found == "lives" or found.endswith("too)")
            seconds = time.perf_counter() - before
            print(f"| {mutation.name} | {mutation.path} | {found} | {seconds:.0f} s |", flush=True)
    finally:
        shutil.rmtree(folder)
    return lives + len(problems)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
