"""`feddure methods`: what can be trained."""

import inspect

from feddure.cli.tables import listing
from feddure.terminal import Console


def methods() -> None:
    """List the methods: what each does, what it learns from, and where its options are.

    Your own is named by import path: `--method package.module:Class`.
    """
    from feddure.methods import METHODS

    table = listing("method", "what it is", "unlabelled", "options")
    for name, method in METHODS.items():
        about = (inspect.getdoc(method) or "").partition("\n")[0]
        sections = ", ".join(f"{section}.*" for section in method.sections() if section != "options")
        table.add_row(name, about, "yes" if method.needs.unlabelled else "no", sections)
    Console().print(table)
