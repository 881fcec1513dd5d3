"""Everything relive raises on purpose.

::

    ReliveError
    ├── SchemaError (ValueError)       a schema, or data that does not fit it
    │   ├── SpaceError                 a Gymnasium space that has no fixed shape
    │   ├── FieldError                 a missing, unknown or badly named field
    │   ├── ShapeError                 a wrong shape or number of environments
    │   ├── DTypeError                 a dtype that cannot be stored without loss of meaning
    │   └── DeviceError                a tensor on another device than the buffer
    ├── NotFiniteError (ValueError)    NaN or infinity where numbers are needed
    ├── LifecycleError (RuntimeError)  a call at the wrong time
    │   ├── FullError                  no room left
    │   ├── EmptyError                 nothing stored yet
    │   └── UnfinishedError            a rollout used before it is complete
    ├── InvariantError (AssertionError) stored data contradicts itself
    ├── EnvError (ValueError)          an environment that cannot be learned from rightly
    └── FileFormatError (ValueError)   files that are foreign, incomplete or damaged
        └── NoSaveError                no save there, also a FileNotFoundError

    EpisodeEndWarning (UserWarning)    steps that look as if an episode's end was stored wrongly; a warning

Each message says the rule, what came, and what to do. Nothing is written to a buffer before its input was checked.
"""

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
    "ReliveError",
    "SchemaError",
    "ShapeError",
    "SpaceError",
    "UnfinishedError",
]


class ReliveError(Exception):
    """Base of every error that relive raises on purpose."""


class SchemaError(ReliveError, ValueError):
    """A schema is wrong, or data does not fit it."""


class SpaceError(SchemaError):
    """A Gymnasium space has no fixed shape and dtype to store."""


class FieldError(SchemaError):
    """A field is missing, unknown or badly named."""


class ShapeError(SchemaError):
    """A shape, or the number of environments, is not the expected one."""


class DTypeError(SchemaError):
    """A dtype cannot be stored in its field without loss of meaning."""


class DeviceError(SchemaError):
    """A tensor lives on another device than the buffer."""


class NotFiniteError(ReliveError, ValueError):
    """NaN or infinity, or a number out of range, came where others are needed."""


class LifecycleError(ReliveError, RuntimeError):
    """A call came at the wrong time."""


class FullError(LifecycleError):
    """There is no room left in the buffer."""


class EmptyError(LifecycleError):
    """Nothing is stored yet."""


class UnfinishedError(LifecycleError):
    """A rollout was used before it was complete."""


class InvariantError(ReliveError, AssertionError):
    """Stored data contradicts itself: a defect of relive, or memory that others wrote to."""


class EnvError(ReliveError, ValueError):
    """An environment cannot be learned from rightly as it is."""


class FileFormatError(ReliveError, ValueError):
    """Files are foreign, of another version, incomplete or damaged, or could not be written as asked."""


class NoSaveError(FileFormatError, FileNotFoundError):
    """There is no save at a path, or none was ever completed there."""


class EpisodeEndWarning(UserWarning):
    """Episodes begin where the last ones ended: an ignored step was stored, or a reset observation as a final one."""
