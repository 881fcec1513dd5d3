"""The memory of rows: in RAM, on a device or in a store of the user; its layout, and how much a replay needs."""
