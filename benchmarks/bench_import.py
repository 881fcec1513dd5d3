"""How long `import relive` takes and what it loads, beside torch alone and the peers' buffers."""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import Effort, print_workload, reason, summarize, version_of, write

# what is imported with the first use counts here: TensorDict
FIRST_MINIBATCH = (
    "import numpy, relive; rollout = relive.RolloutBuffer(relive.Schema({'obs': (1,)}), 1, 1);"
    " rollout.add(obs=numpy.zeros((1, 1), numpy.float32)); next(rollout.minibatches(1))"
)
FIRST_BATCH = (
    "import numpy, relive; step = {'obs': numpy.zeros((1, 1)), 'reward': numpy.zeros(1)};"
    " step |= dict.fromkeys(('terminated', 'truncated'), numpy.zeros(1, bool));"
    " schema = relive.Schema.from_example({name: value[0] for name, value in step.items()});"
    " replay = relive.ReplayBuffer(schema, 4, sampler=relive.Prioritized());"
    " replay.add(**step); replay.add(**step); batch = replay.sample(1);"
    " replay.update_priorities(batch['index'], [1.0])"
)
# label, role, distribution, statement
LINES = (
    ("import torch", "floor", "torch", "import torch"),
    ("import relive", "ours", "relive", "import relive"),
    ("relive, to its first minibatch", "ours", "relive", FIRST_MINIBATCH),
    ("relive, to its first prioritized batch", "ours", "relive", FIRST_BATCH),
    (
        "stable-baselines3",
        "peer",
        "stable-baselines3",
        "from stable_baselines3.common.buffers import RolloutBuffer",
    ),
    ("rsl-rl", "peer", "rsl-rl-lib", "from rsl_rl.storage import RolloutStorage"),
    ("tianshou", "peer", "tianshou", "from tianshou.data import VectorReplayBuffer"),
    ("torchrl", "peer", "torchrl", "from torchrl.data import ReplayBuffer"),
    ("agilerl", "peer", "agilerl", "from agilerl.components.rollout_buffer import RolloutBuffer"),
    ("tensordict", "peer", "tensordict", "from tensordict import TensorDict"),
)
HEAVY = ("numba", "tensordict", "gymnasium", "torch._dynamo", "triton", "matplotlib", "pandas", "tensorboard")
SCRIPT = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
start = time.perf_counter()
import torch
between, before = time.perf_counter(), set(sys.modules)
try:
    {statement}
    end, error = time.perf_counter(), ""
except ImportError as problem:
    end, error = time.perf_counter(), str(problem) or "ImportError"
    error = ("failed: " if {own} and problem.name != "relive" else "not installed: ") + error
new = set(sys.modules) - before
loads = [name for name in {heavy!r} if name in new]
print(json.dumps(dict(whole=end - start, on_top=end - between, modules=len(new), loads=loads, error=error)))
"""
MAX_ROUNDS = 9


def import_once(statement: str, role: str) -> dict[str, Any]:
    """Runs the statement in a fresh interpreter that has imported torch; the seconds and the new modules."""
    script = SCRIPT.format(statement=statement, heavy=HEAVY, own=role == "ours")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": f"failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def workload(name: str, key: str, samples: dict[str, list[dict[str, Any]]], rounds: int) -> dict[str, Any]:
    """One column of the table from all the samples."""
    lines: list[dict[str, Any]] = []
    for label, role, package, statement in LINES:
        if role == "floor" and key != "whole":
            continue
        line: dict[str, Any] = {"label": label, "role": role, "note": statement, "package": package}
        error = next((sample["error"] for sample in samples[label] if sample["error"]), "")
        if error:
            lines.append(line | {"status": reason(ImportError(error))})
            continue
        values = [sample[key] for sample in samples[label]]
        quarters = statistics.quantiles(values, n=4) if rounds > 1 else values * 3
        line |= {"status": "ok", "version": version_of(package), "loads": samples[label][0]["loads"]}
        line |= {"median": statistics.median(values), "q1": quarters[0], "q3": quarters[2]}
        lines.append(line)
    return {"name": name, "rounds": rounds} | (summarize(lines) if key == "whole" else {}) | {"lines": lines}


def run(effort: Effort, folder: Path) -> None:
    """Imports everything in turn, in fresh interpreters, and writes `import.json`."""
    rounds = min(effort.rounds // 4, MAX_ROUNDS) or 1
    samples: dict[str, list[dict[str, Any]]] = {label: [] for label, *_ in LINES}
    for _, role, _, statement in LINES:
        import_once(statement, role)  # byte-compiles, and brings the files into memory
    for _ in range(rounds):
        for label, role, _, statement in LINES:
            samples[label].append(import_once(statement, role))
    whole = workload("import", "whole", samples, rounds)
    on_top = workload("on top of torch", "on_top", samples, rounds)
    modules = workload("new modules", "modules", samples, rounds) | {"unit": "count"}
    print_workload(whole)
    write("import", "import in a fresh interpreter", [whole, on_top, modules], folder)
