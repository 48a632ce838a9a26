"""Lets this process hold as many connections as its limit of streams allows."""

import resource


def allow_open_files(wanted: int) -> int:
    """Raise the soft limit of open files to `wanted`, as far as the hard limit allows.

    Returns:
        The limit that holds now; at least the one before.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
