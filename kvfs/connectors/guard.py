"""Nothing raises into an engine: what goes wrong is a miss, a line in the log and a number.

For the methods that an engine calls. What they give instead must be safe for the engine: nothing
found, nothing stored, and never a wait for something that will not come. No I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

from kvfs.errors import InputError, KvfsError

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Callable[..., Any])


class Guarded(Protocol):
    """Whose methods are guarded."""

    def went_wrong(self) -> None:
        """Counts a call that failed. Must not raise."""


class Untold(InputError):
    """A miss that needs no words: why was said when it was found out."""


def never_raises(instead: Callable[..., Any]) -> Callable[[M], M]:
    """Gives what `instead` makes of a method's arguments, `self` among them, where it raises.

    instead: must not raise; it may do what is left to do, such as telling the engine that
    something it waits for failed.
    """

    def decorate(method: M) -> M:
        @wraps(method)
        def call(self: Guarded, *args: Any, **named: Any) -> Any:
            try:
                return method(self, *args, **named)
            except Untold:
                pass
            except Exception as e:
                self.went_wrong()
                # Of ours the message says it all; of others the place is what one needs.
                shown = not isinstance(e, KvfsError)
                log.warning(
                    "%s failed; it counts as a miss: %s", method.__name__, e, exc_info=shown
                )
            return instead(self, *args, **named)

        return cast(M, call)

    return decorate
