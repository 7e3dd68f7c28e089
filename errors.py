"""The one error of our own: a file that is there but can't be used."""


class DamagedFile(OSError):
    """A file isn't what it should be: cut short, altered, of another format. The message names it and what is wrong.

    It is an OSError because that is what callers already expect of file trouble, a missing file for instance; the
    command lines end with status 1 on any OSError and with status 2 on a ValueError, which is the caller's mistake.
    """
