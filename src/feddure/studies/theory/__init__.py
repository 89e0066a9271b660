"""The paper's two theorems, measured."""
