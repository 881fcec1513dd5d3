"""Prints what an installed package says of another one: python tests/hosts/pinned.py mjlab rsl-rl-lib"""

import sys
from importlib.metadata import requires

package, other = sys.argv[1:]
print(next(line for line in requires(package) or () if line.startswith(other)))
