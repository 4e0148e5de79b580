"""Carries arrays and bytes between the processes of a job by sockets; imports no TensorFlow.

    connections   who is connected with whom, and how connections begin
    session       how long others are waited for, and how all learn why the job ends
    ring, tree    the two algorithms of collective operations, and `costs`, which chooses between them
    hosts         processes of one host add up in memory, and their first ones exchange sums around a ring
    pairs         messages from one process to another, on connections that are made when they are first used
    sockets       all of these as one object

Every process of N has a constant number of connections: two of the ring, those of a tree in which each process has at
most `tree.FAN_OUT` children, and those of such a tree and ring where hosts have several processes.
"""
