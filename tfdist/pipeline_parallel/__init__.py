"""Pipeline parallelism: how a model is divided into stages, where they run, and in which order they compute."""
