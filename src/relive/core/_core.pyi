"""Types of the compiled core. Written by ``make stub``; do not edit. The docstrings are in ``src/core``."""

from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

HEAD: int = 0

TAIL: int = 1

NEXT: int = 2

COUNT: int = 3

COLUMNS: int = 4

COMPLETED: int = 0

DRAWABLE: int = 1

EPISODES: int = 2

HISTORY: int = 3

LENGTH: int = 4

STRIDE: int = 5

TAILS: int = 6

ACROSS: int = 2

NOT_FINITE: int = 7

WEIGH: int = 8

COUNTERS: int = 9

class Ring:
    def __init__(self, arrays: Any) -> None: ...

    def rebind(self, arrays: Any) -> None: ...

    def changed(self) -> None: ...

class StepFields:
    def __init__(self, paths: Any, dtypes: Any, shapes: Any, count: int, targets: Any, finite: Any = (), defaults: Any = ()) -> None: ...

    def leaves(self, step: Any) -> Any: ...

    def take(self, row: int, step: Any, finite: bool = False) -> bool: ...

class StepAdder:
    def __init__(self, ring: Any, staged: Any, fields: Any, large: Any, mode: int) -> None: ...

    def add(self, step: Any, finite: bool = False) -> int: ...

NO_FINALS: int = 0

FINALS: int = 1

ALONE: int = 2

LINKED: int = 3

LONGEST: int = 2147483647

USED_UP: int = -4611686018427387904

UNFIT: int = -4611686018427387905

UNDO_KIND: int = 0

UNDO_ENVS: int = 1

UNDO_ROWS: int = 2

UNDO_COUNTERS: int = 3

UNDO_START: int = 12

UNDO_ENV: int = 6

UNDO_AFTER: int = 5

UNDO_ROW: int = 3

UNDO_NONE: int = 0

UNDO_ADDING: int = 1

UNDO_REBUILD: int = 2

class StagedRows:
    def __init__(self, arrays: Any) -> None: ...

    def take_envs(self, envs: Any) -> None: ...

def plan_rows(ring: Ring, staged: StagedRows, mode: int) -> int: ...

def add_rows(ring: Ring, staged: StagedRows, mode: int) -> int: ...

def scatter_rows(source: NDArray[Any], places: NDArray[Any], target: NDArray[Any], nbytes: int) -> None: ...

MOST_ATTEMPTS: int = 100

def mix(z: int) -> int: ...

def key(seed: int, counter: int) -> int: ...

def masses(stream: int, stratified: bool, total: float, out: NDArray[Any]) -> None: ...

def permute(seed: int, counter: int, order: NDArray[Any]) -> None: ...

def window(ring: Ring, newest: int, first: NDArray[Any], until: NDArray[Any]) -> int: ...

def window_runs(ring: Ring, newest: int, begins: NDArray[Any], ends: NDArray[Any]) -> None: ...

def count_complete(ring: Ring) -> int: ...

def draw(ring: Ring, stream: int, newest: int, places: NDArray[Any]) -> bool: ...

def ids_of(ring: Ring, places: NDArray[Any], index: NDArray[Any]) -> int: ...

def live(ring: Ring, index: NDArray[Any], places: NDArray[Any]) -> int: ...

def anchors(ring: Ring, out: NDArray[Any]) -> int: ...

def take_fresh(ring: Ring, next: NDArray[Any], places: NDArray[Any]) -> int: ...

def count_fresh(ring: Ring, next: NDArray[Any]) -> int: ...

def ages(ring: Ring) -> tuple[Any, ...]: ...

FANOUT: int = 8

class Tree:
    def __init__(self, nodes: NDArray[Any], leaves: int, minima: NDArray[Any]) -> None: ...

    @property
    def minima(self) -> Any: ...

    @minima.setter
    def minima(self, array: NDArray[Any]) -> None: ...

    def __reduce__(self) -> tuple[Any, ...]: ...

    def build(self) -> None: ...

    def set(self, positions: NDArray[Any], values: NDArray[Any]) -> int: ...

    def get(self, positions: NDArray[Any], out: NDArray[Any]) -> int: ...

    def cover(self, begins: NDArray[Any], ends: NDArray[Any], places: NDArray[Any], until: NDArray[Any]) -> int: ...

    def find(self, places: NDArray[Any], until: NDArray[Any], masses: NDArray[Any], out: NDArray[Any]) -> int: ...

    def lowest(self, begins: NDArray[Any], ends: NDArray[Any]) -> float: ...

def tree_offsets(leaves: int) -> list[int]: ...

ALPHA: int = 0

EPS: int = 1

LARGEST: int = 2

DRAWS: int = 3

FACTS: int = 4

RATED: int = 0

RATED_LARGEST: int = 1

RATED_START: int = 2

ALL_RATED: float = -1.0

LARGEST_ERROR: float = 3.4028234663852886e+38

UNUSUAL: int = -1

class Priorities:
    def __init__(self, tree: Tree, errors: NDArray[Any], facts: NDArray[Any], ring: Ring, undo: NDArray[Any]) -> None: ...

    def note_drawable(self, places: NDArray[Any], drawable: NDArray[Any], error: float, weight: float) -> None: ...

    def rate(self, index: Any, errors: Any, mask: Any = None, time_first: bool = False, eta: float = 0.0) -> int: ...

def powers(errors: NDArray[Any], alpha: float, eps: float, out: NDArray[Any]) -> None: ...

class WindowLayout:
    def __init__(self, *, index: int, next_index: int, discount: int, steps: int, reward: int, terminated: int, truncated: int, step_bytes: int, next_at: int, next_bytes: int, own_at: int, own_bytes: int) -> None: ...

    @property
    def index(self) -> int: ...

    @property
    def next_index(self) -> int: ...

    @property
    def discount(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def reward(self) -> int: ...

    @property
    def terminated(self) -> int: ...

    @property
    def truncated(self) -> int: ...

    @property
    def step_bytes(self) -> int: ...

    @property
    def next_at(self) -> int: ...

    @property
    def next_bytes(self) -> int: ...

    @property
    def own_at(self) -> int: ...

    @property
    def own_bytes(self) -> int: ...

def read_windows(ring: Ring, layout: WindowLayout, places: NDArray[Any], steps: int, gamma: float, out: NDArray[Any], last: NDArray[Any]) -> int: ...

def gather_rows(source: NDArray[Any], places: NDArray[Any], out: NDArray[Any], start: int, nbytes: int) -> int: ...

def stack_places(ring: Ring, places: NDArray[Any], depth: int, repeat: bool, out: NDArray[Any]) -> int: ...

class SequenceLayout:
    def __init__(self, *, mask: int, is_start: int, timestep: int = -1, reward: int = -1, terminated: int = -1, truncated: int = -1, discount: int = -1, steps: int = -1, next: int = -1, is_last: int = -1, is_terminal: int = -1, step_bytes: int, obs_bytes: int, own_at: int = -1, burn_in: int = 0, n: int = 1, time_first: bool, across: bool = False, lasts: Sequence[tuple[int, int, int, bool]]) -> None: ...

    @property
    def mask(self) -> int: ...

    @property
    def is_start(self) -> int: ...

    @property
    def timestep(self) -> int: ...

    @property
    def reward(self) -> int: ...

    @property
    def terminated(self) -> int: ...

    @property
    def truncated(self) -> int: ...

    @property
    def discount(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def next(self) -> int: ...

    @property
    def is_last(self) -> int: ...

    @property
    def is_terminal(self) -> int: ...

    @property
    def step_bytes(self) -> int: ...

    @property
    def obs_bytes(self) -> int: ...

    @property
    def own_at(self) -> int: ...

    @property
    def burn_in(self) -> int: ...

    @property
    def n(self) -> int: ...

    @property
    def time_first(self) -> bool: ...

    @property
    def across(self) -> bool: ...

    @property
    def lasts(self) -> list[tuple[int, int, int, bool]]: ...

class SequenceWindows:
    def __init__(self, ring: Any, layout: SequenceLayout, total: int, fields: Any, facts: Any, weighed: Any, blank: NDArray[Any], tabled: bool = False, in_files: bool = False, columns: Any = (), states: Any = ()) -> None: ...

    def sample(self, draw: Any, gamma: float) -> Any: ...

FUTURE: int = 0

FINAL: int = 1

EPISODE: int = 2

PAST: int = 3

RANDOM: int = 4

class GoalLayout:
    def __init__(self, window: WindowLayout, *, goal_at: int, goal_bytes: int, into_obs: int, into_next: int, mark: int, strategy: int, finished: bool) -> None: ...

    @property
    def window(self) -> WindowLayout: ...

    @property
    def goal_at(self) -> int: ...

    @property
    def goal_bytes(self) -> int: ...

    @property
    def into_obs(self) -> int: ...

    @property
    def into_next(self) -> int: ...

    @property
    def mark(self) -> int: ...

    @property
    def strategy(self) -> int: ...

    @property
    def finished(self) -> bool: ...

class GoalBatch:
    @property
    def chosen(self) -> int: ...

    @property
    def total(self) -> int: ...

    @property
    def goals(self) -> tuple[Any, ...]: ...

    def relabel(self, rewards: Any = None, terminated: Any = None, truncated: Any = None) -> int: ...

    def fields(self, kind: Any = None) -> Any: ...

    @property
    def which(self) -> Any: ...

    @property
    def begin(self) -> Any: ...

    @property
    def used(self) -> Any: ...

    @property
    def first(self) -> Any: ...

    @property
    def end(self) -> Any: ...

    @property
    def aim(self) -> Any: ...

    @property
    def now(self) -> Any: ...

    @property
    def after(self) -> Any: ...

    @property
    def last(self) -> Any: ...

    @property
    def rows(self) -> Any: ...

class GoalWindows:
    def __init__(self, ring: Any, layout: GoalLayout, fields: Any, weighed: Any, probability_at: int, weight_at: int, dtype: Any, shape: Sequence[int], in_files: bool = False, large: Any = ()) -> None: ...

    def draw(self, draw: Any, steps: int, gamma: float, key: int, ratio: float) -> Any: ...

class Pool:
    def __init__(self) -> None: ...

    def take(self, nbytes: int) -> Any: ...

    @property
    def kept(self) -> list[int]: ...

    def __reduce__(self) -> tuple[Any, ...]: ...

class Standing:
    def __init__(self, slots: int, take: Any = None) -> None: ...

    @property
    def lent(self) -> bool: ...

class Fields:
    def __init__(self, fields: Any, width: int) -> None: ...

    def __reduce__(self) -> tuple[Any, ...]: ...

    def tensors(self, rows: Any) -> dict[Any, Any]: ...

    def pack(self, columns: Any, rows: NDArray[Any], steps: int = 1) -> None: ...

def take_rows(source: NDArray[Any], index: NDArray[Any], out: NDArray[Any]) -> int: ...

def take_fields(source: NDArray[Any], index: NDArray[Any], parts: tuple[Any, ...], dicts: tuple[Any, ...], pool: Pool, standing: Any = None) -> int: ...

def take_columns(columns: Any, fields: Fields, index: NDArray[Any], parts: tuple[Any, ...], dicts: tuple[Any, ...], pool: Pool, standing: Any = None) -> int: ...

def nested(leaves: Any, kind: Any, into: Any = None, last: tuple[Any, ...] = ()) -> Any: ...

def give_back(refusing: Any, batch: Any) -> None: ...

class EmptyDraw(ValueError):
    pass

class Draw:
    @property
    def count(self) -> int: ...

    @property
    def standing(self) -> Any: ...

    @standing.setter
    def standing(self, standing: Any) -> None: ...

    @property
    def weighed(self) -> bool: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def __getitem__(self, arg: Any, /) -> Any: ...

def draw_by_chance(ring: Any, count: int, key: int, newest: int = 0) -> Draw: ...

def draw_by_weight(tree: Any, count: int, key: int, places: Any = None, until: Any = None, ring: Any = None, oldest: Any = None) -> Draw: ...

def draw_by_priority(priorities: Any, count: int, key: int, stratified: bool, beta: float, lowest: float, places: Any = None, until: Any = None) -> Draw: ...

class Windows:
    def __init__(self, ring: Any, layout: WindowLayout, fields: Any, probability_at: int = -1, weight_at: int = -1, in_files: bool = False, stacked: Any = (), depth: int = 0, repeat: bool = False, large: Any = ()) -> None: ...

    def sample(self, draw: Any, steps: int, gamma: float, kind: Any = None, sums: Any = None) -> Any: ...

class JoinedRows:
    def __init__(self, fields: Any, part_at: int, count: int, standing: Any, pool: Pool) -> None: ...

    @property
    def part(self) -> int: ...

    @part.setter
    def part(self, arg: int, /) -> None: ...

    def tensors(self) -> dict[Any, Any]: ...

SPOILT: int = -2

def is_grid(reward: Any, value: Any, terminated: Any, truncated: Any, final_value: Any, mask: Any, ratio: Any = None) -> bool: ...

def fill_gae(reward: Any, value: Any, terminated: Any, truncated: Any, final_value: Any, mask: Any, advantage: Any, ret: Any, steps: int, gamma: float, lam: float, widest: bool = True) -> int: ...

def fill_returns(reward: Any, value: Any, terminated: Any, truncated: Any, final_value: Any, mask: Any, ret: Any, steps: int, gamma: float, widest: bool = True) -> int: ...

def fill_vtrace(reward: Any, value: Any, terminated: Any, truncated: Any, final_value: Any, mask: Any, ratio: Any, advantage: Any, ret: Any, steps: int, gamma: float, lam: float, rho_clip: float, c_clip: float, widest: bool = True) -> int: ...

def episode_starts(done: NDArray[Any], real: NDArray[Any], ended: NDArray[Any], starts: NDArray[Any]) -> None: ...

def plan_windows(done: NDArray[Any], real: NDArray[Any], starts: NDArray[Any], length: int, stride: int, tails: bool, complete: bool) -> Any: ...

def copy_windows(source: NDArray[Any], first: NDArray[Any], step: int, lengths: NDArray[Any], pad: NDArray[Any], out: Any) -> None: ...

def take_windows(source: NDArray[Any], first: NDArray[Any], step: int, lengths: NDArray[Any], pad: NDArray[Any], length: int, fields: Fields, time_first: bool, pool: Pool, into: Any) -> None: ...

def mark_windows(lengths: NDArray[Any], is_start: NDArray[Any], length: int) -> Any: ...

INSERTS: int = 0

SAMPLES: int = 1

PENDING: int = 2

OTHERS: int = 3

CUT: int = 1

FOLLOWED: int = 2

MASKED: int = 4

LANE_ALONE: int = 8

FINISHED: int = 16

COMMITTED: int = 0

DRAINED: int = 8

LANE_COUNTERS: int = 16

WANTED: int = 1

def publish(counters: NDArray[Any], place: int, value: int, bells: NDArray[Any], bell: int) -> bool: ...

def published(counters: NDArray[Any], place: int) -> int: ...

def mark_bell(bells: NDArray[Any], place: int) -> int: ...

def ring_bell(bells: NDArray[Any], place: int) -> bool: ...

def add_count(counts: NDArray[Any], place: int, amount: int) -> None: ...

def admit(counts: NDArray[Any], side: int, count: int, ratio: float, min_size: int, low: float, high: float) -> bool: ...

def admit_noted(counts: NDArray[Any], note: NDArray[Any], count: int, ratio: float, min_size: int, low: float, high: float) -> bool: ...

def confirm(counts: NDArray[Any], note: NDArray[Any]) -> None: ...

def take_back(counts: NDArray[Any], note: NDArray[Any]) -> None: ...

class Lane:
    def __init__(self, arrays: Any) -> None: ...

    def commit(self, number: int, marks: int) -> int: ...

class Pages:
    def __init__(self, arrays: Sequence[Any]) -> None: ...

    def ask_for(self, begins: NDArray[Any], ends: NDArray[Any]) -> int: ...

    @property
    def row_bytes(self) -> int: ...

def scale(x: Any, mask: Any, eps: float) -> bool: ...

def weigh_windows(tree: Tree, ring: Ring, places: NDArray[Any], drawable: NDArray[Any]) -> int: ...

def build_info() -> dict[Any, Any]: ...
