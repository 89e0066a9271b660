"""Many experiments, each measured once: the store, the processes that share it, and Ray."""
