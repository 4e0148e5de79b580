"""Starts the processes of a job, shows what they say, and leaves none of them behind.

    launch ──► job ──► run ──► supervisor (one a process, on its host) ──► the user's program

A supervisor holds its process' port, starts it when the addresses of all are known, passes signals on, and ends it,
with whatever it started, when the launcher says so or is no more.
"""
