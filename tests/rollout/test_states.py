"""Recurrent policies: unrolled from the stored state, a sequence gives what the policy gave when it played."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

from relive import GAE, Collector, Field, RolloutBuffer, Schema, SequenceBatch, errors
from support import oracle
from support.cases import covering
from support.effort import in_ci, often

KINDS = ("LSTM", "GRU", "cell", "two LSTMs", "CfC", "CfC with mixed memory", "LTC")
ENVS, STEPS, LIMIT = 3, 22, 9
READINGS: tuple[dict[str, Any], ...] = (
    {"length": 4},
    {"length": 5, "overlap": "half"},
    {"length": 3, "overlap": "max"},
    {"length": 6, "overlap": 2},
    {},
)

MODES = [mode.name for mode in AutoresetMode]
every_mode = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name.lower())
every_kind = pytest.mark.parametrize("kind", KINDS)


def quick_kinds(*axes: Any) -> list[Any]:
    """Each kind with a value of each axis; four kinds, of every structure of a state, in ``make test``."""
    cases, rest = covering(KINDS, *axes), ("cell", "CfC", "LTC")
    return [in_ci(*case.values) if case.values[0] in rest and not case.marks else case for case in cases]


every_kind_in_a_mode = pytest.mark.parametrize(("kind", "mode"), quick_kinds(MODES))


def core_of(kind: str) -> tuple[nn.Module, Any, int]:
    """A recurrent module, the schema of its state, and how many numbers it gives out."""
    if kind in ("CfC", "CfC with mixed memory"):
        ncps = pytest.importorskip("ncps.torch")

        mixed = kind != "CfC"
        return ncps.CfC(4, 6, batch_first=False, mixed_memory=mixed), ((6,), (6,)) if mixed else Field((6,)), 6
    if kind == "LTC":
        ncps = pytest.importorskip("ncps.torch")
        wirings = pytest.importorskip("ncps.wirings")

        return ncps.LTC(4, wirings.AutoNCP(8, 3, seed=0), batch_first=False), Field((8,)), 3
    if kind == "cell":
        return nn.GRUCell(4, 5), Field((5,)), 5
    return getattr(nn, kind)(4, 5, 2), ((2, 5), (2, 5)) if kind == "LSTM" else Field((2, 5)), 5


class Actor(nn.Module):
    """An actor and a critic with a memory, shared or one each, and an initial state that can be learned."""

    def __init__(self, kind: str, *, learned: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        if kind == "two LSTMs":
            self.parts = {name: core_of("LSTM") for name in ("actor", "critic")}
            self.spec: Any = {name: spec for name, (_, spec, _) in self.parts.items()}
        else:
            self.parts = {"actor": core_of(kind)}
            self.spec = self.parts["actor"][1]
        self.cores = nn.ModuleDict({name: core for name, (core, _, _) in self.parts.items()})
        size = self.parts["actor"][2]
        self.logits, self.value = nn.Linear(size, 2), nn.Linear(size, 1)
        for weight in self.parameters():
            if weight.dim() == 2 and kind in ("LSTM", "GRU", "cell", "two LSTMs"):
                nn.init.normal_(weight, std=0.7)  # so that the state matters
        self.initial = nn.ParameterList(
            nn.Parameter(0.5 * torch.randn(leaf.shape)) for leaf in Schema({"hidden": self.spec}).leaves.values()
        )
        self.learned = learned
        self.generator = torch.Generator().manual_seed(1)

    def initial_hidden(self) -> Any:
        """Nested as in the schema, without the axis of envs."""
        leaves = dict(zip(Schema({"hidden": self.spec}).leaves, self.initial, strict=True))
        return Schema({"hidden": self.spec}).rebuild("hidden", leaves.__getitem__)

    def unroll(self, obs: Tensor, hidden: Any) -> tuple[Tensor, Tensor, Any]:
        """Log-probabilities ``[L, B, 2]``, values ``[L, B]`` and the state after the last step."""
        if self.kind == "two LSTMs":
            actor, actor_after = self.cores["actor"](obs, hidden["actor"])
            critic, critic_after = self.cores["critic"](obs, hidden["critic"])
            after: Any = {"actor": actor_after, "critic": critic_after}
        elif self.kind == "cell":
            states = [hidden := self.cores["actor"](row, hidden) for row in obs]
            actor = critic = torch.stack(states)
            after = hidden
        else:
            actor, after = self.cores["actor"](obs, hidden)
            critic = actor
        return self.logits(actor).log_softmax(-1), self.value(critic).squeeze(-1), after

    def forward(self, obs: Tensor, hidden: Any) -> dict[str, Any]:
        log_probs, value, after = self.unroll(obs.unsqueeze(0), hidden)
        action = torch.multinomial(log_probs[0].exp(), 1, generator=self.generator)
        log_prob = log_probs[0].gather(1, action).squeeze(1)
        return {"action": action.squeeze(1), "value": value[0], "log_prob": log_prob, "hidden": after}


def make(net: Actor, mode: AutoresetMode, **options: Any) -> Collector:
    """A collector of CartPoles that fall, or are cut off after a few steps."""
    envs = SyncVectorEnv([partial(gym.make, "CartPole-v1", max_episode_steps=LIMIT)] * ENVS, autoreset_mode=mode)
    schema = Schema.from_env(envs, value=(), log_prob=(), hidden=net.spec)
    rollout = RolloutBuffer(schema, options.pop("num_steps", STEPS), ENVS, seed=0, **options)
    return Collector(envs, net, rollout, seed=3, initial_hidden=net.initial_hidden if net.learned else None)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of a nested state."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for member in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(member)]


def mapped(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {name: mapped(member, function) for name, member in tree.items()}
    return tuple(mapped(member, function) for member in tree)


def sequence(seq: SequenceBatch, b: int) -> tuple[Tensor, Any]:
    """The observations and the state of one sequence, without padding, as a batch of one."""
    one = slice(b, b + 1)
    hidden = mapped(seq["hidden"], lambda x: x[:, one] if x.dim() == 3 else x[one])
    return seq["obs"][: seq["lengths"][b], one], hidden


def taken(log_probs: Tensor, action: Tensor) -> Tensor:
    return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def replayed(net: Actor, batches: Iterator[SequenceBatch]) -> set[tuple[int, int]]:
    """Each batch gives the values and log-probabilities that are stored; which steps (t, env) it had."""
    seen: set[tuple[int, int]] = set()
    for seq in batches:
        log_probs, value, _ = net.unroll(seq["obs"], seq["hidden"])
        close(seq.flat(value), seq.flat(seq["value"]))
        close(seq.flat(taken(log_probs, seq["action"])), seq.flat(seq["log_prob"]))
        for b in range(len(seq)):
            first = int(seq["start"][b])
            count = int(seq["lengths"][b] - seq["burn_in"][b])
            seen |= {(t, int(seq["env"][b])) for t in range(first, first + count)}
    return seen


def real_steps(rollout: RolloutBuffer) -> set[tuple[int, int]]:
    return {(t, n) for t, n in rollout["mask"].nonzero().tolist()}


# What was played is played again


@every_kind_in_a_mode
def test_a_sequence_unrolled_from_its_stored_state_gives_the_stored_outputs(kind: str, mode: str) -> None:
    net = Actor(kind)
    collector = make(net, AutoresetMode[mode])
    rollout = collector.buffer
    assert isinstance(rollout, RolloutBuffer)
    kinds = set()
    with torch.no_grad():
        for _ in range(often(2, 3)):
            collector.collect()
            kinds |= set(
                zip(rollout["terminated"].flatten().tolist(), rollout["truncated"].flatten().tolist(), strict=True)
            )
            for reading in READINGS[:: often(2, 1)]:
                assert replayed(net, rollout.sequences(**reading, batch_size=5)) == real_steps(rollout)
    assert kinds >= {(False, False), (False, True)}


@every_kind_in_a_mode
def test_the_state_a_sequence_ends_in_is_the_one_that_the_next_begins_with(kind: str, mode: str) -> None:
    net = Actor(kind)
    collector = make(net, AutoresetMode[mode])
    rollout = collector.buffer
    assert isinstance(rollout, RolloutBuffer)
    checked = 0
    with torch.no_grad():
        for _ in range(2):
            collector.collect()
            flags = rollout["terminated"], rollout["truncated"], rollout["mask"]
            ends = {(run.env, run.t1) for runs in oracle.split(*flags) for run in runs}
            columns = leaves(rollout.schema.rebuild("hidden", rollout.__getitem__))
            (seq,) = rollout.sequences(4)
            for b in range(len(seq)):
                _, _, after = net.unroll(*sequence(seq, b))
                env, at = int(seq["env"][b]), int(seq["start"][b] + seq["lengths"][b])
                if (env, at) not in ends:
                    for state, column in zip(leaves(after), columns, strict=True):
                        close(state.squeeze(-2), column[at, env])
                    checked += 1
    assert checked > 10


@every_kind_in_a_mode
def test_chunks_give_the_stored_outputs_if_the_state_starts_afresh_where_episodes_do(kind: str, mode: str) -> None:
    net = Actor(kind)
    collector = make(net, AutoresetMode[mode])
    rollout = collector.buffer
    assert isinstance(rollout, RolloutBuffer)
    with torch.no_grad():
        for _ in range(2):
            collector.collect()
            for length in (1, 5, 8, None):
                state: Any = None
                for seq in rollout.chunks(length):
                    if state is not None:
                        # the state carried over is that of the next chunk, but where an episode starts
                        going_on = ~seq["is_start"][0] & seq["mask"][0]
                        for mine, stored in zip(leaves(state), leaves(seq["hidden"]), strict=True):
                            close(mine[..., going_on, :], stored[..., going_on, :])
                    state = seq["hidden"]
                    for t, real in enumerate(seq["mask"]):
                        keep = (~seq["is_start"][t]).float().unsqueeze(1)
                        state = mapped(state, lambda x, keep=keep: x * keep)
                        log_probs, value, state = net.unroll(seq["obs"][t : t + 1], state)
                        close(value[0][real], seq["value"][t][real])
                        close(taken(log_probs[0], seq["action"][t])[real], seq["log_prob"][t][real])


@pytest.mark.parametrize(("kind", "reading"), quick_kinds([READINGS[0], READINGS[2], {}]))
def test_in_the_first_epoch_the_policy_is_the_one_that_played(kind: str, reading: Any) -> None:
    """The ratio of PPO is 1 until the first step of the optimizer, and no longer after it."""
    net = Actor(kind)
    collector = make(net, AutoresetMode.SAME_STEP)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    for _ in range(2):
        collector.collect()
        rollout = collector.buffer
        assert isinstance(rollout, RolloutBuffer)
        rollout.finish(GAE())
        loss = torch.zeros(())
        for seq in rollout.sequences(**reading, batch_size=6, normalize_advantage=True):
            log_probs, value, _ = net.unroll(seq["obs"], seq["hidden"])
            ratio = (taken(log_probs, seq["action"]) - seq["log_prob"]).exp()
            assert float((seq.flat(ratio.detach()) - 1).abs().max()) < 1e-4
            policy = -(ratio * seq["advantage"] * seq["mask"]).sum()
            loss = loss + (policy + ((value - seq["return"]).square() * seq["mask"]).sum() / 100) / len(rollout)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            (seq,) = rollout.sequences(**reading)
            ratio = (taken(net.unroll(seq["obs"], seq["hidden"])[0], seq["action"]) - seq["log_prob"]).exp()
            assert float((seq.flat(ratio) - 1).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", ["LSTM", "cell", "two LSTMs"])
def test_padding_and_batches_have_no_say_in_the_gradient(kind: str) -> None:
    """That of the masked loss of a padded batch is the sum of those of its sequences, each unrolled alone."""
    net = Actor(kind)
    collector = make(net, AutoresetMode.NEXT_STEP)
    collector.collect()
    rollout = collector.buffer
    assert isinstance(rollout, RolloutBuffer)

    def gradients(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, [p for p in net.parameters() if p.requires_grad], allow_unused=True))

    (seq,) = rollout.sequences(5)
    _, value, _ = net.unroll(seq["obs"], seq["hidden"])
    together = gradients((value.square() * seq["mask"]).sum())
    alone: list[list[Tensor]] = []
    for b in range(len(seq)):
        _, value, _ = net.unroll(*sequence(seq, b))
        alone.append(gradients(value.square().sum()))
    for whole, *parts in zip(together, *alone, strict=True):
        assert (whole is None) == all(part is None for part in parts)
        if whole is not None:
            torch.testing.assert_close(whole, torch.stack(parts).sum(0), rtol=1e-4, atol=1e-4)
    (swapped,) = rollout.sequences(5, time_first=False)
    _, value, _ = net.unroll(swapped["obs"].transpose(0, 1), swapped["hidden"])
    again = gradients((value.T.square() * swapped["mask"]).sum())
    for one, other in zip(together, again, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# A learned initial state


@pytest.mark.parametrize(("kind", "mode"), covering(["LSTM", "GRU", "cell", "two LSTMs", "CfC"], AutoresetMode))
def test_episodes_start_in_the_initial_state_as_it_is_by_then(kind: str, mode: AutoresetMode) -> None:
    net = Actor(kind, learned=True)
    collector = make(net, mode)
    rollout = collector.buffer
    assert isinstance(rollout, RolloutBuffer)
    optimizer = torch.optim.SGD(net.initial.parameters(), lr=1.0)
    moved = 0
    for _ in range(3):
        collector.collect()
        (seq,) = rollout.sequences(4)
        starts = seq["is_start"][0]
        assert starts.any()
        assert not starts.all()
        for state, initial in zip(leaves(seq["hidden"]), leaves(net.initial_hidden()), strict=True):
            first = state[:, starts].transpose(0, 1) if state.dim() == 3 else state[starts]
            want = initial.detach().expand_as(first)
            # but for episodes that began before the last step of the optimizer, which are no starts here
            assert torch.equal(first, want)
            moved += int(not torch.equal(initial, torch.zeros_like(initial)))
        with torch.no_grad():
            assert replayed(net, rollout.sequences(4, batch_size=7)) == real_steps(rollout)

        def put_in(state: Tensor, initial: Tensor, starts: Tensor = starts) -> Tensor:
            # [layers, B, size] or [B, size]
            shape = (-1, 1) if state.dim() == 2 else (1, -1, 1)
            return torch.where(starts.view(shape), initial.unsqueeze(-2), state)

        stored, fresh = leaves(seq["hidden"]), leaves(net.initial_hidden())
        replaced = iter([put_in(*pair) for pair in zip(stored, fresh, strict=True)])
        hidden = mapped(seq["hidden"], lambda _, replaced=replaced: next(replaced))
        log_probs, value, _ = net.unroll(seq["obs"], hidden)
        close(seq.flat(value).detach(), seq.flat(seq["value"]))
        optimizer.zero_grad()
        (seq.flat(value).sum() + seq.flat(taken(log_probs, seq["action"])).sum()).backward()
        before = [initial.detach().clone() for initial in net.initial]
        assert all(bool(initial.grad is not None and initial.grad.any()) for initial in net.initial)
        optimizer.step()
        assert not any(torch.equal(a, b) for a, b in zip(before, net.initial, strict=True))
    assert moved


@pytest.mark.parametrize("given", ["tensor", "array", "function"])
def test_an_initial_state_may_be_a_tensor_an_array_or_a_function(given: str) -> None:
    net = Actor("GRU")
    initial = torch.arange(10.0).view(2, 5) / 10
    forms = {"tensor": initial, "array": initial.numpy(), "function": lambda: initial}
    plain = make(net, AutoresetMode.DISABLED)
    collector = Collector(plain.envs, net, plain.buffer, seed=3, initial_hidden=forms[given])
    collector.collect()
    rollout = collector.buffer
    assert isinstance(rollout, RolloutBuffer)
    (seq,) = rollout.sequences(4)
    starts = seq["is_start"][0]
    assert int(starts.sum()) > 3
    assert torch.equal(seq["hidden"][:, starts], initial.unsqueeze(1).expand(2, int(starts.sum()), 5))


def test_initial_states_that_do_not_fit_are_refused() -> None:
    net = Actor("LSTM")
    plain = make(net, AutoresetMode.DISABLED)
    right = torch.zeros(2, 5)
    for wrong, error, match in (
        ((right, torch.zeros(2, 3, 5)), errors.ShapeError, r"initial_hidden.*\(2, 5\).*'hidden\.1'.*\(2, 3, 5\)"),
        ((right,), errors.FieldError, r"hidden\.1"),
        (right, errors.SchemaError, "initial_hidden"),
        ({"h": right, "c": right}, errors.FieldError, r"hidden\.0"),
    ):
        collector = Collector(plain.envs, net, plain.buffer, initial_hidden=wrong)
        for _ in range(2):
            with pytest.raises(error, match=match):
                collector.collect()
            assert isinstance(plain.buffer, RolloutBuffer)
            assert plain.buffer.steps == 0
    schema = Schema.from_env(plain.envs, value=(), log_prob=())
    with pytest.raises(errors.FieldError, match=r"initial_hidden.*'hidden'"):
        Collector(plain.envs, net, RolloutBuffer(schema, 4, ENVS), initial_hidden=right)


def test_playing_elsewhere_starts_in_the_initial_state_as_well() -> None:
    net = Actor("GRU", learned=True)
    collector = make(net, AutoresetMode.SAME_STEP)
    assert isinstance(collector.buffer, RolloutBuffer)
    aside = RolloutBuffer(collector.buffer.schema, 5, ENVS, seed=0)
    collector.warm(aside, 5, policy=net, seed=1)
    assert torch.equal(aside["hidden"][0], net.initial[0].detach().expand(ENVS, 2, 5))


def test_what_was_saved_starts_episodes_in_the_same_state(tmp_path: Any) -> None:
    net = Actor("LSTM", learned=True)
    collector = make(net, AutoresetMode.SAME_STEP)
    collector.collect()
    assert isinstance(collector.buffer, RolloutBuffer)
    collector.buffer.save(tmp_path / "rollout")
    again = RolloutBuffer.load(tmp_path / "rollout")
    with torch.no_grad():
        assert replayed(net, again.sequences(4)) == real_steps(again)


def test_a_step_of_the_optimizer_does_not_change_the_states_that_were_played_from() -> None:
    net = Actor("LSTM", learned=True)
    collector = make(net, AutoresetMode.SAME_STEP)
    collector.collect()
    rollout = collector.buffer
    assert isinstance(rollout, RolloutBuffer)
    (before,) = rollout.sequences(4, shuffle=False)
    with torch.no_grad():
        for initial in net.initial:
            initial += 1
    (after,) = rollout.sequences(4, shuffle=False)
    for one, other in zip(leaves(before["hidden"]), leaves(after["hidden"]), strict=True):
        assert torch.equal(one, other)
