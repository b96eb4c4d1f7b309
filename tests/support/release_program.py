"""Runs :mod:`tests.support.release_phases`.

It is a file of its own because megatron-core spawns processes when it saves, and they import what
was started: nothing here.

    python -m tests.support.release_program VERSION FOLDER RANK
"""

if __name__ == "__main__":
    from tests.support.release_phases import main

    main()
