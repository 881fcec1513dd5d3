"""relive.compat.rsl_rl beside rsl_rl itself: the same steps into both storages, and rsl_rl's own training on ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

import relive.compat.rsl_rl as ours

rsl_rl: Any = import_module("rsl_rl.storage")
host_ppo: Any = import_module("rsl_rl.algorithms.ppo")
host_distillation: Any = import_module("rsl_rl.algorithms.distillation")
runners: Any = import_module("rsl_rl.runners")

T, N, ACTIONS = 8, 6, 2
FIELDS = ("observations", "rewards", "actions", "dones", "distribution_params", "saved_hidden_state_a")
RL = (*FIELDS, "values", "actions_log_prob", "returns", "advantages", "saved_hidden_state_c")


def observations(generator: torch.Generator) -> TensorDict:
    policy = torch.rand(N, 3, generator=generator)
    image = torch.randint(0, 256, (N, 2, 2), generator=generator, dtype=torch.uint8)
    return TensorDict({"policy": policy, "image": image}, [N])


def play(storage: Any, transition: Any, seed: int, first: bool = True) -> None:
    """T random transitions; a state is None at the very first step, as rsl_rl's models have it."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    for t in range(T):
        transition.observations, transition.actions = observations(generator), rand(N, ACTIONS)
        transition.rewards, transition.dones = rand(N), rand(N) < 0.3
        transition.values, transition.actions_log_prob = rand(N, 1), rand(N)
        transition.distribution_params, transition.privileged_actions = (rand(N, ACTIONS), rand(N, 1)), rand(N, ACTIONS)
        states = ((rand(2, N, 4), rand(2, N, 4)), rand(1, N, 5))
        transition.hidden_states = (None, None) if first and not t else states
        storage.add_transition(transition)
        transition.clear()
    if storage.training_type == "rl":
        for t in range(T):
            storage.returns[t] = storage.values[t] + storage.rewards[t]
        storage.advantages = storage.returns - storage.values


def both(kind: str = "rl", seed: int = 0, **options: Any) -> tuple[Any, Any]:
    example = observations(torch.Generator().manual_seed(0))
    made = ours.RolloutStorage(kind, N, T, example, (ACTIONS,), seed=seed, **options)
    theirs = rsl_rl.RolloutStorage(kind, N, T, example, (ACTIONS,))
    for storage in (made, theirs):
        play(storage, type(storage).Transition(), seed)
    return made, theirs


def assert_same(mine: Any, its: Any, what: str) -> None:
    """Equal in kind, shape, dtype and value, however nested."""
    if isinstance(its, list | tuple):
        assert type(mine) is type(its), what
        assert len(mine) == len(its), what
        for i, (a, b) in enumerate(zip(mine, its, strict=True)):
            assert_same(a, b, f"{what}[{i}]")
    elif isinstance(its, TensorDict):
        assert mine.batch_size == its.batch_size, what
        assert set(mine.keys()) == set(its.keys()), what
        for name in its.keys():
            assert_same(mine[name], its[name], f"{what}.{name}")
    elif its is None:
        assert mine is None, what
    else:
        assert (mine.shape, mine.dtype) == (its.shape, its.dtype), what
        assert torch.equal(mine, its), what


@pytest.mark.parametrize("rollouts", [1, 2])
def test_all_attributes_hold_the_same_after_the_same_steps(rollouts: int) -> None:
    made, theirs = both()
    for more in range(1, rollouts):
        for storage in (made, theirs):
            storage.clear()
            play(storage, type(storage).Transition(), more, first=False)
    assert made.step == theirs.step == T
    for name in RL:
        assert_same(getattr(made, name), getattr(theirs, name), name)


def test_our_storage_takes_rsl_rls_transitions() -> None:
    made, theirs = both()
    made.clear()
    play(made, rsl_rl.RolloutStorage.Transition(), 0)
    for name in RL:
        assert_same(getattr(made, name), getattr(theirs, name), name)


@pytest.mark.parametrize("batches", [1, 2, 3, 6])
def test_recurrent_batches_in_rsl_rls_order_are_the_same_to_the_bit(batches: int) -> None:
    made, theirs = both(reshuffle_each_epoch=False)
    pairs = zip(*(s.recurrent_mini_batch_generator(batches, 2) for s in (made, theirs)), strict=True)
    for mine, its in pairs:
        for name in vars(its):
            assert_same(getattr(mine, name), getattr(its, name), name)


def test_trajectories_are_split_padded_and_put_back_to_the_bit() -> None:
    _, theirs = both()
    utils: Any = import_module("rsl_rl.utils")
    for given in (theirs.values, theirs.observations):
        (mine, my_masks), (its, its_masks) = (
            module.split_and_pad_trajectories(given, theirs.dones) for module in (ours, utils)
        )
        assert_same(my_masks, its_masks, "masks")
        assert_same(mine, its, "padded")
        assert_same(ours.unpad_trajectories(mine, my_masks), utils.unpad_trajectories(its, its_masks), "steps")


def rows(batches: list[Any], names: tuple[str, ...] = ("values", "advantages", "returns", "actions")) -> list[Any]:
    """What the batches hold, row by row, whatever their order."""
    found = torch.cat([torch.cat([getattr(b, n).flatten(1) for n in names], 1) for b in batches])
    return sorted(found.tolist())


@pytest.mark.parametrize("batches", [1, 3, 4])
def test_an_epoch_of_minibatches_holds_the_same_transitions_in_batches_of_the_same_shapes(batches: int) -> None:
    made, theirs = both()
    mine, its = (list(s.mini_batch_generator(batches, 1)) for s in (made, theirs))
    assert rows(mine) == rows(its)
    for a, b in zip(mine, its, strict=True):
        assert a.observations.batch_size == b.observations.batch_size
        for name in ("values", "advantages", "returns", "actions", "old_actions_log_prob"):
            assert getattr(a, name).shape == getattr(b, name).shape
            assert getattr(a, name).dtype == getattr(b, name).dtype
        assert [p.shape for p in a.old_distribution_params] == [p.shape for p in b.old_distribution_params]
        assert a.observations["image"].dtype is b.observations["image"].dtype
        assert a.hidden_states == b.hidden_states == (None, None)
        assert a.masks is b.masks is None


def test_a_pass_in_shuffled_recurrent_batches_has_the_same_trajectories() -> None:
    made, theirs = both()
    found = []
    for storage in (made, theirs):
        batches = list(storage.recurrent_mini_batch_generator(3, 1))
        starts = [torch.cat([b.observations["policy"][0], b.hidden_states[1][0]], 1) for b in batches]
        found.append(sorted(torch.cat(starts).tolist()))
    assert found[0] == found[1]


def test_distillation_batches_are_the_same() -> None:
    made, theirs = both("distillation")
    for mine, its in zip(made.generator(), theirs.generator(), strict=True):
        for name in vars(its):
            assert_same(getattr(mine, name), getattr(its, name), name)


def test_the_same_calls_raise_the_same_errors() -> None:
    made, theirs = both()
    for storage in (made, theirs):
        with pytest.raises(OverflowError, match="Rollout buffer overflow! You should call clear"):
            storage.add_transition(type(storage).Transition())
        with pytest.raises(ValueError, match="only available for distillation training"):
            next(storage.generator())
    for storage in both("distillation"):
        for name in ("mini_batch_generator", "recurrent_mini_batch_generator"):
            with pytest.raises(ValueError, match="only available for reinforcement learning training"):
                next(getattr(storage, name)(1))
        assert not hasattr(storage, "values")


# -- where rsl_rl is wrong --------------------------------------------------------------------------------------------


def test_rsl_rl_repeats_one_permutation_in_all_epochs_and_ours_does_only_if_asked() -> None:
    made, theirs = both()
    fixed, _ = both(reshuffle_each_epoch=False)
    repeated = []
    for storage in (theirs, fixed, made):
        batches = [batch.values for batch in storage.mini_batch_generator(1, 2)]
        repeated.append(torch.equal(*batches))
    assert repeated == [True, True, False]


def test_rsl_rl_always_drops_the_same_transitions_and_ours_none() -> None:
    made, theirs = both()
    for storage, left_out in ((theirs, 48 % 7), (made, 0)):
        served = {tuple(row) for row in rows(list(storage.mini_batch_generator(7, 3)))}
        assert T * N - len(served) == left_out


def test_rsl_rl_drops_envs_and_yields_empty_batches_and_ours_neither() -> None:
    made, theirs = both()
    assert sum(batch.values.shape[1] for batch in theirs.recurrent_mini_batch_generator(4, 1)) == 4
    assert sum(batch.values.shape[1] for batch in made.recurrent_mini_batch_generator(4, 1)) == N
    assert all(batch.values.numel() == 0 for batch in theirs.recurrent_mini_batch_generator(N + 1, 1))
    with pytest.raises(ValueError, match="6 envs make 1 to 6 minibatches"):
        next(made.recurrent_mini_batch_generator(N + 1, 1))


def test_rsl_rl_serves_rows_of_the_rollout_before_and_ours_only_this_ones() -> None:
    for storage, count in zip(both(), (0, T * N), strict=True):
        old = set(storage.values.flatten().tolist())
        storage.clear()
        play_one(storage)
        served = torch.cat([batch.values for batch in storage.mini_batch_generator(1, 1)]).flatten().tolist()
        assert len(old & set(served)) == (count and count - N)


def play_one(storage: Any) -> None:
    made = type(storage).Transition()
    made.observations, made.actions = observations(torch.Generator()), torch.zeros(N, ACTIONS)
    made.rewards = made.dones = made.actions_log_prob = torch.zeros(N)
    made.values, made.distribution_params = torch.full((N, 1), 9.0), (torch.zeros(N, ACTIONS), torch.zeros(N, 1))
    storage.add_transition(made)


def test_rsl_rl_keeps_the_state_of_the_rollout_before_where_there_is_none_and_ours_zeros() -> None:
    for storage, stale in zip(both(), (False, True), strict=True):
        play(storage_cleared(storage), type(storage).Transition(), 1, first=False)
        play(storage_cleared(storage), type(storage).Transition(), 2, first=True)
        assert bool(storage.saved_hidden_state_a[0][0].any()) is stale


def storage_cleared(storage: Any) -> Any:
    storage.clear()
    return storage


# -- rsl_rl's own training on our storage -----------------------------------------------------------------------------


class Task:
    """An rsl_rl ``VecEnv``: say the number that was shown, at once or, with ``memory``, at every step after the first.

    Episodes are cut off after LENGTH steps; ``extras["final_obs"]`` has what they ended on.
    """

    num_envs, num_actions, max_episode_length, device = 32, 1, 5, "cpu"
    cfg: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, memory: bool) -> None:
        self._memory, self._generator = memory, torch.Generator().manual_seed(0)
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.int64)
        self._cue = self._new_cue()

    def _new_cue(self) -> Tensor:
        return torch.randint(0, 2, (self.num_envs,), generator=self._generator) * 2.0 - 1

    def get_observations(self) -> TensorDict:
        shown = torch.where(self.episode_length_buf == 0, self._cue, 0.0) if self._memory else self._cue
        time = self.episode_length_buf / self.max_episode_length
        return TensorDict({"policy": torch.stack([shown, time], 1)}, [self.num_envs])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        reward = -(actions[:, 0] - self._cue).square()
        self.episode_length_buf += 1
        final_obs, done = self.get_observations(), self.episode_length_buf == self.max_episode_length
        self.episode_length_buf[done] = 0
        self._cue = torch.where(done, self._new_cue(), self._cue)
        return self.get_observations(), reward, done.long(), {"time_outs": done, "final_obs": final_obs}


def config(algorithm: str, recurrent: bool) -> dict[str, Any]:
    model = {"class_name": "MLPModel", "hidden_dims": [32], "activation": "elu"}
    if recurrent:
        model |= {"class_name": "RNNModel", "rnn_type": "lstm", "rnn_hidden_dim": 16, "rnn_num_layers": 1}
    noise = {"class_name": "GaussianDistribution", "init_std": 0.6}
    return {
        "num_steps_per_env": 10,
        "save_interval": 1000,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": {"class_name": algorithm, "learning_rate": 5e-3, "gamma": 0.5, "entropy_coef": 0.0},
        "actor": model | {"distribution_cfg": noise},
        "critic": dict(model),
    }


def learn(algorithm: str, recurrent: bool, iterations: int) -> tuple[float, Any]:
    """The mean reward of the deterministic policy after training."""
    torch.manual_seed(0)
    runner = runners.OnPolicyRunner(Task(recurrent), config(algorithm, recurrent))
    runner.learn(iterations)
    env, actor, total = Task(recurrent), runner.alg.actor, 0.0
    actor.reset()
    with torch.no_grad():
        obs = env.get_observations()
        for _ in range(20):
            obs, reward, dones, _ = env.step(actor(obs))
            actor.reset(dones)
            total += reward.mean().item() / 20
    return total, runner.alg.storage


@contextmanager
def put_in_place(module: Any) -> Iterator[None]:
    """rsl_rl's own algorithm makes our storage."""
    theirs, module.RolloutStorage = module.RolloutStorage, ours.RolloutStorage
    try:
        yield
    finally:
        module.RolloutStorage = theirs


@pytest.mark.slow
@pytest.mark.parametrize(("recurrent", "iterations"), [(False, 20), (True, 60)])
def test_rsl_rls_ppo_learns_on_our_storage_as_well_as_on_its_own(recurrent: bool, iterations: int) -> None:
    """Without memory the best guess at what is not shown any more is 0, which earns -0.8."""
    theirs, storage = learn("PPO", recurrent, iterations)
    assert not isinstance(storage, ours.RolloutStorage)
    with put_in_place(host_ppo):
        same_class, storage = learn("PPO", recurrent, iterations)
    assert isinstance(storage, ours.RolloutStorage)
    with_final_values, storage = learn("relive.compat.rsl_rl:PPO", recurrent, iterations)
    assert isinstance(storage, ours.RolloutStorage)
    print(f"recurrent={recurrent}: {theirs:.3f} its own, {same_class:.3f} ours, {with_final_values:.3f} with final_obs")
    assert min(same_class, with_final_values) > max(-0.1, theirs - 0.05)


@pytest.mark.parametrize("recurrent", [False, True])
def test_two_trainings_after_one_manual_seed_are_equal_to_the_bit(recurrent: bool) -> None:
    """As rsl_rl's own tests of its runner ask for."""

    def trained(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        runner = runners.OnPolicyRunner(Task(recurrent), config("PPO", recurrent))
        assert isinstance(runner.alg.storage, ours.RolloutStorage)
        runner.learn(3)
        return [value.clone() for value in runner.alg.actor.state_dict().values()]

    with put_in_place(host_ppo):
        one, same, other = trained(42), trained(42), trained(99)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def distil(module: Any, put: bool) -> tuple[list[float], Any]:
    """The losses of a recurrent student that is to say what a fixed teacher says."""
    torch.manual_seed(0)
    env, models = Task(memory=True), import_module("rsl_rl.models")
    obs, groups = env.get_observations(), {"student": ["policy"], "teacher": ["policy"]}
    noise = {"class_name": "GaussianDistribution", "init_std": 0.1}
    options: dict[str, Any] = {"hidden_dims": [32], "rnn_type": "gru", "rnn_hidden_dim": 16, "distribution_cfg": noise}
    student = models.RNNModel(obs, groups, "student", 1, **deepcopy(options))  # 5.4 takes names out of them
    teacher = models.RNNModel(obs, groups, "teacher", 1, **deepcopy(options))
    storage_class = ours.RolloutStorage if put else rsl_rl.RolloutStorage
    storage = storage_class("distillation", env.num_envs, 10, obs, [1])
    algorithm = module.Distillation(student, teacher, storage, num_learning_epochs=2, gradient_length=5)
    losses = []
    for _ in range(30):
        with torch.inference_mode():
            for _ in range(10):
                obs, rewards, dones, extras = env.step(algorithm.act(obs))
                algorithm.process_env_step(obs, rewards, dones, extras)
        losses.append(algorithm.update()["behavior"])
    return losses, algorithm.storage


@pytest.mark.slow
def test_rsl_rls_distillation_is_the_same_on_our_storage() -> None:
    theirs, _ = distil(host_distillation, put=False)
    same, storage = distil(host_distillation, put=True)
    assert isinstance(storage, ours.RolloutStorage)
    assert same == pytest.approx(theirs, rel=1e-4)
    named, storage = distil(ours, put=False)
    assert isinstance(storage, ours.RolloutStorage)
    assert named == pytest.approx(theirs, rel=1e-4)
    assert theirs[-1] < theirs[0] / 5


def test_ppo_of_relive_values_a_time_out_by_what_the_episode_ended_on() -> None:
    """rsl_rl's own adds γV(s_t) to the stored reward."""
    for algorithm, kept in (("PPO", False), ("relive.compat.rsl_rl:PPO", True)):
        torch.manual_seed(0)
        env = Task(memory=False)
        runner = runners.OnPolicyRunner(env, config(algorithm, recurrent=False))
        rewards, finals = [], []
        obs = env.get_observations()
        with torch.no_grad():
            for _ in range(10):
                obs, reward, dones, extras = env.step(runner.alg.act(obs))
                finals.append(runner.alg.critic(extras["final_obs"]))
                runner.alg.process_env_step(obs, reward, dones, extras)
                rewards.append(reward[:, None])
            runner.alg.compute_returns(obs)
        storage = runner.alg.storage
        assert torch.equal(storage.rewards, torch.stack(rewards)) is kept
        after = finals[4] if kept else storage.values[4]
        torch.testing.assert_close(storage.returns[4], rewards[4] + 0.5 * after)


@pytest.mark.parametrize("kind", ["rl", "distillation"])
def test_a_storage_of_rsl_rl_becomes_ours_with_its_transitions(kind: str) -> None:
    _, theirs = both(kind)
    made = ours.RolloutStorage.from_original(theirs, seed=0)
    assert (made.step, made.training_type) == (T, kind)
    for name in RL if kind == "rl" else (*FIELDS[:4], "privileged_actions"):
        found, wanted = getattr(made, name), getattr(theirs, name)
        if isinstance(wanted, tuple | list):
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), name
        elif wanted is not None:
            assert bool((found == wanted).all()), name
    if kind == "rl":
        (mine,), (its,) = (list(storage.recurrent_mini_batch_generator(1, 1)) for storage in (made, theirs))
        assert mine.masks.sum() == its.masks.sum()
        assert sorted(mine.returns.flatten().tolist()) == sorted(its.returns.flatten().tolist())
