"""Where rows lie: in RAM or on a device, and how much of it they take."""
