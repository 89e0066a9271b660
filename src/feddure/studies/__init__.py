"""The paper's tables, figures and theorems, with the paper's numbers or claims beside what was measured."""
