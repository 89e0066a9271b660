"""What this package raises when the user can do something about it."""


class FeddureError(Exception):
    """A mistake in the input: the message says what was given, what was expected and what to do."""


class DataError(FeddureError):
    """A data set is missing, damaged or not what it claims to be."""


class ConfigError(FeddureError):
    """A configuration cannot be used as written."""


class RunError(FeddureError):
    """A run folder or a checkpoint cannot be used as asked."""


class FeddureWarning(UserWarning):
    """Something went on in a way the user should know about."""
