"""Starts the processes of a job, shows their output, and leaves none of them behind.

    launch ──► job ──► run ──► host ──ssh──► agent (one per host) ──► the user's program, in each process

An agent reserves a port for each process of its host, starts the processes when all addresses are known, passes signals
on, and returns their output and exit codes over the one connection. It ends them, and everything that they started,
when the launcher asks for it or no longer runs.
"""
