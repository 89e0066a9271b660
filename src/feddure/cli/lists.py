"""Options that take several values with commas between them."""

from feddure.errors import ConfigError

_EXAMPLES = {
    "--methods": "fedavg-matched,feddure",
    "--settings": "iid-dir,dir-dir",
    "--datasets": "cifar10,fashion-mnist",
}


def names(option: str, text: str | None) -> list[str]:
    """The names in a text; none where the option was not given."""
    if text is None:
        return []
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise ConfigError(f"{option} {text}: expected names with commas between them, such as {_EXAMPLES[option]}")
    return found


def numbers(option: str, text: str) -> list[int]:
    """The whole numbers in a text."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"{option} {text}: expected whole numbers from 0 with commas between them, such as 0,1,2")
    return [int(word) for word in words]
