"""Advantages of the A2C tutorial run on from a time limit, through the ignored step, into the next episode."""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

COMMIT = "3f0476a8cc"
tutorial = Path("docs", "tutorials", "training_agents", "vector_a2c.py")
script = Path(__file__).resolve().parents[2] / "build" / "checkouts" / "Gymnasium" / tutorial
if not script.exists():
    sys.exit(77)  # `make checkouts` fetches it
tree = list(ast.walk(ast.parse(script.read_text())))
(losses,) = (x for x in tree if isinstance(x, ast.FunctionDef) and x.name == "get_losses")
(mask,) = (x for x in tree if isinstance(x, ast.Assign) and ast.unparse(x).startswith("masks[step]"))
names = {"torch": torch, "masks": torch.zeros(6, 1)}
exec(compile(ast.Module([losses], []), str(script), "exec"), names)

# step 1 meets a time limit; row 2 is the step that `NEXT_STEP` ignores; the next episode begins at row 3, and earns 1
for names["step"] in range(6):
    names["terminated"] = [False]
    exec(compile(ast.Module([mask], []), str(script), "exec"), names)
rewards, log_probs = torch.tensor([0.0, 0, 0, 1, 0, 0])[:, None], torch.zeros(6, 1, requires_grad=True)
model = SimpleNamespace(n_envs=1)
given = (rewards, log_probs, torch.zeros(6, 1), torch.zeros(1), names["masks"], 1.0, 1.0, 0.0, "cpu")
names["get_losses"](model, *given)[1].backward()
advantages = (-6 * log_probs.grad).flatten().tolist()
print(f"Gymnasium {COMMIT}: the reward 1 of the next episode is in the advantages {advantages[:2]} of the one before,"
      f" and {advantages[2]} is that of the ignored step")  # fmt: skip
sys.exit(0 if any(advantages[:3]) else 1)
