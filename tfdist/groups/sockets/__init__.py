"""The algorithms by which sockets exchange arrays and bytes between the processes of a job; imports no TensorFlow.

    connections   which processes are connected, and how connections begin
    session       how data arrives, how long to wait for others, and how all learn why the job ends
    ring, tree    the two algorithms of collective operations, and `costs`, which chooses between them
    hosts         the processes of a host add in shared memory; their first processes exchange sums around a ring
    messages      from one process to another, over connections that are opened when they are first used

Every process has a constant number of connections: two of the ring, those of a tree in which each process has at most
`tfdist.jobs.tree.FAN_OUT` children, and those of such a tree and ring if hosts have several processes.
"""
