"""Parts that connect processes: shared memory, lanes that bring steps to a replay, limits, weights, and the server."""
