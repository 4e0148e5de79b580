"""The base classes of all strategies: the methods that users call, and the processes of a job."""
