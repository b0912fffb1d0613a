"""What every record is made of: the frozen base class, and numbers and sequences with their bounds."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, GetCoreSchemaHandler

_MOST = 10**30

Bytes = Annotated[int, Field(ge=0, le=_MOST)]
"""A number of bytes. The bound is beyond any sum of sizes that 64 bits address, and within what a float holds and a
table prints."""

Flops = Annotated[int, Field(ge=0, le=_MOST)]
"""A number of floating-point operations, one multiply-add being 2; bounded as `Bytes`."""

FlopsChange = Annotated[int, Field(ge=-_MOST, le=_MOST)]
"""FLOPs of one step beyond those of another: negative where it has fewer. Bounded as `Bytes`."""

Count = Annotated[int, Field(ge=0)]
"""How many there are of something."""

Tick = Annotated[int, Field(ge=0)]
"""A position in the order of allocations and frees."""

_Item = TypeVar("_Item")
_Key = TypeVar("_Key")
Many = Annotated[tuple[_Item, ...], FailFast()]
"""A sequence, of which validation reports the first wrong item: a file of a million wrong ones is refused as quickly as
a file of one."""


class _FailFastMapping:
    """What `FailFast` is to a sequence, for a mapping; pydantic's own takes mappings from 2.14 on."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {**handler(source), "fail_fast": True}


Mapped = Annotated[dict[_Key, _Item], _FailFastMapping()]
"""A mapping, of which validation reports the first wrong entry, as `Many` does of a sequence."""


class Record(BaseModel):
    """Base of all records: frozen, and refusing fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")
