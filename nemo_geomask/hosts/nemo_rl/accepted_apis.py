"""NeMo-RL APIs that the user accepts although they differ from the tested versions (``--accept API``).

The names are kept in an environment variable, because NeMo-RL passes the driver's variables on to its workers, which
check the APIs of their own code.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass

from nemo_geomask.errors import ConfigError, HostAPIError

VARIABLE = "NEMO_GEOMASK_ACCEPT"
"""Environment variable with the dotted names of the accepted APIs, separated by commas."""

_log = logging.getLogger("nemo_geomask")


@dataclass(frozen=True)
class APIDifference:
    """Difference of one API from its form in the tested versions.

    Attributes:
        api: dotted name of the API, as ``--accept`` takes it.
        message: the difference.
        is_missing: True if the installed version does not have the API, so that there is nothing to accept.
    """

    api: str
    message: str
    is_missing: bool = False


def accept(names: Iterable[str]) -> None:
    """Accept APIs, in this process and in those that NeMo-RL starts, beside those that are accepted already."""
    os.environ.update(as_variables(names))


def as_variables(names: Iterable[str]) -> dict[str, str]:
    """Return the environment variables of a process that accepts these APIs beside those that are accepted already."""
    names = accepted().union(name.strip() for name in names)
    return {VARIABLE: ",".join(sorted(names))} if names else {}


def accepted() -> frozenset[str]:
    """Return the names of the accepted APIs."""
    return frozenset(name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip())


def not_accepted(differences: Iterable[APIDifference]) -> list[APIDifference]:
    """Return the differences that are not accepted; an API that is missing cannot be."""
    return [difference for difference in differences if difference.is_missing or difference.api not in accepted()]


def warn_of_accepted(differences: Iterable[APIDifference]) -> None:
    """Log a warning of each difference that is accepted."""
    for difference in differences:
        if difference.api in accepted() and not difference.is_missing:
            _log.warning(
                "accepted at your own risk (--accept): %s differs from the tested versions of NeMo-RL: %s. What this "
                "run trains may not be what its recipe says",
                difference.api,
                difference.message.removeprefix(f"{difference.api} "),
            )


def check_accepted(differences: Iterable[APIDifference]) -> None:
    """Check that every accepted API is one that differs and can be accepted.

    Args:
        differences: of all APIs.

    Raises:
        ConfigError: an accepted API does not differ, or does not exist; the message lists those that differ.
        HostAPIError: the installed NeMo-RL does not have an accepted API.
    """
    by_api = {difference.api: difference for difference in differences}
    unknown = sorted(accepted() - by_api.keys())
    if unknown:
        acceptable = [name for name, difference in by_api.items() if not difference.is_missing]
        hint = f"accept one that differs: {', '.join(acceptable)}" if acceptable else "none differs here; leave it out"
        raise ConfigError(
            *(
                f"--accept {name}: NeMo-RL's API of this name does not differ from the tested versions, or is not one "
                f"that nemo_geomask relies on; {hint} (--accept or the environment variable {VARIABLE})"
                for name in unknown
            )
        )
    missing = sorted(name for name in accepted() if by_api[name].is_missing)
    if missing:
        raise HostAPIError(
            *(
                f"--accept {name}: {by_api[name].message}, so a run cannot go on with it; use a tested NeMo-RL"
                for name in missing
            )
        )


def way_out(differences: Iterable[APIDifference]) -> str:
    """Return the options that accept the differences, as the end of an error message; empty if one is missing."""
    differences = list(differences)
    if any(difference.is_missing for difference in differences):
        return ""
    options = " ".join(f"--accept {difference.api}" for difference in differences)
    return f", or go on at your own risk with {options}"
