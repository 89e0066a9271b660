"""What is measured with many runs: comparisons, sweeps, and the paper's tables, figures and theorems."""
