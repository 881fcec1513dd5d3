"""relive.compat.rsl_rl beside rsl_rl: each method of the rollout storage, on the same transitions."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from harness import Contender, Effort, PiecewiseCopyFloor, Workload, measure, write
from rollout_data import BATCHES, EPOCHS, Rollout

T, N, OBS, ACTIONS, HIDDEN = 24, 4096, 48, 12, 256
DONE = 1 / 200


@dataclass(frozen=True)
class Play:
    """The transitions of a rollout, what is called on a storage that holds them, and the bytes that takes.

    ``rnn`` says whose states there are: nobody's, those of an actor's GRU, or of an actor's and a critic's LSTM.
    """

    method: str
    rnn: str = ""

    @property
    def kind(self) -> str:
        return "distillation" if self.method == "generator" else "rl"

    @property
    def states(self) -> int:
        """State tensors of a step."""
        return {"": 0, "gru": 1, "lstm": 4}[self.rnn]

    def nbytes(self) -> int:
        """What a pass has to move at least: a rollout's steps once, or the shuffled batches of all epochs."""
        step = OBS + ACTIONS * (2 if self.kind == "distillation" else 3) + (1 if self.kind == "distillation" else 4)
        if self.method == "add_transition":
            return 4 * T * N * (step + self.states * HIDDEN)
        if self.method == "generator":
            return 4 * T * N
        if self.method == "mini_batch_generator":
            return 4 * EPOCHS * T * N * step
        return 4 * (T * N * step + self.sequences() * self.states * HIDDEN)

    def sequences(self) -> int:
        done = self.done()
        return N + int(done[:-1].sum())

    def done(self) -> np.ndarray:
        columns = Rollout.make(T, N, 1, 1, done=DONE).columns
        return columns["terminated"] | columns["truncated"]


class Storage:
    """A contender: one class of storage, filled with the rollout."""

    module = ""
    options: ClassVar[dict[str, Any]] = {}

    def setup(self, data: Play) -> None:
        self.data = data
        storage_class = importlib.import_module(self.module).RolloutStorage
        tensordict = importlib.import_module("tensordict")
        rollout = Rollout.make(T, N, OBS, ACTIONS, done=DONE)
        columns, done = rollout.tensors(("obs", "action", "reward", "value", "log_prob")), torch.from_numpy(data.done())
        groups = [tensordict.TensorDict({"policy": obs}, [N]) for obs in columns["obs"]]
        state = torch.arange(T * N, dtype=torch.float32).view(T, 1, N, 1)
        self.transitions = []
        for t in range(T):
            made = storage_class.Transition()
            made.observations, made.actions, made.dones = groups[t], columns["action"][t], done[t]
            made.rewards, made.values = columns["reward"][t], columns["value"][t][:, None]
            made.actions_log_prob, made.privileged_actions = columns["log_prob"][t], columns["action"][t]
            made.distribution_params = (columns["action"][t], columns["action"][t])
            hidden = [state[t].expand(1, N, HIDDEN).clone() for _ in range(data.states)]
            made.hidden_states = {0: (None, None), 1: (hidden and hidden[0], None)}.get(
                data.states, (tuple(hidden[:2]), tuple(hidden[2:]))
            )
            self.transitions.append(made)
        self.storage = storage_class(data.kind, N, T, groups[0], (ACTIONS,), **self.options)
        self.fill()

    def fill(self) -> None:
        self.storage.clear()
        for transition in self.transitions:
            self.storage.add_transition(transition)

    def batches(self) -> Any:
        generator = getattr(self.storage, self.data.method)
        return generator() if self.data.method == "generator" else generator(BATCHES, EPOCHS)

    def run(self) -> None:
        if self.data.method == "add_transition":
            self.fill()
        else:
            for _ in self.batches():
                pass

    def check(self) -> str:
        """All batches of the first epoch hold every transition once, with the states that begin its trajectories."""
        if self.data.method == "add_transition":
            same = torch.equal(self.storage.values[-1], self.transitions[-1].values)
            return "" if same and self.storage.step == T else "values differ"
        if self.data.method == "generator":
            found = torch.cat([batch.observations["policy"][:, 0] for batch in self.batches()])
            return "" if torch.equal(found, torch.arange(T * N).float()) else "order differs"
        epoch = [batch for batch, _ in zip(self.batches(), range(BATCHES), strict=False)]
        numbers = torch.cat([batch.values.flatten() for batch in epoch]).sort().values
        if not torch.equal(numbers, torch.arange(T * N).float()):
            return "transitions differ"
        for batch in epoch if self.data.states else ():
            state = batch.hidden_states[0]
            first = (state if isinstance(state, torch.Tensor) else state[0])[0, :, 7]
            if not torch.equal(first, batch.observations["policy"][0, :, 0]):
                return "states differ"
        return ""


class Ours(Storage):
    label, package, role, module = "relive.compat.rsl_rl", "relive", "ours", "relive.compat.rsl_rl"
    note = "RolloutStorage; passes of 5 epochs of 4 minibatches, other ones in each epoch"


class OursAsTheirs(Ours):
    label = "relive.compat.rsl_rl, reshuffle_each_epoch=False"
    options: ClassVar[dict[str, Any]] = {"reshuffle_each_epoch": False}
    note = "the same, the same minibatches in each epoch"


class Theirs(Storage):
    label, package, role, module = "rsl-rl", "rsl-rl-lib", "peer", "rsl_rl.storage"
    note = "RolloutStorage; passes of 5 epochs of 4 minibatches, the same ones in each epoch"


WORKLOADS = {
    "add_transition": Play("add_transition"),
    "add_transition, LSTMs": Play("add_transition", "lstm"),
    "mini_batch_generator": Play("mini_batch_generator"),
    "recurrent, GRU": Play("recurrent_mini_batch_generator", "gru"),
    "recurrent, LSTMs": Play("recurrent_mini_batch_generator", "lstm"),
    "generator": Play("generator"),
}


def run(effort: Effort, folder: Path) -> None:
    """Measures the storage's methods and writes `compat_rsl_rl.json`."""
    floor = PiecewiseCopyFloor(Play.nbytes, "what is read or written")
    workloads = []
    for name, data in WORKLOADS.items():
        contenders: list[Contender] = [floor, Ours(), Theirs()]
        if data.method.endswith("mini_batch_generator"):
            contenders.insert(2, OursAsTheirs())
        workloads.append(measure(Workload(name, data), contenders, effort))
    write("compat_rsl_rl", "rsl_rl's storage, (24, 4096), a rollout or a pass", workloads, folder)
