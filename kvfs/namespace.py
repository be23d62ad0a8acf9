"""A namespace of an open store: its identity and what is derived from it, computed once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvfs import chain
from kvfs.chain import Hash, PrefixHasher
from kvfs.errors import InputError
from kvfs.layout import EXTERNAL_HASH, Identity

if TYPE_CHECKING:
    from kvfs.keys import Chain, Key, KeyChain
    from kvfs.record import Shape


class Namespace:
    """One identity in one store. Safe to share between threads; only its number ever changes, with
    an index that was made anew (kvfs.catalog)."""

    __slots__ = (
        "__weakref__", "_shape", "_start", "block_tokens", "default_class", "identity", "keyed",
        "name", "nsid", "number", "root", "row_bytes",
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
        self.keyed = identity.hash == EXTERNAL_HASH
        """Blocks are named by keys of the engine, not by tokens."""
        self._start: Hash | None = None
        if self.keyed:
            from kvfs.keys import root_of

            self.root = root_of(identity)
        else:
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
        return self._hasher(tokens, lazy=False)

    def _hasher(self, tokens: Any, *, lazy: bool) -> PrefixHasher:
        if self._start is None:
            raise InputError(
                f"{self.name} is keyed by its engine: check_keys, put_keys and fetch_keys are for "
                "it, with keys and not with tokens"
            )
        return PrefixHasher(self.identity, tokens, state=self._start, lazy=lazy)

    def keys(
        self, keys: Iterable[Key], *, parent: Key | None = None, first_block: int = 0
    ) -> KeyChain:
        """Keys of the engine's own as what check, fetch and put take. See kvfs.keys.KeyChain.

        Raises InputError, also for a namespace that is keyed by tokens.
        """
        from kvfs.keys import KeyChain

        if not self.keyed:
            raise InputError(f"{self.name} is keyed by tokens ({self.identity.hash})")
        return KeyChain(self.identity, keys, parent=parent, first_block=first_block)

    def as_hasher(self, tokens: Any, *, lazy: bool = False) -> Chain:
        """`tokens` itself if it is a hasher, or keys, of this namespace, else a hasher over it.

        lazy: see PrefixHasher. Raises InputError.
        """
        if not hasattr(tokens, "keyed"):
            return self._hasher(tokens, lazy=lazy)
        named: Chain = tokens
        if named.root is not self.identity and named.root.fingerprint != self.identity.fingerprint:
            raise InputError(f"the hasher is of another namespace than {self.name}")
        return named

    def as_prefix(self, tokens: Any) -> PrefixHasher:
        """As `as_hasher`, for what needs the tokens themselves: keys are refused. InputError."""
        hasher = self.as_hasher(tokens)
        if not isinstance(hasher, PrefixHasher):
            raise InputError(f"{self.name} is keyed by its engine; this needs tokens")
        return hasher
