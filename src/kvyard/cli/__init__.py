"""The ``kvyard`` command: turns arguments into calls, errors into sentences and exit codes. It has no logic of its own."""
