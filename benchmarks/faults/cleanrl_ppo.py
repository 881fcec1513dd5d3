"""`ppo.py` has one flag for both kinds of end, so time limits are learned as terminals."""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

COMMIT = "fe8d8a03c4"
script = Path(__file__).resolve().parents[2] / "build" / "checkouts" / "cleanrl" / "cleanrl" / "ppo.py"
if not script.exists():
    sys.exit(77)  # `make checkouts` fetches it
tree = list(ast.walk(ast.parse(script.read_text())))


def run(part: ast.stmt) -> None:
    exec(compile(ast.Module([part], []), str(script), "exec"), names)


# its own lines for the flag of a step and for the advantages, on a world where nothing is rewarded and all is worth 10:
# no action has an advantage; the second of three steps meets a time limit
args = SimpleNamespace(num_steps=3, gamma=1.0, gae_lambda=1.0)
names = {"np": np, "torch": torch, "args": args, "device": "cpu", "next_obs": 0, "terminations": np.array([False])}
names |= {"rewards": torch.zeros(3, 1), "values": torch.full((3, 1), 10.0), "dones": torch.zeros(3, 1)}
names["agent"] = SimpleNamespace(get_value=lambda _: torch.full((1, 1), 10.0))
(flag,) = (x for x in tree if isinstance(x, ast.Assign) and ast.unparse(x).startswith("next_done = np."))
for step, cut in enumerate((False, True, False)):
    names["truncations"] = np.array([cut])
    run(flag)
    names["dones"][step + 1 : step + 2] = float(names["next_done"][0])
names["next_done"] = torch.zeros(1)
(gae,) = (x for x in tree if isinstance(x, ast.With) and "lastgaelam = 0" in ast.unparse(x))
run(gae)
found = names["advantages"].flatten().tolist()
print(f"CleanRL {COMMIT}: advantages {found} around a time limit after the second step; all should be 0")
sys.exit(0 if any(found) else 1)
