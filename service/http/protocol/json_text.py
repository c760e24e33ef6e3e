"""Callers' JSON, of every call. A key whose value is null is absent: common clients send null for "none"."""

import json
from typing import Any, NoReturn

from expertd.service.http.protocol.errors import OipError
from expertd.service.memory import Buffer
from expertd.service.util.sentences import long_integer


def json_of(data: Buffer, where: str, instead: str = "") -> Any:
    """The value in `data`, whose objects have no key with null; elements of arrays may be null.

    instead  of numbers that are not finite: a hint
    Raises OipError (400), with `where` in its text.
    """
    try:
        return _DECODER.decode(str(data, "utf-8"))
    except UnicodeDecodeError as error:
        raise OipError(400, f"{where}: expected JSON in UTF-8, got {error.reason}") from error
    except json.JSONDecodeError as error:
        raise OipError(400, f"{where}: expected JSON, got invalid JSON: {error}") from error
    except _NotFiniteError as error:
        raise OipError(400, f"{where}: expected finite numbers in JSON, got {error}{instead}") from error
    except ValueError as error:
        raise OipError(400, f"{where}: {long_integer()}") from error
    except RecursionError as error:
        raise OipError(400, f"{where}: expected JSON, got arrays nested too deeply") from error


class _NotFiniteError(ValueError):
    pass


def _refuse_constant(name: str) -> NoReturn:
    raise _NotFiniteError(name)


def _without_nulls(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if value is not None}


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_hook=_without_nulls)
