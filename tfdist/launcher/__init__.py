"""Starts the processes of a job, shows their output, and leaves none of them behind.

    launch ──► job ──► run ──► supervisor (one per process, on its host) ──► the user's program

A supervisor reserves a port for its process, starts the process when all addresses are known, and passes signals on. It
ends the process, and everything that the process started, when the launcher asks for it or no longer runs.
"""
