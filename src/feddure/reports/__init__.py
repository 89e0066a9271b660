"""Pages, figures and tables of what was measured."""
