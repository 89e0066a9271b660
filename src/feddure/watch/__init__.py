"""A folder of runs, comparisons, sweeps and federations while they train, as a page that follows them."""
