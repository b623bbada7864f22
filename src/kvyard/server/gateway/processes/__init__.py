"""Several processes on one port, with one view: ``kvyard gateway --processes N``.

``process_group`` is the parent: it starts the processes, restarts those that end, and takes signals. ``hub`` is its other
half: it passes on what processes tell each other, and keeps what must be in one place. ``channel`` is a process's end of
that, ``part`` ties it to the process's gateway, ``process_bookings`` shares its load, and ``whole`` puts together what all of
them say.
"""
