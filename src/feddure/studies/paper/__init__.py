"""The paper's tables, charts and claims, beside what was measured."""
