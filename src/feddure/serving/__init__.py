"""The trained model at work: read from a run or a file, exported, and asked about images."""
