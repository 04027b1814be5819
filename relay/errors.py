"""Errors of this package.

RelayError
├── SettingsRefused   an argument is wrong, or a file that it names; nothing has been connected (exit code 2)
├── MetadataRefused   the engine describes itself in a way that no relay can serve
├── GroupUnresolved   the address of the engine's group names no machine
└── RelayEnded        the relay cannot go on: its engine, its leader or its place is lost (exit code 1)
"""


class RelayError(Exception):
    """Root of the package's errors; ``args[0]`` is one line for people."""


class SettingsRefused(RelayError):
    """An argument or a file that it names is wrong; the text names the option and the remedy."""


class MetadataRefused(RelayError):
    """The engine's metadata cannot be used."""


class GroupUnresolved(RelayError):
    """The group's address could not be turned into addresses of machines."""


class RelayEnded(RelayError):
    """The relay has to end; the text is the reason, the last line that the process writes."""
