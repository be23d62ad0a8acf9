"""A namespace of an open store: its identity and what is derived from it, computed once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfs import chain
from kvfs.chain import PrefixHasher
from kvfs.layout import Identity

if TYPE_CHECKING:
    from kvfs.record import Shape


class Namespace:
    """One identity in one store. Immutable; safe to share between threads."""

    __slots__ = (
        "_shape", "_start", "block_tokens", "default_class", "identity", "name", "nsid", "number",
        "root", "row_bytes",
    )  # fmt: skip

    def __init__(self, identity: Identity, number: int, default_class: str) -> None:
        """number: the local index's number of it. Raises InputError, ConfigError (hash absent)."""
        self.identity = identity
        self.number = number
        self.default_class = default_class
        self.name = identity.name
        self.nsid = identity.nsid
        self._shape: Shape | None = None
        self.row_bytes = identity.row_bytes
        self.block_tokens = identity.block_tokens
        self._start = chain.start(identity)
        self.root = self._start.digest()

    @property
    def shape(self) -> Shape:
        """Where the fields of a record lie. Made when it is asked for: `check` never does."""
        if self._shape is None:
            from kvfs.record import Shape

            self._shape = Shape.of(self.identity)
        return self._shape

    @property
    def stride(self) -> int:
        """Bytes a block takes in a segment."""
        return self.shape.stride

    def hasher(self, tokens: Any = b"") -> PrefixHasher:
        """A hasher for one request. tokens: as for kvfs.chain.as_u32. Raises InputError."""
        return PrefixHasher(self.identity, tokens, state=self._start)

    def as_hasher(self, tokens: Any, *, lazy: bool = False) -> PrefixHasher:
        """`tokens` itself if it is a hasher of this namespace, else a new one over it.

        lazy: see PrefixHasher. Raises InputError.
        """
        if not isinstance(tokens, PrefixHasher):
            return PrefixHasher(self.identity, tokens, state=self._start, lazy=lazy)
        if (
            tokens.root is not self.identity
            and tokens.root.fingerprint != self.identity.fingerprint
        ):
            from kvfs.errors import InputError

            raise InputError(f"the hasher is of another namespace than {self.name}")
        return tokens
