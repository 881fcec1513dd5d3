"""Several rings that draw and learn as one: shards of a replay, and rollouts of several ranks."""
