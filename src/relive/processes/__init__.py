"""What connects processes: shared memory, waiting without spinning, and lanes, which bring steps to a replay."""
