"""Everything relive raises on purpose.

::

    ReliveError
    ├── ParameterError (ValueError)    a value out of range, or not one of the choices
    ├── SchemaError (ValueError)       a schema, or data that does not fit it
    │   ├── SpaceError                 a Gymnasium space that has no fixed shape
    │   ├── FieldError                 a missing, unknown or badly named field; also a KeyError
    │   ├── ShapeError                 data of a wrong shape
    │   ├── DTypeError                 a dtype that cannot be stored without loss of meaning
    │   └── DeviceError                a tensor on another device than the buffer
    ├── NotFiniteError (ValueError)    NaN, infinity or a number out of range
    ├── LifecycleError (RuntimeError)  a call at the wrong time
    │   ├── FullError                  no room left
    │   ├── EmptyError                 nothing stored yet
    │   ├── UnfinishedError            a rollout used before it is complete
    │   └── WaitTimeoutError           nothing came in time; also a TimeoutError
    ├── InvariantError (AssertionError) stored data contradicts itself
    ├── EnvError (ValueError)          an environment that would give wrong training data
    └── FileFormatError (ValueError)   files that are foreign, incomplete or damaged
        └── NoSaveError                no save at the path; also a FileNotFoundError

    EpisodeEndWarning (UserWarning)    a warning: an episode's end seems to be stored wrongly

Each message says what was expected, what came, and what to do. Input is checked before anything is stored.
"""

from __future__ import annotations

from .printable import brief, printable

__all__ = [
    "DTypeError",
    "DeviceError",
    "EmptyError",
    "EnvError",
    "EpisodeEndWarning",
    "FieldError",
    "FileFormatError",
    "FullError",
    "InvariantError",
    "LifecycleError",
    "NoSaveError",
    "NotFiniteError",
    "ParameterError",
    "ReliveError",
    "SchemaError",
    "ShapeError",
    "SpaceError",
    "UnfinishedError",
    "WaitTimeoutError",
]


LONGEST = 10_000
"""The most characters of a message that are shown."""


class ReliveError(Exception):
    """Base of every error that relive raises on purpose. Its message is :func:`printable`, and not endless."""

    _keeps = "\n"  # a plan of memory, or an error of another process, has lines

    def __str__(self) -> str:
        message = Exception.__str__(self)  # a KeyError's own is a repr
        return printable(brief(message, LONGEST), self._keeps)


# The cause decides the class. These count as arguments as well: a capacity beyond the free memory, an index that was
# never issued, an environment that does not exist, and a place that a user's sampler returned.
class ParameterError(ReliveError, ValueError):
    """An argument of a constructor or of a call is out of range, or not one of the choices."""


class SchemaError(ReliveError, ValueError):
    """A schema is wrong, or data does not fit it."""

    _keeps = ""  # a name may come from a file, and no name begins a line


class SpaceError(SchemaError):
    """A Gymnasium space has no fixed shape and dtype to store."""


class FieldError(SchemaError, KeyError):
    """A field is missing, unknown or badly named."""


class ShapeError(SchemaError):
    """Data does not have the expected shape."""


class DTypeError(SchemaError):
    """A dtype cannot be stored in its field without loss of meaning."""


class DeviceError(SchemaError):
    """A tensor lives on another device than the buffer."""


class NotFiniteError(ReliveError, ValueError):
    """A value is NaN, infinite or out of range."""


class LifecycleError(ReliveError, RuntimeError):
    """A call came at the wrong time."""


class FullError(LifecycleError):
    """There is no room left in the buffer."""


class EmptyError(LifecycleError):
    """Nothing is stored yet."""


class UnfinishedError(LifecycleError):
    """A rollout was used before it was complete."""


class WaitTimeoutError(LifecycleError, TimeoutError):
    """A wait ended before its event came."""


class InvariantError(ReliveError, AssertionError):
    """Stored data contradicts itself: relive has a defect, or other code wrote to its memory."""


class EnvError(ReliveError, ValueError):
    """An environment would give wrong training data as it is."""


class FileFormatError(ReliveError, ValueError):
    """Files are foreign, damaged, incomplete or of another version, or could not be written as asked."""

    _keeps = ""  # as in SchemaError


class NoSaveError(FileFormatError, FileNotFoundError):
    """The path holds no completed save."""


class EpisodeEndWarning(UserWarning):
    """Episodes begin where the last ones ended, or an env was reset in mid-episode, or observations were overwritten.

    In the first case an ignored step was stored, or a reset observation was stored as a final one. In the last case
    each ``next_obs`` equals its ``obs``, although the env moved on. A collector warns if the final observations that an
    env hands out equal the reset observations, or are outside its observation space.
    """
