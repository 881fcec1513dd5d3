"""With the wrapper of Isaac Lab, time limits bootstrap from the reset observation."""

import sys
from importlib import util
from pathlib import Path
from unittest.mock import MagicMock

import torch

COMMIT = "229ed59bbf"
folder = Path(__file__).resolve().parents[2] / "build" / "checkouts" / "FastTD3" / "fast_td3"
if not folder.exists():
    sys.exit(77)  # `make checkouts` fetches it
for name in ("isaaclab", "isaaclab.app", "isaaclab_tasks", "isaaclab_tasks.utils", "isaaclab_tasks.utils.parse_cfg"):
    sys.modules[name] = MagicMock()  # the simulator, in place of which there is `Simulator`
spec = util.spec_from_file_location("isaaclab_env", folder / "environments" / "isaaclab_env.py")
module = util.module_from_spec(spec)
spec.loader.exec_module(module)


class Simulator(MagicMock):
    """Observes how many steps its episode has had; the limit is 3, and it resets at once, as Isaac Lab's do."""

    count = 0

    def step(self, _: torch.Tensor) -> tuple:
        self.count = (self.count + 1) % 3
        end, no = torch.tensor([self.count == 0]), torch.tensor([False])
        return {"policy": torch.full((1, 1), float(self.count))}, torch.ones(1), no, end, {}


module.gym = MagicMock(make=lambda *_, **__: Simulator())
env = module.IsaacLabEnv("any", "cpu", 1, 0)
infos = [env.step(torch.zeros(1, 1))[3] for _ in range(30)]
ends = [info["observations"]["raw"]["obs"].item() for info in infos if info["time_outs"]]
bootstraps = "bootstrap = (truncations | ~dones).float()" in (folder / "train.py").read_text()
wrong = sum(obs != 3 for obs in ends) if bootstraps else 0
print(f"FastTD3 {COMMIT}: {wrong} of {len(ends)} time limits in state 3 bootstrap from {ends[0]:.0f}, the reset one")
sys.exit(0 if wrong else 1)
