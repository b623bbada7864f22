"""The formats kvyard reads, one a file with its ``FORMAT``. ``kvyard.replay.traces.registry`` has the table of them."""
