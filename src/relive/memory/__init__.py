"""The memory of rows: in RAM or on a device, its layout, and how much a replay needs."""
