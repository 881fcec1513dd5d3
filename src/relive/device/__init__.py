"""Replays whose rows and bookkeeping stay on a device, in torch operations that never wait for it."""
