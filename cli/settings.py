"""Where a setting comes from: the command line, the environment, a configuration file.

The first that has it wins:

  1. the option                       --store, --index, --ns
  2. the environment                  KVFS_STORE, KVFS_INDEX, KVFS_NAMESPACE
  3. the user's file                  $XDG_CONFIG_HOME/kvfs/config.toml, ~/.config/kvfs/config.toml
  4. the host's file                  /etc/kvfs/config.toml

$KVFS_CONFIG names one file to read in place of those two. A file holds any of `store`, `index` and
`namespace`, each a string. No file is opened if the command line and the environment say it all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from kvfs.errors import ConfigError, InputError

KEYS = ("store", "index", "namespace")
HOST_FILE = "/etc/kvfs/config.toml"
_OPTIONS = {
    "store": "--store or KVFS_STORE",
    "index": "--index or KVFS_INDEX",
    "namespace": "--ns or KVFS_NAMESPACE",
}


@dataclass(slots=True)
class Settings:
    """What the common options of one command say; filled by them."""

    given: dict[str, str] = field(default_factory=dict)
    """Key -> value of the command line or the environment."""
    as_json: bool = False
    _files: list[tuple[str, dict[str, str]]] | None = None

    def get(self, key: str) -> str | None:
        """The value of "store", "index" or "namespace", or None. Raises ConfigError."""
        if key in self.given:
            return self.given[key]
        if self._files is None:
            self._files = [(path, read(path)) for path in files()]
        for path, values in self._files:
            if key in values:
                value = os.path.expanduser(values[key])
                if key != "namespace" and not os.path.isabs(value):
                    raise ConfigError(f"{path}: {key} = {value!r} is not an absolute path")
                return value
        return None

    @property
    def store(self) -> str:
        """The path of the store. Raises InputError if nothing names one."""
        path = self.get("store")
        if path is None:
            raise InputError(f"which store? Give {_OPTIONS['store']}, or put it into {files()[0]}")
        return path

    @property
    def index(self) -> str | None:
        """The directory of this host's indexes; None: the library's default."""
        return self.get("index")

    @property
    def namespace(self) -> str | None:
        return self.get("namespace")


def files() -> list[str]:
    """The configuration files, the strongest first."""
    chosen = os.environ.get("KVFS_CONFIG")
    if chosen:
        return [chosen]
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return [os.path.join(home, "kvfs", "config.toml"), HOST_FILE]


def read(path: str) -> dict[str, str]:
    """The settings in a file; none if it does not exist. Raises ConfigError.

    A file that $KVFS_CONFIG names must exist.
    """
    try:
        with open(path, "rb") as f:
            text = f.read()
    except (FileNotFoundError, NotADirectoryError):
        if os.environ.get("KVFS_CONFIG"):
            raise ConfigError(f"{path}: KVFS_CONFIG names this file and it is not there") from None
        return {}
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from e
    return _parse(text, path)


def _parse(text: bytes, path: str) -> dict[str, str]:
    import tomllib

    try:
        values = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: {e}") from None
    for key, value in values.items():
        if key not in KEYS:
            raise ConfigError(f"{path}: unknown setting {key!r}; known are {', '.join(KEYS)}")
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{path}: {key} must be a string")
    return values
