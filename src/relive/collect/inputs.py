"""Inputs: the inputs and outputs of a policy, in the schema's shapes and dtypes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batches import Batch, as_batch, swap_layers
from ..errors import DTypeError, EnvError, FieldError, ParameterError, SchemaError, ShapeError
from ..parameters import Rule, is_names, require
from ..steps.arrays import NO_DTYPE, NUMPY_DTYPES, Bools, Leaf, as_host, check_castable, is_plain, to_tensor
from ..steps.checker import StepChecker
from ..steps.schema import Field, Path, Schema, descend, dotted, unknown_field
from .envs import (
    FinalCheck,
    Finals,
    Flags,
    Info,
    copied,
    final_info,
    info_field,
    is_by_env,
    member,
    pick,
    refuse_unlike,
)

Leaves = dict[Path, Tensor]


INFO_RULE: Rule = is_names, "expected a tuple of names, such as ('action_mask',)"


SET_HERE = frozenset((
    "obs", "next_obs", "action", "reward", "terminated", "truncated", "mask", "final_value", "hidden", "is_start",
    "last_action", "last_reward",
))  # fmt: skip
"""Fields that the collector sets, or that the policy gives."""


class Inputs:
    """Converts between the data of envs and policies and leaves ``[N, ...]`` of the schema on the buffer's device.

    Args:
        schema: the buffer's.
        num_envs: N.
        device: the buffer's.
        from_info: fields that are read from the ``info`` of an observation if the schema has them.
        from_step_info: fields that are read from the ``info`` of a step.
        initial_hidden: as for :class:`relive.Collector`.

    Raises:
        FieldError: the schema has no ``action``; or ``initial_hidden`` is given and the schema has no ``hidden``.
        ParameterError: a field is read from both infos.
        SchemaError: a field that is read from an info is nested.
        DTypeError: ``is_start``, ``last_action`` or ``last_reward`` is not declared as the collector stores it.
    """

    schema: Schema
    num_envs: int
    device: torch.device
    initial_hidden: object
    names: tuple[str, ...]
    leaves: dict[Path, Field]

    def __init__(
        self,
        schema: Schema,
        num_envs: int,
        device: torch.device,
        from_info: tuple[str, ...],
        from_step_info: tuple[str, ...],
        initial_hidden: object,
    ) -> None:
        require("Collector", INFO_RULE, from_info=from_info, from_step_info=from_step_info)
        self.schema, self.num_envs, self.device, self.initial_hidden = schema, num_envs, device, initial_hidden
        self.names, self.leaves = schema.names, schema.leaves
        # it only checks: the policy's action is stored, and passed to the envs, unchanged
        self._check_action = StepChecker(Schema({"action": schema["action"]}), num_envs, device, upload=False)
        self.from_info: tuple[str, ...] = tuple(name for name in from_info if name in schema)
        self.from_step_info: tuple[str, ...] = tuple(from_step_info)
        self.has_hidden: bool = "hidden" in schema
        if initial_hidden is not None and not self.has_hidden:
            raise FieldError("initial_hidden: the schema has no 'hidden'; add the recurrent state to it")
        self.has_start: bool = "is_start" in schema and "is_start" not in from_info
        self.from_last: tuple[str, ...] = tuple(
            name for name in ("action", "reward") if f"last_{name}" in schema and f"last_{name}" not in from_info
        )
        self._require_declared()
        starts = ("is_start",) if self.has_start else ()
        self.keyword_names: tuple[str, ...] = (*self.from_info, *starts, *(f"last_{name}" for name in self.from_last))
        """The fields that the policy gets as keywords, without hidden states."""
        self.has_keywords: bool = self.has_hidden or bool(self.keyword_names)
        """True if the policy gets any keyword; else :meth:`keywords` is empty."""
        elsewhere = {"obs", "reward", "terminated", "truncated", "hidden", *self.keyword_names, *self.from_step_info}
        self.from_policy: tuple[str, ...] = tuple(name for name in schema.names if name not in elsewhere)
        """The fields that have no other source than the policy's answer; hidden states have an error of their own."""
        self._obs_dtypes = [(path, leaf.dtype) for path, leaf in schema.leaves.items() if path[0] == "obs"]
        self.is_flat: bool = ("obs",) in schema.leaves
        """True if an observation is one tensor, its leaf ``("obs",)``."""
        action = schema["action"]
        flat = isinstance(action, Field)
        self._action_shape = (num_envs, *action.shape) if flat else None  # None: every action is converted for the envs
        self._action_dtype = action.dtype if flat and action.dtype in NUMPY_DTYPES else None
        self._action_array = NUMPY_DTYPES.get(action.dtype, NO_DTYPE) if flat else NO_DTYPE

    def _require_declared(self) -> None:
        schema = self.schema
        for name in self.from_step_info:
            if name in SET_HERE:
                raise ParameterError(f"from_step_info names '{name}', which the collector itself sets; leave it out")
            if name not in schema:
                raise FieldError(unknown_field(name, tuple(schema), "the schema, but from_step_info names it"))
        for name in (*self.from_info, *self.from_step_info):
            if not isinstance(schema[name], Field):
                raise SchemaError(
                    f"field '{name}': a field that is read from an info has no members, got {schema[name]!r}; name the "
                    "members as fields of their own, or put them into the observation"
                )
            if name in self.from_info and name in self.from_step_info:
                raise ParameterError(
                    f"field '{name}': from_info reads it from the info of its observation, from_step_info from that of "
                    "its step; name it in one of them"
                )
        if self.has_start and schema["is_start"] != Field((), torch.bool):
            raise DTypeError(
                "field 'is_start': the collector stores one bool per env; declare it as Field((), torch.bool), got "
                f"{schema['is_start']!r}"
            )
        for name in self.from_last:
            if schema[f"last_{name}"] != schema[name]:
                raise DTypeError(
                    f"field 'last_{name}': the collector stores the {name} of the step before; declare it as "
                    f"{schema[name]!r}, or rename your own field; got {schema[f'last_{name}']!r}"
                )

    # -- observations -------------------------------------------------------------------------------------------

    def final_check(self, space: object, envs: object) -> FinalCheck:
        """A check of the first final observations of ``envs``, with the bounds of their space, as far as it fits."""
        bounds: dict[Path, tuple[Tensor, Tensor]] = {}
        for path, _ in self._obs_dtypes:
            box, shape = member(space, path[1:]), self.leaves[path].shape
            low, high = getattr(box, "low", None), getattr(box, "high", None)
            fits = low is not None and high is not None and np.shape(low) == shape
            if fits and not self.leaves[path].dtype.is_complex:
                both = torch.from_numpy(np.stack([np.asarray(low, np.float32), np.asarray(high, np.float32)]))
                low, high = both.to(self.device)
                bounds[path] = low, high
        return FinalCheck(bounds, self.device, envs)

    def rows(self, which: Leaf) -> Tensor:
        """Flags, or numbers of envs, on the buffer's device."""
        return torch.as_tensor(which, device=self.device)

    def obs(self, given: object) -> Leaves:
        """The leaves of an observation, copied: many envs write the next observation into the same memory."""
        leaves: Leaves = {}
        for path, dtype in self._obs_dtypes:
            try:
                x = copied(descend(given, path[1:]) if len(path) > 1 else given)
            except (KeyError, IndexError, ValueError, TypeError) as error:
                refuse_unlike(given, self.schema, error)
            leaves[path] = x.to(self.device) if x.dtype is dtype else self._leaf(path, x)
        return leaves

    def obs_of(self, final: Finals, envs: NDArray[np.intp]) -> Leaves:
        """The final observations of some envs that have one, rows ``[K, ...]``."""
        rows = envs
        if final.envs is not None:
            place = np.zeros(self.num_envs, np.intp)
            place[as_host(final.envs)] = np.arange(len(final.envs))
            rows = place[envs]
        found: Leaves = {}
        for path, _ in self._obs_dtypes:
            try:
                found[path] = self._leaf(path, pick(final.given, path[1:], rows))
            except SchemaError as error:
                raise type(error)(f"a final observation that the step returned does not fit: {error}") from error
            except (KeyError, IndexError, ValueError, TypeError, RuntimeError) as error:
                raise self._not_nested(path, final.given) from error
            self._require_rows(path, found[path], len(envs))
        return found

    def true_next(self, final: Finals | None, done: Tensor, after: Leaves, before: Leaves) -> Leaves:
        """The true next observations ``[N, ...]`` of a simulator's step. No operation waits for a device.

        Args:
            final: the final observations that came with the step; None if there were none.
            done: the envs whose episode ended, ``[N]``.
            after: the observations that the step returned, those of new episodes where one ended.
            before: the observations before the step. They stand for final ones that are not there: such a row is a
                terminal or is masked, so it is never bootstrapped, and any observation will do.
        """
        done = done.to(self.device)
        if final is None:
            return {path: torch.where(shaped_as(done, x), before[path], x) for path, x in after.items()}
        envs, shown = final.envs, None if final.present is None else self.rows(final.present)
        by_env = is_by_env(final.given)
        some = np.flatnonzero(final.where(self.num_envs)) if by_env else None
        found: Leaves = {}
        for path, x in after.items():
            if some is not None:
                rows = pick(final.given, path[1:], some) if len(some) else x[:0]
                rows = x.index_copy(0, self.rows(some), self._leaf(path, rows))
            else:
                rows = self._leaf(path, self._final_leaf(path, final.given))
                self._require_rows(path, rows, self.num_envs if envs is None else len(envs))
                rows = rows if envs is None else x.index_copy(0, envs.to(self.device), rows)
            if shown is not None:
                rows = torch.where(shaped_as(shown, x), rows, before[path])
            found[path] = torch.where(shaped_as(done, x), rows, x)
        return found

    def _final_leaf(self, path: Path, given: object) -> Tensor:
        try:
            return to_tensor(descend(given, path[1:]))
        except (KeyError, IndexError, ValueError, TypeError, RuntimeError) as error:
            raise self._not_nested(path, given) from error

    def _not_nested(self, path: Path, given: object) -> EnvError:
        return EnvError(
            f"field '{dotted(path)}': missing from the final observations that the step returned, of type "
            f"{type(given).__name__}, or not of one shape; they are nested as the observations are: "
            f"{self.schema['obs']!r}"
        )

    def _require_rows(self, path: Path, rows: Tensor, count: int) -> None:
        expected = count, *self.leaves[path].shape
        if rows.shape != expected:
            raise ShapeError(
                f"field '{dotted(path)}': expected final observations {expected}, one row for each env that they are "
                f"of, got {tuple(rows.shape)}"
            )

    def _leaf(self, path: Path, given: Tensor) -> Tensor:
        """Rows of a leaf in the schema's dtype on the buffer's device; the policy gets the same."""
        dtype = self.leaves[path].dtype
        if given.dtype is not dtype:
            check_castable(given, dtype, dotted(path))
            given = given.to(dtype)
        return given.to(self.device)

    def as_given(self, obs: Leaves) -> Tensor | Batch:
        """Observations as the policy takes them: a tensor, or a batch if they are nested."""
        if self.is_flat:
            return obs["obs",]
        return as_batch({path[1:]: x for path, x in obs.items()})

    def named(self, info: Leaves) -> dict[str, object]:
        """The keywords by name, nested as the schema is."""
        return {name: self.schema.rebuild(name, info.__getitem__) for name in self.keyword_names}

    def keywords(self, hidden: Leaves, info: Leaves) -> dict[str, object]:
        """All keywords of the policy, which may write to them, with hidden states as torch.nn.LSTM takes them."""
        keywords = self.named({path: x.clone() for path, x in info.items()}) if info else {}
        if self.has_hidden:
            clone = partial(torch.clone, memory_format=torch.contiguous_format)
            keywords["hidden"] = self.schema.rebuild("hidden", lambda path: clone(swap_layers(hidden[path])))
        return keywords

    # -- what comes with an observation -------------------------------------------------------------------------

    def info(self, info: Info, required: Flags) -> Leaves:
        """The fields ``[N, ...]`` that come with an observation. Those of ``required`` envs must be there."""
        fields: Leaves = {}
        for name in self.from_info:
            rows, present = self._reported(name, info)
            env = _first_lacking(required, present)
            if env is not None:
                raise EnvError(
                    f"the schema has '{name}', but info['{name}'] is missing for env {env}; report it at every reset "
                    "and step, or leave it out of the schema"
                )
            fields[name,] = rows
        return fields

    def step_info(self, info: Info, ended: Flags, ignored: Bools | None = None) -> dict[str, Tensor]:
        """The fields ``[N, ...]`` that a step's info reports, by name; 0 elsewhere.

        Args:
            info: that the step returned. Where an episode ended, SAME_STEP autoreset may have put that of the reset
                there; the step's is then its ``final_info``.
            ended: the envs whose episode ended, ``[N]``; they must report each field.
            ignored: the envs that only reset, ``[N]``: what they report is of the reset. None: no env.
        """
        fields: dict[str, Tensor] = {}
        for name in self.from_step_info:
            rows, present = self._reported(name, info, fill=0)
            if "final_info" in info:
                last, present = self._reported(name, final_info(info), fill=0)
                rows = torch.where(shaped_as(self.rows(ended), rows), last, rows)
            # A named field has to come where an episode ends: success flags often come only there, and a misspelt name
            # is found so.
            env = _first_lacking(ended, present)
            if env is not None:
                raise EnvError(
                    f"from_step_info names '{name}', but info['{name}'] is missing for env {env}, whose episode ended; "
                    "report it at every step, or at least there, with 0 or False if that is what it is"
                )
            if ignored is not None and ignored.any():
                rows[self.rows(np.flatnonzero(ignored))] = 0
            fields[name] = rows
        return fields

    def _reported(self, name: str, info: Info, fill: int | None = None) -> tuple[Tensor, Bools | None]:
        """A field's rows ``[N, ...]`` in an info, and the envs that report it, bool ``[N]``; None stands for all.

        The rows of the others are ``fill``; by default True for a mask, which then forbids nothing, and else 0.
        """
        given, leaf = info.get(name), self.leaves[name,]
        if isinstance(given, Tensor) and f"_{name}" not in info:  # all are there, and may be on a device
            return self._info_leaf(name, copied(given), self.num_envs), None
        given, present = info_field(info, name, self.num_envs)
        if given is not None and not is_by_env(given) and getattr(given, "ndim", 0) == 0:
            raise ShapeError(
                f"field '{name}': expected an entry for each of {self.num_envs} envs in info['{name}'], got "
                f"{given!r:.200}"
            )
        if fill is None:
            fill = name == "action_mask" or leaf.dtype is torch.bool
        rows = torch.full((self.num_envs, *leaf.shape), fill, dtype=leaf.dtype, device=self.device)
        envs = np.flatnonzero(present)
        if len(envs):
            rows[self.rows(envs)] = self._info_leaf(name, pick(given, (), envs), len(envs))
        return rows, present

    def _info_leaf(self, name: str, given: Tensor, count: int) -> Tensor:
        """``count`` rows of a field out of an info, where a flag may be a number, as in Gymnasium's masks."""
        shape = count, *self.leaves[name,].shape
        if given.numel() != math.prod(shape):
            raise ShapeError(f"field '{name}': expected {shape} in info['{name}'], got {tuple(given.shape)}")
        is_flag = self.leaves[name,].dtype is torch.bool
        return (given.ne(0).to(self.device) if is_flag else self._leaf((name,), given)).reshape(shape)

    def final_info(self, details: Info, last: Leaves) -> Leaves:
        """The fields ``[N, ...]`` that come with final observations, as if each env had ended an episode.

        Args:
            details: the info that came with the final observations. What an env does not report there is unknown, and
                not needed, as no action follows.
            last: the actions and rewards of the last step, ``[N, ...]``.
        """
        fields = self.starts(torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)) | last
        return fields | {(name,): self._reported(name, details)[0] for name in self.from_info}

    def starts(self, which: Flags) -> Leaves:
        """``is_start``, if the schema has it: True in envs whose observation is the first of an episode."""
        return {("is_start",): self.rows(which)} if self.has_start else {}

    def no_last(self) -> Leaves:
        """``last_action`` and ``last_reward`` before the first step, if the schema has them: 0."""
        return {
            path: torch.zeros((self.num_envs, *leaf.shape), dtype=leaf.dtype, device=self.device)
            for path, leaf in self.leaves.items()
            if path[0].removeprefix("last_") in self.from_last and path[0].startswith("last_")
        }

    def last(self, step: Mapping[str, object], before: Leaves) -> Leaves:
        """``last_action`` and ``last_reward`` after a step; ``before`` are those before it."""
        fields: Leaves = {}
        for path, like in before.items():
            name = path[0].removeprefix("last_")
            rows = copied(descend(step[name], path[1:]))
            fields[path] = self._leaf(path, rows.reshape(like.shape))
        return fields

    # -- hidden states ------------------------------------------------------------------------------------------

    def hidden(self, given: object, before: Leaves) -> Leaves:
        """The states after a step, as the policy returned them; they fit those ``before`` it.

        Raises:
            FieldError: a state is missing.
            ShapeError: a state has another shape.
        """
        if not self.has_hidden:
            return {}
        if given is None:
            raise FieldError(
                "the schema has 'hidden', but the policy's answer does not: return the state after the step"
            )
        leaves: Leaves = {}
        for path in before:
            try:  # copied: many policies write the next state into the same memory
                leaves[path] = swap_layers(descend(given, path[1:])).clone()
            except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
                raise FieldError(
                    f"field '{dotted(path)}': missing from the hidden state that the policy returned, got "
                    f"{type(given).__name__}; nest it as the schema does: {self.schema['hidden']!r}"
                ) from error
        for path, state in leaves.items():
            if state.shape != before[path].shape:
                expected = tuple(swap_layers(before[path]).shape)
                raise ShapeError(
                    f"field '{dotted(path)}': expected {expected}, like the state passed to the policy, "
                    f"got {tuple(swap_layers(state).shape)}"
                )
        return leaves

    def initial_states(self) -> Leaves:
        """The hidden state at an episode's start, ``[...]`` of each leaf.

        Raises:
            FieldError: ``initial_hidden`` lacks a leaf.
            ShapeError: one has another shape.
        """
        tree = self.initial_hidden() if callable(self.initial_hidden) else self.initial_hidden
        states: Leaves = {}
        for path, leaf in self.leaves.items():
            if path[0] != "hidden":
                continue
            zeros = partial(torch.zeros, leaf.shape, dtype=leaf.dtype, device=self.device)
            state = zeros() if tree is None else self._initial_leaf(tree, path)
            if state.shape != leaf.shape:
                raise ShapeError(
                    f"initial_hidden: expected {leaf.shape} for '{dotted(path)}', without the axis of envs, "
                    f"got {tuple(state.shape)}"
                )
            states[path] = state.to(self.device, leaf.dtype)
        return states

    def _initial_leaf(self, tree: object, path: Path) -> Tensor:
        try:
            return to_tensor(descend(tree, path[1:])).detach().clone()
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            raise FieldError(
                f"initial_hidden: '{dotted(path)}' is missing; nest it as the schema does: {self.schema['hidden']!r}"
            ) from error

    # -- the policy's answer ------------------------------------------------------------------------------------

    def env_action(self, fields: Mapping[str, object], tensors: bool) -> object:
        """The actions of a policy's answer as the envs take them, ``tensors`` or arrays, checked before they see any.

        It is a copy, since envs may write to it: some clip actions in place.

        Raises:
            FieldError: the answer lacks a field, or has a hidden state that the schema lacks.
            SchemaError: the actions do not fit the schema.
        """
        lacking = [name for name in self.from_policy if name not in fields]
        if lacking:
            raise FieldError(
                f"the policy's answer lacks {', '.join(map(repr, lacking))}; it has {', '.join(map(repr, fields))}. "
                "Return one row per env of every field that only the policy knows, under the schema's name"
            )
        if "hidden" in fields and not self.has_hidden:
            raise FieldError(
                "the policy returns 'hidden', and the schema has no such field, so the state would be lost; add it, as "
                "in Schema.from_env(envs, hidden=(layers, size)), or leave it out of the answer"
            )
        action = fields["action"]
        # most often an array or a tensor as the schema declares it, which needs no conversion
        if type(action) is Tensor and action.dtype is self._action_dtype and action.shape == self._action_shape:
            if self.device.type == "cpu" and action.is_cpu and not action.requires_grad and is_plain(action):
                return action.clone() if tensors else action.numpy().copy()
            if tensors and action.device == self.device:
                return action.detach().clone()
        elif type(action) is np.ndarray and action.dtype is self._action_array and action.shape == self._action_shape:
            return copied(action) if tensors else action.copy()
        return self._converted(action, tensors)

    def _converted(self, action: object, tensors: bool) -> object:
        """Actions of any other kind, checked and converted. One env's may lack the leading axis."""
        on_device = action
        if isinstance(action, Tensor) and action.device != self.device:
            on_device = action.to(self.device)
        try:
            self._check_action({"action": on_device})
        except SchemaError as error:
            raise type(error)(
                f"the policy's answer does not fit: {error}. It returns the actions [N, ...], or a mapping of 'action' "
                "and the other fields that it decides"
            ) from error

        def convert(path: Path) -> Leaf:
            given = descend(action, path[1:])
            rows = copied(given) if tensors else np.array(as_host(given))
            shape = self.num_envs, *self.leaves[path].shape
            return rows if rows.shape == shape else rows.reshape(shape)

        return self.schema.rebuild("action", convert)


def _first_lacking(required: Flags, present: Bools | None) -> int | None:
    """The first env of those required that is not present, bool ``[N]`` each; None if there is none."""
    if present is None:
        return None
    lacking = np.flatnonzero(as_host(required) & ~present)
    return int(lacking[0]) if len(lacking) else None


def shaped_as(rows: Tensor, like: Tensor) -> Tensor:
    """A flag per env, shaped to choose between rows of ``like``."""
    return rows.view(-1, *[1] * (like.dim() - 1))
