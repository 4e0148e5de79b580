"""Starts the processes of a job, shows their output, and leaves no process behind.

    launch ──► job ──► run ──ssh──► agent (one per host) ──► the user's program, in each process

An agent reserves a port for each process of its host, starts the processes once all addresses are known, forwards
signals, and returns output and exit codes over its single connection. It ends the processes and all their descendants
when the launcher asks for it or no longer runs.
"""
